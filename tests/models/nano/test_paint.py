"""What painting tells training: pictures as Pillow draws them, labels and targets in place."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

from nano_toy import SHAPE, toy_face, toy_page  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

from models.nano.data.batches import collate  # noqa: E402
from models.nano.data.faces import CHARACTERS, Face, Metrics, face_glyphs, open_font  # noqa: E402
from models.nano.data.sheet import Page  # noqa: E402
from models.nano.tokenizer import FIRST_IMAGE_INDEX, NUM_PROMPT_IDS  # noqa: E402
from models.nano.train.heads import glyph_loss, initial_heads, text_loss  # noqa: E402
from models.nano.train.paint import NUM_CLASSES, Painted, Painter  # noqa: E402

GRID = (SHAPE.height // 16, SHAPE.width // 16)
NUM_IMAGE = GRID[0] * GRID[1] // 4


@pytest.fixture(scope="module")
def painter_and_pages(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Painter, list[Page], list[Face], Metrics]:
    font = tmp_path_factory.mktemp("font") / "face.ttf"
    font.write_bytes(ImageFont.load_default(20).font_bytes)
    faces, metrics = toy_face(font)
    small, big = face_glyphs(font)
    rng = np.random.default_rng(7)
    pages = [toy_page(metrics, rng) for _ in range(6)]
    return Painter(small[None], big[None], torch.device("cpu")), pages, faces, metrics


def picture(painted: Painted, row: int) -> np.ndarray:
    rows, columns = GRID[0] // 2, GRID[1] // 2
    split = painted.patches[row].view(rows, columns, 2, 2, 3, 16, 16)
    rgb = split.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, SHAPE.height, SHAPE.width)
    return ((rgb[0] + 1) * 127.5).numpy()


def cells(painted: Painted, row: int) -> np.ndarray:
    rows, columns = GRID[0] // 2, GRID[1] // 2
    split = painted.cells[row].view(rows, columns, 2, 2, 2, 4).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(SHAPE.height // 8, SHAPE.width // 4).numpy()


def test_clean_pages_look_as_pillow_draws_them(painter_and_pages: tuple) -> None:
    painter, pages, faces, _ = painter_and_pages
    painted = painter.paint(collate(pages, SHAPE), 0, clean=True)
    font = open_font(faces[0].path, 20)
    for row, page in enumerate(pages):
        want = Image.new("L", (SHAPE.width, SHAPE.height), 255)
        for char, corner in zip(page.char, page.corner, strict=True):
            at = (int(corner[0]), int(corner[1]))
            ImageDraw.Draw(want).text(at, CHARACTERS[char], fill=0, font=font, anchor="ls")
        got = picture(painted, row)
        np.testing.assert_allclose(got, np.asarray(want, float), atol=16)  # where glyphs overlap
        assert (got < 64).sum() > 50


def test_cells_name_the_glyph_whose_centre_they_hold(painter_and_pages: tuple) -> None:
    painter, pages, _, _ = painter_and_pages
    painted = painter.paint(collate(pages, SHAPE), 0, clean=True)
    for row, page in enumerate(pages):
        table = cells(painted, row)
        for (x, y), char in zip(page.centre, page.char, strict=True):
            assert table[int(y) // 8, int(x) // 4] == char
        assert (table > 0).sum() == len(page.char)


def test_targets_stand_where_a_query_reads_and_writes(painter_and_pages: tuple) -> None:
    painter, pages, _, _ = painter_and_pages
    painted = painter.paint(collate(pages, SHAPE), 0, clean=True)
    first = NUM_PROMPT_IDS + NUM_IMAGE
    for row, page in enumerate(pages):
        for place, glyph in enumerate(page.current):
            want = -1
            if glyph >= 0:
                x, y = page.centre[glyph]
                want = FIRST_IMAGE_INDEX + int(y) // 32 * (SHAPE.width // 32) + int(x) // 32
                assert painted.targets[1][row, first + place - 1] == want
            assert painted.targets[0][row, first + place] == want
            assert painted.labels[row, first + place - 1] == painted.texts[row, place]
        assert (painted.labels[row] >= 0).sum() == len(page.text) + 1
        assert painted.targets[1][row, first + len(page.text) :].max() == -1


def test_centres_follow_a_turned_page(painter_and_pages: tuple) -> None:
    painter, pages, _, _ = painter_and_pages
    batch = collate(pages, SHAPE)
    tone = painter._glyphs(batch, torch.from_numpy)
    moved_any = False
    for seed in range(8):
        rng = torch.Generator().manual_seed(seed)
        turned, centre = painter._turn(tone, torch.from_numpy(batch.centre), rng)
        for row, page in enumerate(pages):
            shift = centre[row, : len(page.char)] - torch.from_numpy(page.centre)
            moved_any |= bool(shift.abs().max() > 0.5)
            for (x0, y0), (x1, y1) in zip(page.centre, centre[row].tolist(), strict=False):
                if not (6 < x1 < SHAPE.width - 6 and 8 < y1 < SHAPE.height - 8):
                    continue
                around = tone[row, int(y0) - 5 : int(y0) + 6, int(x0) - 4 : int(x0) + 5]
                after = turned[row, int(y1) - 5 : int(y1) + 6, int(x1) - 4 : int(x1) + 5]
                if around.shape == after.shape:
                    assert abs(float(after.sum() - around.sum())) < 0.35 * float(around.sum()) + 2
    assert moved_any


def test_the_same_seed_paints_the_same(painter_and_pages: tuple) -> None:
    painter, pages, _, _ = painter_and_pages
    batch = collate(pages, SHAPE)
    first, again, other = (painter.paint(batch, seed) for seed in (3, 3, 4))
    assert torch.equal(first.patches, again.patches)
    assert not torch.equal(first.patches, other.patches)
    assert first.patches.abs().max() <= 1


def test_jpeg_rounding_is_lossless_for_flat_pages_and_loses_noise(painter_and_pages: tuple) -> None:
    painter = painter_and_pages[0]
    quality = torch.full((1, 1, 1), 50.0)
    flat = torch.full((1, 16, 16), 0.5)
    torch.testing.assert_close(painter._jpeg(flat, quality), flat, atol=0.01, rtol=0)
    noise = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(1))
    lost = (painter._jpeg(noise, quality) - noise).abs().mean()
    kept = (painter._jpeg(noise, torch.full((1, 1, 1), 100.0)) - noise).abs().mean()
    assert kept < 0.01 < lost < 0.2


def test_glyph_loss_counts_full_and_empty_cells_apart() -> None:
    heads = initial_heads(1)
    keys = ("norm.weight", "norm.bias", "weight", "bias")
    weights = [heads[f"patch.{key}"] for key in keys]
    table = torch.zeros(1, 16, 8, dtype=torch.long)
    table[0, 3, 5] = CHARACTERS.index("a")
    x = torch.randn(1, 16, 256)
    loss, right = glyph_loss(x, *weights, table, torch.float32)
    logits = torch.nn.functional.layer_norm(x, (256,)) @ weights[2].T
    logits = logits.view(-1, NUM_CLASSES).log_softmax(-1)
    flat = table.view(-1)
    each = -logits.gather(1, flat[:, None])[:, 0]
    torch.testing.assert_close(loss, each[flat > 0].mean() + each[flat == 0].mean())
    assert right in (0.0, 1.0)


def test_text_loss_tells_kinds_apart() -> None:
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, 6, 5]])
    kinds = torch.tensor([[0, 0, 0, 1, 1], [1, 0, 0, 2, 2]])
    mean, rows = text_loss(logits, labels, kinds)
    want = torch.nn.functional.cross_entropy(logits.view(-1, 7), labels.view(-1))
    torch.testing.assert_close(mean, want)
    assert rows[:, 2].tolist() == [2.0, 3.0]

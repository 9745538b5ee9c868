"""Pages: what the Markdown says is where the arrays say, and what training is told about it."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from nano_toy import toy_face
from PIL import Image, ImageFont

from models.nano.data import blocks
from models.nano.data.batches import collate
from models.nano.data.blocks import Column
from models.nano.data.corpus import NATURAL, RANDOM, Corpus, Writer, decode, encode
from models.nano.data.draw import Appearance, draw_page
from models.nano.data.faces import CHARACTERS, SIZES, SPACE, Face, Metrics
from models.nano.data.heldout import Entry, read_list
from models.nano.data.pages import LAYOUTS, SHAPES, Mix, PageMaker, Shape
from models.nano.data.sheet import Page, Sheet, Style, break_lines, following

TEXT = "The harbour handled 1284 ships in the third quarter, which is more than before."


@pytest.fixture(scope="module")
def font(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The face that Pillow brings along: ASCII only."""
    path = tmp_path_factory.mktemp("font") / "face.ttf"
    path.write_bytes(ImageFont.load_default(20).font_bytes)
    return path


@pytest.fixture(scope="module")
def made(font: Path) -> tuple[list[Face], Metrics]:
    return toy_face(font)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = random.randrange(2**32)
    print("seed", seed)
    return np.random.default_rng(seed)


def open_column(metrics: Metrics, rng: np.random.Generator, kind: int = NATURAL) -> Column:
    sheet = Sheet(512, 640, 879, metrics)
    writer = Writer(Corpus((TEXT, TEXT[::-1]), ("alpha", "beta", "gamma")), metrics)
    body = Style(0, SIZES.index(int(rng.choice((14, 16, 20)))), int(rng.integers(2)))
    return Column(rng, sheet, writer, kind, 20.0, 620.0, 10, 500, body, 0, body, 26, False, False)


def check(page: Page) -> None:
    """What must hold of every page."""
    shown = np.flatnonzero(page.current >= 0)
    assert sorted(page.current[shown]) == list(range(page.char.size))
    for place in shown:
        glyph = CHARACTERS[page.char[page.current[place]]]
        assert glyph == page.text[place] or (page.text[place] == "-" and glyph in "•–*-")  # noqa: RUF001
    assert (page.centre >= 0).all()
    assert (page.centre < (page.width, page.height)).all()
    assert len(page.kinds) == len(page.text)
    nearest = following(page.current)
    for place in range(len(page.text)):
        later = page.current[place:]
        assert nearest[place] == (later[later >= 0][0] if (later >= 0).any() else -1)


@pytest.mark.parametrize(
    "part", [blocks.paragraph, blocks.heading, blocks.bullets, blocks.numbered, blocks.table,
             blocks.form, blocks.code], ids=lambda part: part.__name__,
)  # fmt: skip
@pytest.mark.parametrize("kind", [NATURAL, RANDOM])
def test_parts_say_what_they_draw(
    part: Callable[[Column], bool],
    kind: int,
    made: tuple[list[Face], Metrics],
    rng: np.random.Generator,
) -> None:
    placed = 0
    for _ in range(12):
        column = open_column(made[1], rng, kind)
        placed += part(column)
        part(column)
        page = column.sheet.finish(part.__name__)
        check(page)
        assert len(page.text) <= column.sheet.limit
        assert column.y <= 540  # what is drawn ends at 500, a gap may follow
        signs = {"heading": "#", "bullets": "- ", "table": "| ", "code": "```\n"}
        if page.text:
            assert page.text.startswith(signs.get(part.__name__, ""))
    assert placed, "nothing was ever placed"


def test_a_table_has_as_many_cells_in_each_row(
    made: tuple[list[Face], Metrics], rng: np.random.Generator
) -> None:
    column = open_column(made[1], rng)
    while not blocks.table(column):
        pass
    rows = column.sheet.finish("table").text.split("\n")
    assert set(rows[1]) == set("|-")
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) >= 4


def test_ink_lies_around_the_centres(
    made: tuple[list[Face], Metrics], rng: np.random.Generator
) -> None:
    for fine in (False, True):
        column = open_column(made[1], rng)
        blocks.paragraph(column)
        page = column.sheet.finish("plain")
        dark = 255 - draw_page(page, made[0], Appearance(fine=fine), 0)[..., 0].astype(int)
        reach = column.body.pixels // 2
        inked = [
            dark[max(int(y) - reach, 0) : int(y) + reach, max(int(x) - 4, 0) : int(x) + 4].max()
            for x, y in page.centre
        ]
        assert np.mean(np.array(inked) > 60) > 0.95  # kerning moves a few further
        blank = dark[:, : int(page.centre[:, 0].min()) - column.body.pixels]
        assert blank.size == 0 or blank.max() < 30


def test_a_turned_page_is_turned(made: tuple[list[Face], Metrics]) -> None:
    column = open_column(made[1], np.random.default_rng(1))
    blocks.paragraph(column)
    page = column.sheet.finish("plain")
    flat = draw_page(page, made[0], Appearance(), 0)
    turned = draw_page(page, made[0], Appearance(degrees=1.0), 0)
    want = np.asarray(Image.fromarray(flat[..., 0]).rotate(-1.0, Image.Resampling.BICUBIC,
                                                          fillcolor=255), float)  # fmt: skip
    assert np.abs(turned[..., 0] - want).mean() < 0.35 * np.abs(flat[..., 0] - want).mean()


def test_lines_break_at_spaces() -> None:
    index = encode("aa bbb cccccccccc d")
    lines = break_lines(index, np.ones(index.size), 6)
    assert [decode(index[start:end]) for start, end in lines] == ["aa bbb", "cccccc", "cccc d"]
    lines = break_lines(index, np.ones(index.size), 6, indent=2)
    assert decode(index[slice(*lines[0])]) == "aa"


def test_random_text_has_no_words_of_the_corpus(made: tuple[list[Face], Metrics]) -> None:
    writer = open_column(made[1], np.random.default_rng(0)).writer
    rng = np.random.default_rng(5)
    texts = [writer.text(rng, RANDOM, 0, 200) for _ in range(50)]
    assert all(150 < len(text) <= 200 for text in texts)
    assert len(set("".join(texts))) > 80
    assert not any("harbour" in text for text in texts)


def test_batches_pad_and_end(made: tuple[list[Face], Metrics]) -> None:
    rng = np.random.default_rng(2)
    pages = []
    for _ in range(3):
        column = open_column(made[1], rng)
        blocks.paragraph(column)
        pages.append(column.sheet.finish("plain"))
    shape = Shape(512, 640, 880, 1280, (12, 24))
    batch = collate(pages, shape)
    for row, page in enumerate(pages):
        length = len(page.text)
        assert batch.lengths[row] == length + 1
        assert batch.texts[row, length] == 386
        assert (batch.texts[row, length + 1 :] == 384).all()
        assert (batch.glyph[row] >= 0).sum() == sum(char != " " for char in page.text)
        assert batch.following[row, length] == -1


def test_a_face_without_accents_is_refused(made: tuple[list[Face], Metrics]) -> None:
    writer = open_column(made[1], np.random.default_rng(0)).writer
    with pytest.raises(ValueError, match="expected all letters of Latin-1"):
        PageMaker(made[0], made[1], writer, held_out=False)


def test_the_same_seed_gives_the_same_page(made: tuple[list[Face], Metrics]) -> None:
    faces = [Face("toy", "mono", 0, held_out=False, path=made[0][0].path)]
    metrics = Metrics(made[1].advance, np.ones_like(made[1].covered), made[1].ambiguous)
    writer = Writer(Corpus((TEXT,), ("alpha",)), metrics)
    maker = PageMaker(faces, metrics, writer, held_out=False)
    for name, shape in SHAPES.items():
        mix = Mix((0.4, 0.4, 0.2), (1 / len(LAYOUTS),) * len(LAYOUTS))
        seed = random.randrange(2**40)
        page, again = maker.page(seed, shape, mix), maker.page(seed, shape, mix)
        print(name, seed)
        assert page.text == again.text
        assert (page.centre == again.centre).all()
        assert 0 < len(page.text) < shape.max_text


def test_the_frozen_list() -> None:
    entries = read_list()
    assert len(entries) == 500 == len({entry.seed for entry in entries})
    assert sorted(entry.words for entry in entries)[250] >= 120
    for field in ("layout", "shape"):
        assert {getattr(e, field) for e in entries} == set(LAYOUTS if field == "layout" else SHAPES)
    assert all(isinstance(entry, Entry) and len(entry.sha256) == 64 for entry in entries)


def test_space_is_no_glyph() -> None:
    assert CHARACTERS[SPACE] == " "
    assert decode(encode("a\u2603b")) == "ab"

"""The recurrent reader and saved checkpoints against transformers."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.nano.config import write_config  # noqa: E402
from models.nano.tokenizer import IDS, prompt_ids  # noqa: E402
from models.nano.train.decode import read_pages  # noqa: E402
from models.nano.train.export import export  # noqa: E402
from models.nano.train.forward import make_tables, padded_length  # noqa: E402
from models.nano.train.weights import (  # noqa: E402
    initial_weights,
    load_checkpoint,
    save_checkpoint,
)

HEIGHT, WIDTH, MAX_NEW = 64, 96, 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    weights = initial_weights(seed=11)
    generator = torch.Generator().manual_seed(5)
    for value in weights.values():
        value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    save_checkpoint(folder, weights, {"patch.bias": torch.randn(4, generator=generator)})
    return folder


def test_reading_is_what_transformers_generates(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path)
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32
    ).eval()
    weights, _ = load_checkpoint(run)
    num_image = HEIGHT * WIDTH // 1024
    patches = torch.rand(2, 4 * num_image, 768) * 2 - 1
    length = padded_length(num_image, MAX_NEW)
    tables = make_tables(HEIGHT, WIDTH, length, torch.device("cpu"))
    texts, _ = read_pages(weights, patches, tables, MAX_NEW)
    for row, want in zip(patches, texts, strict=True):
        ids = torch.tensor([prompt_ids(num_image)])
        got = model.generate(
            input_ids=ids,
            pixel_values=row.reshape(-1, 3, 1, 256).repeat(1, 1, 2, 1).reshape(-1, 1536),
            image_grid_thw=torch.tensor([[1, HEIGHT // 16, WIDTH // 16]]),
            mm_token_type_ids=(ids == IDS["<|image_pad|>"]).int(),
            max_new_tokens=MAX_NEW,
            do_sample=False,
        )[0, ids.shape[1] :].tolist()
        ends = [i for i, token in enumerate(got) if token in (IDS["<|im_end|>"], 384)]
        assert want == got[: ends[0] if ends else None]
        assert len(set(want)) > 3, "a reading that repeats one id shows little"


def test_checkpoint_comes_back_as_it_was_rounded(run: Path, tmp_path: Path) -> None:
    weights, heads = load_checkpoint(run)
    save_checkpoint(tmp_path, weights, heads)
    for ours, theirs in zip((weights, heads), load_checkpoint(tmp_path), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    assert set(heads) == {"patch.bias"}
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) == 2
    assert all(file.stat().st_size <= 16_000_000 for file in files)
    assert sum(file.stat().st_size for file in files) <= 26_000_000


def test_config_files_say_what_transformers_needs(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text) == prompt_ids(1)

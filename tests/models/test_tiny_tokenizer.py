"""The tokenizer and chat template that the tiny checkpoints share."""

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from data import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

DATA = Path(__file__).parents[1] / "data"
FOLDER = DATA / "tiny_qwen3_5"
NUM_BASE_IDS = 500
SPECIAL_IDS = {
    "<|image_pad|>": 500,
    "<|video_pad|>": 501,
    "<|vision_start|>": 502,
    "<|vision_end|>": 503,
    "<|endoftext|>": 504,
    "<|pad|>": 505,
    "<|im_start|>": 506,
    "<|im_end|>": 507,
    "<think>": 508,
    "</think>": 509,
    "<|reserved_0|>": 510,
    "<|reserved_1|>": 511,
}
# No unassigned characters: a newer Unicode, and so another NFC, may know them. The corpus has
# merges for its own characters, which random ones would hardly ever meet.
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])
TEXTS = st.text(ASSIGNED) | st.text(st.sampled_from(sorted(set(make_tokenizer.CORPUS))))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def byte_of_symbol() -> dict[str, int]:
    """The GPT-2 byte alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@cache
def token_bytes() -> dict[int, bytes]:
    vocab = tokenizer().get_vocab().items()
    base = {i: bytes(byte_of_symbol()[c] for c in t) for t, i in vocab if i < NUM_BASE_IDS}
    return base | {i: token.encode() for token, i in SPECIAL_IDS.items()}


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_ids() -> None:
    vocab = tokenizer().get_vocab()
    assert sorted(vocab.values()) == list(range(512))
    assert [vocab[symbol] for symbol in byte_of_symbol()] == list(range(256))
    assert {token: vocab[token] for token in SPECIAL_IDS} == SPECIAL_IDS
    model = json.loads((FOLDER / "tokenizer.json").read_text())["model"]
    assert [vocab[a + b] for a, b in model["merges"]] == list(range(256, NUM_BASE_IDS))


def test_ids_are_those_of_the_configs() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["image_token_id"] == SPECIAL_IDS["<|image_pad|>"]
    assert config["video_token_id"] == SPECIAL_IDS["<|video_pad|>"]
    assert config["vision_start_token_id"] == SPECIAL_IDS["<|vision_start|>"]
    assert config["vision_end_token_id"] == SPECIAL_IDS["<|vision_end|>"]
    assert config["text_config"]["eos_token_id"] == SPECIAL_IDS["<|endoftext|>"]
    generation = json.loads((DATA / "tiny_ratio3" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]]
    assert generation["pad_token_id"] == SPECIAL_IDS["<|pad|>"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_both_checkpoints_have_the_same_files(name: str) -> None:
    assert (FOLDER / name).read_bytes() == (DATA / "tiny_ratio3" / name).read_bytes()


def test_the_script_makes_these_files() -> None:
    assert make_tokenizer.make_tokenizer().get_vocab() == tokenizer().get_vocab()
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert make_tokenizer.tokenizer_config() == config
    assert (FOLDER / "chat_template.jinja").read_text() == make_tokenizer.CHAT_TEMPLATE


def test_merges_cut_characters() -> None:
    """A detokeniser that decodes id by id must fail on these."""
    merges = [token_bytes()[i] for i in range(256, NUM_BASE_IDS)]
    assert sum(not is_utf8(data) for data in merges) >= 50
    assert b"\xf0\x9f\x98" in merges  # ends inside a character
    assert b"\x91\x8d" in merges  # begins inside one
    assert b"\x91\x8d\xf0\x9f" in merges  # both
    assert all(is_utf8(token.encode()) for token in SPECIAL_IDS)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_round_trip(text: str) -> None:
    want = unicodedata.normalize("NFC", text)
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert b"".join(token_bytes()[i] for i in ids) == want.encode()
    assert tokenizer().decode(ids, skip_special_tokens=False) == want


@pytest.mark.parametrize("token", sorted(SPECIAL_IDS))
def test_special_token_is_one_id(token: str) -> None:
    ids = tokenizer().encode(f"a{token}b").ids
    assert ids == [*tokenizer().encode("a").ids, SPECIAL_IDS[token], *tokenizer().encode("b").ids]
    is_text = token in {"<think>", "</think>"}
    assert tokenizer().decode(ids) == (f"a{token}b" if is_text else "ab")


def test_split_pattern() -> None:
    pieces = tokenizer().pre_tokenizer.pre_tokenize_str("It's  x\u0301y 12,\n\n3")
    spans = [span for _, span in pieces]
    words = ["It", "'s", " ", " x\u0301y", " ", "1", "2", ",\n\n", "3"]  # a mark does not split
    assert ["It's  x\u0301y 12,\n\n3"[a:b] for a, b in spans] == words


def raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def render(messages: list[dict[str, Any]], *, trim_blocks: bool = True, **options: Any) -> str:  # noqa: ANN401
    env = ImmutableSandboxedEnvironment(trim_blocks=trim_blocks, lstrip_blocks=trim_blocks)
    env.globals["raise_exception"] = raise_exception
    template = env.from_string((FOLDER / "chat_template.jinja").read_text())
    return template.render(messages=messages, **options)


IMAGE = {"type": "image"}
PAGE = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Read this.\n"}]}]
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
USER = f"<|im_start|>user\n{PLACEHOLDER}Read this.<|im_end|>\n"


@pytest.mark.parametrize("trim_blocks", [True, False])
def test_chat_template_page(trim_blocks: bool) -> None:
    options = {"trim_blocks": trim_blocks, "add_generation_prompt": True}
    assert render(PAGE, trim_blocks=trim_blocks) == USER
    assert render(PAGE, **options) == USER + "<|im_start|>assistant\n<think>\n"
    answer = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(PAGE, **options, enable_thinking=False) == USER + answer
    ids = tokenizer().encode(render(PAGE, **options)).ids
    assert ids[0] == SPECIAL_IDS["<|im_start|>"]
    assert ids.count(SPECIAL_IDS["<|image_pad|>"]) == 1


def test_chat_template_turns() -> None:
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, IMAGE]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nd"},
    ]
    assert render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\na{PLACEHOLDER}{PLACEHOLDER}<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nd<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no user message"),
        ([{"role": "system", "content": [IMAGE]}, *PAGE], "images"),
        ([*PAGE, {"role": "system", "content": "late"}], "first"),
        ([*PAGE, {"role": "tool", "content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "video"}]}], "content type"),
    ],
)
def test_chat_template_refuses(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(messages)


@pytest.mark.parametrize("fixture", make_tokenizer.FOLDERS)
def test_transformers_reads_it(fixture: str) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(DATA / fixture)
    assert len(loaded) == 512
    assert (loaded.eos_token_id, loaded.pad_token_id) == (504, 505)
    text = make_tokenizer.CORPUS
    assert loaded(text)["input_ids"] == tokenizer().encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    want = render(PAGE, add_generation_prompt=True, enable_thinking=False)
    assert loaded.apply_chat_template(PAGE, **options) == want

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import _native
from runtime.vocabulary import byte_level_bytes, vocabulary_from_tokenizer, write_vocabulary

TOKENS = [b"a", "世".encode(), b"\xe4\xb8", b"<|im_end|>", b""]
COUNT_AT = 8
OFFSETS_AT = 12
FLAGS_AT = OFFSETS_AT + 4 * (len(TOKENS) + 1)


@pytest.fixture
def vocab_path(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.bin"
    write_vocabulary(path, TOKENS, special_ids=[3], unused_ids=[4])
    return path


def flags_of(vocabulary: _native.Vocabulary) -> list[tuple[bool, bool]]:
    return [
        (vocabulary.is_special(token_id), vocabulary.is_unused(token_id))
        for token_id in range(len(vocabulary))
    ]


def test_read_gives_what_was_written(vocab_path: Path) -> None:
    vocabulary = _native.Vocabulary(vocab_path)
    assert [vocabulary.token_bytes(token_id) for token_id in range(len(vocabulary))] == TOKENS
    assert flags_of(vocabulary) == [(False, False)] * 3 + [(True, False), (False, True)]


@given(st.lists(st.binary(max_size=6), max_size=20), st.data())
def test_read_gives_any_table_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes], data: st.DataObject
) -> None:
    ids = range(len(tokens))
    special = data.draw(st.sets(st.sampled_from(ids))) if tokens else set()
    empty = [token_id for token_id in ids if not tokens[token_id]]
    unused = data.draw(st.sets(st.sampled_from(empty))) if empty else set()
    path = tmp_path_factory.getbasetemp() / "any_vocab.bin"
    write_vocabulary(path, tokens, special, unused)
    for vocabulary in (
        _native.Vocabulary(path),
        _native.Vocabulary.from_tokens(tokens, sorted(special), sorted(unused)),
    ):
        assert [vocabulary.token_bytes(token_id) for token_id in ids] == tokens
        assert flags_of(vocabulary) == [(i in special, i in unused) for i in ids]


@pytest.mark.parametrize("token_id", [-1, -(2**31), len(TOKENS), 2**31 - 1])
def test_id_out_of_range_is_an_empty_piece(vocab_path: Path, token_id: int) -> None:
    vocabulary = _native.Vocabulary(vocab_path)
    assert vocabulary.token_bytes(token_id) == b""
    assert not vocabulary.is_special(token_id)
    assert vocabulary.is_unused(token_id)


def test_every_truncation_is_refused(vocab_path: Path) -> None:
    whole = vocab_path.read_bytes()
    for size in range(len(whole)):
        vocab_path.write_bytes(whole[:size])
        with pytest.raises(_native.EngineError):
            _native.Vocabulary(vocab_path)


def put(position: int, replacement: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:position] + replacement + whole[position + len(replacement) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(put(0, b"DFVOCAB2"), "expected to begin with DFVOCAB1", id="magic"),
        pytest.param(put(COUNT_AT, struct.pack("<I", 2**31)), "at most 2147483647", id="count"),
        pytest.param(put(COUNT_AT, struct.pack("<I", 2**31 - 1)), "need at least", id="size"),
        pytest.param(put(OFFSETS_AT, struct.pack("<I", 1)), "offset 0 of id 0", id="first"),
        pytest.param(
            put(OFFSETS_AT + 8, struct.pack("<I", 0)), "id 1 begins at 1 and ends at 0", id="order"
        ),
        pytest.param(
            put(OFFSETS_AT + 8, struct.pack("<I", 2**32 - 1)), "id 2 begins at", id="far offset"
        ),
        pytest.param(lambda whole: whole + b"x", "of a blob of 17 bytes", id="trailing byte"),
        pytest.param(put(FLAGS_AT, b"\x04"), "unknown flags 4 of id 0", id="flags"),
        pytest.param(put(FLAGS_AT + 1, b"\x02"), "unused id 1 must have no bytes", id="unused"),
    ],
)
def test_damaged_file_is_refused(
    vocab_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    vocab_path.write_bytes(damage(vocab_path.read_bytes()))
    with pytest.raises(_native.EngineError, match=message) as raised:
        _native.Vocabulary(vocab_path)
    assert str(vocab_path) in str(raised.value)


@given(st.binary(max_size=64))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk_vocab.bin"
    path.write_bytes(b"DFVOCAB1" + struct.pack("<I", 9) + junk[:48])
    with pytest.raises(_native.EngineError):
        _native.Vocabulary(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.bin", tmp_path):
        with pytest.raises(_native.EngineError):
            _native.Vocabulary(path)


@pytest.mark.parametrize("name", ["CapacityError", "EngineError", "CudaError", "EngineLost"])
def test_errors_are_runtime_errors_of_the_native_module(name: str) -> None:
    error = getattr(_native, name)
    assert issubclass(error, RuntimeError)
    assert error.__module__ == "runtime._native"
    assert error.__doc__


@pytest.mark.parametrize(
    ("special", "unused"), [([1], []), ([-1], []), ([], [1]), ([], [0])], ids=str
)
def test_bad_ids_are_refused(tmp_path: Path, special: list[int], unused: list[int]) -> None:
    with pytest.raises(ValueError, match="vocabulary: "):
        write_vocabulary(tmp_path / "vocab.bin", [b"a"], special, unused)
    assert not (tmp_path / "vocab.bin").exists()
    with pytest.raises(ValueError, match="vocabulary: "):
        _native.Vocabulary.from_tokens([b"a"], special, unused)


def test_byte_alphabet_covers_every_byte_once() -> None:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(code) for code in [*printable, *range(0x100, 0x144)]]
    assert sorted(byte_level_bytes("".join(alphabet))) == list(range(256))
    assert all(byte_level_bytes(chr(code)) == bytes([code]) for code in printable)


@pytest.mark.parametrize(
    ("token", "want"),
    [
        ("Ġworld", b" world"),
        ("Ċ", b"\n"),
        ("ä\u00b8ĸ", "世".encode()),
        ("ä\u00b8", b"\xe4\xb8"),
        ("<|im_end|>", b"<|im_end|>"),
        ("世", "世".encode()),  # not in the alphabet: itself
        ("", b""),
    ],
)
def test_byte_level_bytes(token: str, want: bytes) -> None:
    assert byte_level_bytes(token) == want


def tokenizer_json(**changes: object) -> dict[str, Any]:
    return {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "Ġb": 1, "ä\u00b8": 2, "<|end|>": 4},
            "merges": [],
        },
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [
            {"id": 4, "content": "<|end|>", "special": True},
            {"id": 5, "content": "<tool é>", "special": False},
        ],
    } | changes


def test_table_of_a_tokenizer() -> None:
    table = vocabulary_from_tokenizer(tokenizer_json(), vocab_size=8)
    end, tool = b"<|end|>", "<tool é>".encode()
    assert table.tokens == (b"a", b" b", b"\xe4\xb8", b"", end, tool, b"", b"")
    assert table.special_ids == (4,)
    assert table.unused_ids == (3, 6, 7)
    assert len(vocabulary_from_tokenizer(tokenizer_json()).tokens) == 6


@pytest.mark.parametrize(
    ("changes", "vocab_size", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, None, "BPE model, got Unigram"),
        ({"decoder": None}, None, r"ByteLevel decoder, got \[\]"),
        (
            {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip"}]}},
            None,
            "Fuse",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}}, None, "id 0 is both 'a' and 'b'"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}}}, None, "id -1 is negative"),
        ({}, 5, "ids up to 5 do not fit 5 rows"),
    ],
    ids=["model", "decoder", "sequence", "twice", "negative", "vocab_size"],
)
def test_unfit_tokenizer_is_refused(
    changes: dict[str, object], vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        vocabulary_from_tokenizer(tokenizer_json(**changes), vocab_size)


def test_table_decodes_as_the_tokenizers_library_does() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "naïve 世界 👩‍👩‍👧 ## END\n\ttab e\u0301"
    tokenizer.train_from_iterator([text] * 20, trainer)
    table = vocabulary_from_tokenizer(json.loads(tokenizer.to_str()))
    assert table.special_ids == (tokenizer.token_to_id("<|end|>"),)
    ids = tokenizer.encode(text).ids
    assert b"".join(table.tokens[i] for i in ids).decode() == text
    for cut in range(len(ids) + 1):
        want = tokenizer.decode(ids[:cut], skip_special_tokens=False)
        assert b"".join(table.tokens[i] for i in ids[:cut]).decode(errors="replace") == want

"""The tokenizer: every byte, one token a character, ids as training lays them out."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.nano.tokenizer import (
    FIRST_IMAGE_INDEX,
    IDS,
    NUM_BASE,
    NUM_PROMPT_IDS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    WIDE_CHARACTERS,
    byte_alphabet,
    char_ids,
    make_tokenizer,
    prompt_ids,
    write_tokenizer,
)
from runtime.vocabulary import vocabulary_from_tokenizer


def test_any_text_comes_back() -> None:
    tokenizer = make_tokenizer()
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    pool = [*map(chr, range(0x180)), *WIDE_CHARACTERS, *"日本語😀e\u0301\u0300ﬁ\u200b\ufeff"]
    for _ in range(200):
        text = "".join(rng.choices(pool, k=rng.randrange(40)))
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token_and_every_token_its_bytes() -> None:
    table = vocabulary_from_tokenizer(json.loads(make_tokenizer().to_str()), VOCAB_SIZE)
    assert sorted(table.tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert len(set(table.tokens[:NUM_BASE])) == NUM_BASE
    assert table.unused_ids == tuple(range(NUM_BASE + len(SPECIAL_TOKENS), VOCAB_SIZE))
    assert VOCAB_SIZE % 64 == 0
    every_byte = bytes(range(256)) * 2
    ids = [table.tokens.index(bytes([byte])) for byte in every_byte]
    assert b"".join(table.tokens[i] for i in ids) == every_byte


@pytest.mark.parametrize("char", [*map(chr, range(0x20, 0x7F)), "\n", *WIDE_CHARACTERS])
def test_a_character_is_one_token(char: str) -> None:
    (token,) = make_tokenizer().encode(char).ids
    assert char_ids(char).tolist() == [token]


def test_char_ids_are_the_tokenizers() -> None:
    text = "# Ünïcode “quoted” — ≤ 5 €\n\n| a | ½ |\n|---|---|\n"
    assert char_ids(text).tolist() == make_tokenizer().encode(text).ids
    with pytest.raises(ValueError, match="no token of its own"):
        char_ids("日")


def test_merges_do_not_cross_characters() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    tokenizer = make_tokenizer()
    for first in WIDE_CHARACTERS[::7]:
        for second in WIDE_CHARACTERS[::5]:
            assert len(tokenizer.encode(first + second).ids) == 2


def test_reserved_ids_and_prompt() -> None:
    reserved = [token for token in SPECIAL_TOKENS if "reserved" in token or "mask" in token]
    assert len(reserved) >= 9
    assert max(IDS.values()) < VOCAB_SIZE
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert make_tokenizer().encode(text).ids == prompt_ids(2)
    assert len(prompt_ids(2)) == NUM_PROMPT_IDS + 2
    assert prompt_ids(2)[FIRST_IMAGE_INDEX] == IDS["<|image_pad|>"]


def test_the_file_is_what_the_code_makes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    assert Tokenizer.from_str(text).encode("é—x").ids == char_ids("é—x").tolist()

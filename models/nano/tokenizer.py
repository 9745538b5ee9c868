"""The tokenizer of the nano model: one token a character, and a token for every byte.

    python -m models.nano.tokenizer --out DIR

Ids, in this order:

    0..255     the bytes, in the order of the GPT-2 byte alphabet (id 0 is "!")
    256..      lead bytes of three-byte characters, then the characters of `WIDE_CHARACTERS`,
               each built by merges that cannot cross a character
    NUM_BASE   `SPECIAL_TOKENS`, the drafter's mask and the reserved ids at the end
    VOCAB_SIZE rows of the embedding; a multiple of 64

There is no normaliser: any text comes back as it went in, and text outside `WIDE_CHARACTERS` is
spelled in bytes.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

LATIN_1 = "".join(chr(code) for code in range(0xA1, 0x100) if code != 0xAD) + "Œœ"
SYMBOLS = "–—‘’“”„†‡•…‰‹›€™←→↑↓≤≥≠≈∞√"  # noqa: RUF001 the characters themselves
WIDE_CHARACTERS = LATIN_1 + SYMBOLS
"""Characters of more than one byte that have a token of their own."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|draft_mask|>",
    *(f"<|reserved_{index}|>" for index in range(8)),
)
MAX_LENGTH = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('Unknown role: ' ~ message.role) -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'image' -%}
                {%- if message.role != 'user' -%}
                    {{- raise_exception('Only user messages may hold images.') -}}
                {%- endif -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif item.type == 'text' -%}
                {{- item.text -}}
            {%- else -%}
                {{- raise_exception('Unknown content type: ' ~ item.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@cache
def byte_alphabet() -> tuple[str, ...]:
    """Returns the 256 printable symbols that stand for the bytes, indexed by byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain}
    symbols |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
    return tuple(symbols[byte] for byte in range(256))


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the base vocabulary and the merges, both in the form of a BPE model."""
    alphabet = byte_alphabet()
    tokens = sorted(alphabet, key=ord)
    merges: list[tuple[str, str]] = []
    spelled = [[alphabet[byte] for byte in char.encode()] for char in WIDE_CHARACTERS]
    for lead in sorted({(s[0], s[1]) for s in spelled if len(s) == 3}):
        tokens.append("".join(lead))
        merges.append(lead)
    for symbols in spelled:
        tokens.append("".join(symbols))
        merges.append(("".join(symbols[:-1]), symbols[-1]))
    return {token: index for index, token in enumerate(tokens)}, merges


NUM_BASE = len(vocabulary()[0])
VOCAB_SIZE = -(-(NUM_BASE + len(SPECIAL_TOKENS)) // 64) * 64
IDS = {token: NUM_BASE + index for index, token in enumerate(SPECIAL_TOKENS)}
"""Ids of the special tokens."""


def make_tokenizer() -> Tokenizer:
    """Returns the tokenizer."""
    vocab, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


@cache
def _id_table() -> np.ndarray:
    tokenizer = make_tokenizer()
    table = np.full(0x2300, -1, np.int16)
    for char in [*map(chr, range(0x80)), *WIDE_CHARACTERS]:
        table[ord(char)] = tokenizer.encode(char).ids[0]
    return table


def char_ids(text: str) -> np.ndarray:
    """Returns the ids of a text whose characters all have tokens of their own.

    Args:
        text: ASCII and `WIDE_CHARACTERS`.

    Returns:
        [len(text)] int16, what the tokenizer gives.

    Raises:
        ValueError: A character is spelled in bytes.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    table = _id_table()
    ids = table[np.minimum(codes, table.size - 1)]
    if (ids < 0).any():
        raise ValueError(f"char_ids: {text[int((ids < 0).argmax())]!r} has no token of its own")
    return ids


def prompt_ids(num_image_tokens: int) -> list[int]:
    """Returns the ids of a prompt that holds one picture and no other text."""
    user, assistant = char_ids("user\n").tolist(), char_ids("assistant\n").tolist()
    image = [IDS["<|image_pad|>"]] * num_image_tokens
    return [
        IDS["<|im_start|>"], *user, IDS["<|vision_start|>"], *image, IDS["<|vision_end|>"],
        IDS["<|im_end|>"], *char_ids("\n").tolist(), IDS["<|im_start|>"], *assistant,
    ]  # fmt: skip


NUM_PROMPT_IDS = len(prompt_ids(0))
FIRST_IMAGE_INDEX = prompt_ids(1).index(IDS["<|image_pad|>"])
"""Place of the first image token in a prompt."""


def tokenizer_config() -> dict[str, Any]:
    """Returns what goes into `tokenizer_config.json`."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(IDS[token]): {"content": token, "special": True, **flags} for token in SPECIAL_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer files of a checkpoint."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the tokenizer files.")
    parser.add_argument("--out", type=Path, required=True)
    write_tokenizer(parser.parse_args().out)

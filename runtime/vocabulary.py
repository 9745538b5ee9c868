"""The id -> bytes table of an engine directory: made from a tokenizer, written as `vocab.bin`.

`runtime/src/vocabulary.h` describes the file and reads it.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

_MAGIC = b"DFVOCAB1"
_SPECIAL = 1
_UNUSED = 2
_MAX_BLOB_BYTES = 2**32 - 1


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class VocabularyTable:
    """What `vocab.bin` holds.

    Attributes:
        tokens: The bytes of each id.
        special_ids: Ids of control tokens, ascending.
        unused_ids: Ids that no token owns, ascending; their bytes are empty.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    unused_ids: tuple[int, ...]


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a token that is spelled in GPT-2's byte alphabet.

    A token with any character outside of the alphabet stands for its own UTF-8, as it does for
    the ByteLevel decoder of `tokenizers`.

    Args:
        token: The token as `tokenizer.json` spells it.
    """
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def vocabulary_from_tokenizer(
    tokenizer_json: Mapping[str, Any], vocab_size: int | None = None
) -> VocabularyTable:
    """Derives the table of a byte-level BPE tokenizer.

    Added tokens stand for their text and win over an entry of the model with the same id. Ids
    that neither names are unused, and so is what is added up to `vocab_size`.

    Args:
        tokenizer_json: The content of a Hugging Face `tokenizer.json`.
        vocab_size: Rows of the model's output matrix; the highest id + 1 if not given.

    Raises:
        ValueError: The tokenizer is not byte-level BPE, an id stands for two tokens, or
            `vocab_size` is too small.
    """
    model_type = tokenizer_json["model"].get("type")
    if model_type != "BPE":
        raise ValueError(f"tokenizer: expected a BPE model, got {model_type}")
    decoders = _decoder_types(tokenizer_json.get("decoder"))
    if decoders != ["ByteLevel"]:
        raise ValueError(f"tokenizer: expected a ByteLevel decoder, got {decoders}")

    text_of: dict[int, str] = {}
    for text, token_id in tokenizer_json["model"]["vocab"].items():
        other = text_of.setdefault(token_id, text)
        if other != text:
            raise ValueError(f"tokenizer: id {token_id} is both {other!r} and {text!r}")
    bytes_of = {token_id: byte_level_bytes(text) for token_id, text in text_of.items()}

    added_of: dict[int, str] = {}
    special_ids = set()
    for added in tokenizer_json.get("added_tokens") or ():
        token_id, text = added["id"], added["content"]
        other = added_of.setdefault(token_id, text)
        if other != text:
            raise ValueError(f"tokenizer: id {token_id} is both {other!r} and {text!r}")
        bytes_of[token_id] = text.encode()
        if added["special"]:
            special_ids.add(token_id)

    lowest, num_ids = min(bytes_of, default=0), max(bytes_of, default=-1) + 1
    if lowest < 0:
        raise ValueError(f"tokenizer: id {lowest} is negative")
    if vocab_size is not None and vocab_size < num_ids:
        raise ValueError(f"tokenizer: ids up to {num_ids - 1} do not fit {vocab_size} rows")
    size = num_ids if vocab_size is None else vocab_size
    return VocabularyTable(
        tokens=tuple(bytes_of.get(token_id, b"") for token_id in range(size)),
        special_ids=tuple(sorted(special_ids)),
        unused_ids=tuple(token_id for token_id in range(size) if token_id not in bytes_of),
    )


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    return [decoder["type"]]


def write_vocabulary(
    path: Path,
    tokens: Sequence[bytes],
    special_ids: Collection[int],
    unused_ids: Collection[int],
) -> None:
    """Writes `vocab.bin`.

    Args:
        path: The file; replaced if it exists.
        tokens: The bytes of each id.
        special_ids: Ids of control tokens.
        unused_ids: Ids that no token owns; their bytes are empty.

    Raises:
        ValueError: An id is out of range, an unused one has bytes, or the tokens are longer than
            4 GiB together.
    """
    flags = bytearray(len(tokens))
    for ids, flag in ((special_ids, _SPECIAL), (unused_ids, _UNUSED)):
        for token_id in ids:
            if not 0 <= token_id < len(tokens):
                raise ValueError(f"vocabulary: id {token_id} is not one of {len(tokens)} tokens")
            flags[token_id] |= flag
    for token_id in unused_ids:
        if tokens[token_id]:
            raise ValueError(
                f"vocabulary: unused id {token_id} must have no bytes, has {len(tokens[token_id])}"
            )
    offsets = [0, *accumulate(map(len, tokens))]
    if offsets[-1] > _MAX_BLOB_BYTES:
        raise ValueError("vocabulary: the tokens are longer than 4 GiB together")
    path.write_bytes(
        b"".join(
            (
                _MAGIC,
                struct.pack(f"<I{len(offsets)}I", len(tokens), *offsets),
                flags,
                *tokens,
            )
        )
    )

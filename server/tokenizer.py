"""Text to token ids. Control tokens come from templates and raw prompts, never from user text.

Two encoders are made of one tokenizer file: the *control* encoder reads special tokens where they
are spelled; the *plain* encoder has no added tokens at all, so spelling one gives ordinary pieces.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

# A normaliser such as NFC makes text shorter; no canonical composition saves more than this.
_NORMALIZER_SHRINK = 4


class ControlTokenError(ValueError):
    """Plain text came out as a control token, which the vocabulary itself holds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt.

    Attributes:
        text: The text.
        plain: True: special tokens spelled in it are ordinary text.
    """

    text: str
    plain: bool = False


class Tokenizer:
    """The two encoders of one `tokenizer.json`."""

    def __init__(self, document: str) -> None:
        """Builds the encoders.

        Args:
            document: Content of `tokenizer.json`.

        Raises:
            ValueError: The document is not a tokenizer.
        """
        try:
            parsed: dict[str, Any] = json.loads(document)
            added: list[dict[str, Any]] = parsed.get("added_tokens") or []
            self._control = HfTokenizer.from_str(document)
            self._plain = HfTokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))
        except Exception as error:  # the wheel raises plain Exception
            raise ValueError(f"tokenizer.json is not readable: {error}") from error
        # The file may ask for truncation or padding, which are matters of training.
        for encoder in (self._control, self._plain):
            encoder.no_truncation()
            encoder.no_padding()
        self.added_token_ids = frozenset(int(token["id"]) for token in added)
        self.added_tokens = tuple(str(token["content"]) for token in added)
        self.special_tokens = tuple(
            str(token["content"]) for token in added if token.get("special", False)
        )
        self.max_token_id = max(
            self._control.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self._max_piece_bytes = self._longest_piece_bytes(parsed)

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Reads `tokenizer.json`.

        Raises:
            ValueError: The file is not a tokenizer.
        """
        return cls(path.read_text(encoding="utf-8"))

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least, without tokenising it."""
        if self._max_piece_bytes == 0:
            return 0
        return len(text.encode()) // self._max_piece_bytes

    def encode(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Returns the token ids of the pieces in order; the GIL is free meanwhile.

        Raises:
            ControlTokenError: A plain piece came out as a control token.
        """
        ids: list[int] = []
        for piece in pieces:
            encoder = self._plain if piece.plain else self._control
            # The fast form leaves out the offsets.
            (encoding,) = encoder.encode_batch_fast([piece.text], add_special_tokens=False)
            piece_ids = encoding.ids
            if piece.plain and not self.added_token_ids.isdisjoint(piece_ids):
                raise ControlTokenError(f"text spells the control token {piece.text[:64]!r}")
            ids.extend(piece_ids)
        return tuple(ids)

    def _longest_piece_bytes(self, parsed: dict[str, Any]) -> int:
        """Returns the most input bytes a token can stand for; 0 when the kind has no bound."""
        if "ByteLevel" not in json.dumps(parsed.get("pre_tokenizer")):
            return 0
        # A byte-level vocabulary spells each byte as one character.
        longest = max((len(token) for token in self._plain.get_vocab()), default=1)
        longest = max(longest, *(len(token.encode()) for token in self.added_tokens), 1)
        return longest * (_NORMALIZER_SHRINK if parsed.get("normalizer") else 1)


def spelled_tokens(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern that finds any of the tokens, longest first; None for no tokens."""
    if not tokens:
        return None
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in ordered))

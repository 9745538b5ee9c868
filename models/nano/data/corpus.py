"""What pages say: natural text, words without context, and strings that can only be read."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.nano.data.faces import CHARACTERS, INDEX, SPACE, Metrics

NATURAL, RANDOM, SALAD = 0, 1, 2
"""Kinds of text, as losses and scores tell them apart."""

NUM_ASCII = 95
HELD_OUT_WORDS = 8
"""Of this many words in a row, the first is held out."""

_ACCENTED = [i for i, char in enumerate(CHARACTERS) if char.isalpha() and ord(char) > 0x7F]
_PLAIN = [i for i, char in enumerate(CHARACTERS) if char.isalnum() and ord(char) <= 0x7F]
_LOWER = [i for i, char in enumerate(CHARACTERS) if "a" <= char <= "z"]
_CODE = [CHARACTERS.index(char) for char in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:-/"]


def encode(text: str) -> np.ndarray:
    """Returns the character indices of a text; those that pages do not have are left out."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    index = INDEX[np.minimum(codes, INDEX.size - 1)]
    return index[index >= 0]


def decode(index: np.ndarray) -> str:
    """The inverse of `encode`."""
    return "".join(CHARACTERS[i] for i in index)


@dataclass(frozen=True)
class Corpus:
    """Paragraphs and words, of one side of the split."""

    paragraphs: tuple[str, ...]
    words: tuple[str, ...]


def load_corpus(cache: Path, *, held_out: bool) -> Corpus:
    """Reads the side of the split that is named: held out, or the rest."""
    paragraphs = []
    with (cache / "text.jsonl").open() as lines:
        for line in lines:
            side, text = json.loads(line)
            if bool(side) == held_out:
                known = decode(encode(text))
                if len(known) > 0.97 * len(text):
                    paragraphs.append(" ".join(known.split()))
    words = (cache / "words.txt").read_text().split()
    side = [w for i, w in enumerate(words) if (i % HELD_OUT_WORDS == 0) == held_out]
    return Corpus(tuple(paragraphs), tuple(side))


class Writer:
    """Draws texts for pages; its randomness is the caller's."""

    def __init__(self, corpus: Corpus, metrics: Metrics) -> None:
        """Prepares the alphabets of each face."""
        self._corpus = corpus
        weight = np.full(len(CHARACTERS), 0.6)
        weight[_PLAIN] = 1.6
        weight[NUM_ASCII:] = 0.25
        weight[_ACCENTED] = 0.3
        lower = np.zeros(len(CHARACTERS))
        lower[_LOWER] = 1.0
        lower[_ACCENTED] = 0.05
        code = np.zeros(len(CHARACTERS))
        code[_CODE] = 1.0
        usable = metrics.covered & ~metrics.ambiguous
        usable[:, SPACE] = False
        tables = np.stack([weight, lower, code])[None] * usable[:, None]
        self._alphabet = np.cumsum(tables / tables.sum(-1, keepdims=True), -1)
        self._alphabet[..., -1] = 1.0
        self._covered = metrics.covered

    def text(self, rng: np.random.Generator, kind: int, face: int, length: int) -> str:
        """Returns a text of about so many characters, without blanks at the ends.

        Args:
            rng: Source of randomness.
            kind: `NATURAL`, `RANDOM` or `SALAD`.
            face: The face that will draw it; what it lacks is left out.
            length: At most so many characters.
        """
        if kind == RANDOM:
            return self._random(rng, face, length)
        if kind == SALAD:
            picks = rng.integers(len(self._corpus.words), size=length // 6 + 1)
            text = " ".join(self._corpus.words[i] for i in picks)
        else:
            text = self._corpus.paragraphs[rng.integers(len(self._corpus.paragraphs))]
            while len(text) < length:
                text += " " + self._corpus.paragraphs[rng.integers(len(self._corpus.paragraphs))]
            if len(text) > length and rng.random() < 0.5:
                start = text.find(" ", int(rng.integers(len(text) - length + 1))) + 1
                text = text[start:]
        text = text[:length].rsplit(" ", 1)[0] if len(text) > length else text
        index = encode(text)
        return " ".join(decode(index[self._covered[face, index]]).split())

    def words(self, rng: np.random.Generator, kind: int, face: int, count: int) -> str:
        """Returns a few words in the manner of a title or a cell."""
        if kind == RANDOM:
            return self._random(rng, face, int(rng.integers(2, 4 + 7 * count)))
        text = self.text(rng, kind, face, 40 + 12 * count).split()
        start = int(rng.integers(max(len(text) - count, 0) + 1))
        words = " ".join(text[start : start + count]).strip(".,;:()")
        return words[:1].upper() + words[1:]

    def _random(self, rng: np.random.Generator, face: int, length: int) -> str:
        table = int(rng.choice(3, p=(0.5, 0.3, 0.2)))
        index = np.searchsorted(self._alphabet[face, table], rng.random(length), side="right")
        ends = np.cumsum(rng.integers(2, 11, size=length // 2 + 1)) - 1
        index[ends[ends < length]] = SPACE
        return " ".join(decode(index).split())

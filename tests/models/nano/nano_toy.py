"""A task small enough for a CPU: one line of a few letters, one face, one size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.nano.data.batches import Batch, Order, collate
from models.nano.data.corpus import RANDOM, encode
from models.nano.data.faces import CHARACTERS, NUM_SMALL, SIZES, Face, Metrics, face_metrics
from models.nano.data.pages import Shape
from models.nano.data.sheet import Page, Sheet, Style

SHAPE = Shape(32, 128, 24, 64, (20, 20))
LETTERS = "abcdefgh"
STYLE = Style(face=0, size=SIZES.index(20), mode=0)


def toy_face(font: Path) -> tuple[list[Face], Metrics]:
    advance, covered, ambiguous = face_metrics(font)
    metrics = Metrics(advance[None], covered[None], ambiguous[None])
    return [Face("toy", "sans", 0, held_out=False, path=font)], metrics


def toy_page(metrics: Metrics, rng: np.random.Generator) -> Page:
    sheet = Sheet(SHAPE.height, SHAPE.width, SHAPE.max_text - 1, metrics)
    letters = rng.choice(list(LETTERS), size=11)
    letters[rng.integers(2, 8)] = " "
    index = encode("".join(letters))
    widths = np.cumsum(sheet.advances(index, STYLE))
    index = index[: int(np.searchsorted(widths, SHAPE.width - 8))]
    sheet.write(index, STYLE, float(rng.uniform(2, 6)), int(rng.integers(20, 25)), RANDOM)
    return sheet.finish("toy")


class ToyLoader:
    """Stands in for the worker processes."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def batches(self, order: Order) -> Iterator[Batch]:
        for number in range(10**9):
            rng = np.random.Generator(np.random.PCG64([order.seed, number]))
            count = order.shapes[0][1]
            yield collate([toy_page(self.metrics, rng) for _ in range(count)], SHAPE)


def toy_glyphs(font: Path) -> tuple[np.ndarray, np.ndarray]:
    """Draws the letters in the one size, and nothing else."""
    from models.nano.data.faces import SMALL_CELL, SMALL_ORIGIN, VARIANTS, _stamp, open_font

    small = np.zeros((1, NUM_SMALL, VARIANTS, len(CHARACTERS), SMALL_CELL, SMALL_CELL), np.uint8)
    for letter in LETTERS:
        image = _stamp(open_font(font, 20), letter, SMALL_CELL, *SMALL_ORIGIN)
        small[0, STYLE.size, 0, CHARACTERS.index(letter)] = image
    return small, np.zeros((1, 1, 64, 64), np.uint8)

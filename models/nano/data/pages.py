"""Pages from seeds: shape, faces, sizes, layout and text, all drawn from one generator."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from models.nano.data import blocks
from models.nano.data.blocks import Column
from models.nano.data.corpus import NATURAL, RANDOM, SALAD, Writer, encode
from models.nano.data.faces import SIZES, Face, Metrics, nearest_size
from models.nano.data.sheet import Page, Sheet, Style


@dataclass(frozen=True)
class Shape:
    """A page shape.

    Attributes:
        height: Pixels, a multiple of 32; `width` alike.
        width: See above.
        max_text: Ids behind the prompt, the end included.
        num_tokens: Length of training sequences; shapes that agree in it share compiled graphs.
        sizes: Least and greatest size of running text, pixels an em.
    """

    height: int
    width: int
    max_text: int
    num_tokens: int
    sizes: tuple[int, int]


SHAPES = {
    "strip": Shape(96, 256, 83, 128, (13, 22)),
    "card": Shape(256, 448, 315, 448, (12, 24)),
    "half": Shape(384, 512, 555, 1280, (12, 24)),
    "wide": Shape(512, 640, 880, 1280, (12, 24)),
    "tall": Shape(640, 512, 880, 1280, (12, 24)),
    "sheet": Shape(736, 512, 880, 1280, (12, 24)),
}
"""The shapes that pages are trained and scored on."""

LAYOUTS: dict[str, tuple[Callable[[Column], bool], ...]] = {
    "plain": (blocks.paragraph,),
    "article": (blocks.paragraph, blocks.paragraph, blocks.heading, blocks.bullets,
                blocks.numbered),
    "columns": (blocks.paragraph, blocks.paragraph, blocks.heading, blocks.bullets),
    "table": (blocks.table, blocks.table, blocks.paragraph, blocks.heading),
    "form": (blocks.form, blocks.form, blocks.paragraph, blocks.heading),
    "code": (blocks.code, blocks.paragraph, blocks.heading, blocks.bullets),
}  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """How often what comes.

    Attributes:
        kinds: Shares of natural, random and word-salad pages.
        layouts: Share of each of `LAYOUTS`, in their order.
    """

    kinds: tuple[float, float, float]
    layouts: tuple[float, ...]


class PageMaker:
    """Makes pages; the same seed gives the same page."""

    def __init__(
        self, faces: list[Face], metrics: Metrics, writer: Writer, *, held_out: bool
    ) -> None:
        """Sorts the faces of one side of the split.

        Args:
            faces: All faces.
            metrics: Of the same faces.
            writer: Source of text.
            held_out: Which side's faces to use.

        Raises:
            ValueError: A face lacks a letter that every page may need.
        """
        self._metrics, self._writer = metrics, writer
        families: dict[str, list[int]] = {}
        needed = encode("".join(map(chr, range(0xC0, 0x100))))
        for index, face in enumerate(faces):
            if not metrics.covered[index, needed].all() or not metrics.covered[index, :95].all():
                raise ValueError(f"{face.path.name}: expected all letters of Latin-1")
            if face.held_out == held_out:
                families.setdefault(face.family, []).append(index)
        self._families = list(families.values())
        self._mono = [f for f in self._families if faces[f[0]].kind == "mono"]
        self._weights = [faces[i].weight for i in range(len(faces))]

    def page(self, seed: int, shape: Shape, mix: Mix) -> Page:
        """Returns the page of a seed."""
        rng = np.random.Generator(np.random.PCG64(seed))
        layout = list(LAYOUTS)[int(rng.choice(len(LAYOUTS), p=mix.layouts))]
        kind = int(rng.choice(3, p=mix.kinds))
        sheet = Sheet(shape.height, shape.width, shape.max_text - 1, self._metrics)
        for column in self._columns(rng, sheet, shape, layout, kind):
            misses = 0
            while misses < 3 and sheet.room > 16:
                parts = LAYOUTS[layout]
                part = parts[int(rng.integers(len(parts)))]
                if rng.random() < 0.2 and layout != "plain":
                    column.kind = int(rng.choice(3, p=mix.kinds))
                misses = 0 if part(column) else misses + 1
                if layout == "plain" and shape.max_text < 100 and sheet.length:
                    break
        self._number(rng, sheet, column)
        return sheet.finish(layout)

    def _columns(
        self, rng: np.random.Generator, sheet: Sheet, shape: Shape, layout: str, kind: int
    ) -> list[Column]:
        family = self._families[int(rng.integers(len(self._families)))]
        mono = self._mono[int(rng.integers(len(self._mono)))]
        weight = (0, 0, 0, 0, 0, 0, 1, 2)[int(rng.integers(8))]
        body_face = next((f for f in family if self._weights[f] == weight), family[0])
        bold = next((f for f in family if self._weights[f] == 1), family[0])
        low, high = shape.sizes
        top = min(high, low + 5) if layout == "columns" else high
        pixels = low + (top - low) * rng.beta(1.6, 1.8)
        mode = int(rng.integers(2))
        body = Style(body_face, nearest_size(pixels), mode)
        code_size = nearest_size(max(pixels * rng.uniform(0.8, 1.0), SIZES[0]))
        pitch = round(body.pixels * rng.uniform(1.2, 1.65))
        margin = rng.uniform(0.02, 0.09) * shape.width
        left, right = margin, shape.width - rng.uniform(0.02, 0.09) * shape.width
        top_y = round(rng.uniform(0.01, 0.09) * shape.height)
        bottom = round(shape.height * (1 - rng.uniform(0.01, 0.07)))
        first = Column(
            rng, sheet, self._writer, kind, left, right, top_y, bottom, body, bold,
            Style(mono[0], code_size, mode), pitch, rng.random() < 0.25, rng.random() < 0.2,
        )  # fmt: skip
        if rng.random() < 0.3 and layout != "plain":
            first.bottom = round(first.bottom * rng.uniform(0.3, 1.0))
        if layout != "columns" or shape.width < 400:
            return [first]
        if rng.random() < 0.5:
            blocks.heading(first)
        gutter = rng.uniform(1.2, 3.0) * body.pixels
        middle = (left + right) / 2
        if rng.random() < 0.3:
            sheet.rules.append((round(middle), first.y, round(middle) + 1, bottom, 0.6))
        second = replace(first, left=middle + gutter / 2)
        first.right = middle - gutter / 2
        first.bottom = min(first.bottom, first.y + round(rng.uniform(0.4, 1.0) * shape.height))
        return [first, second]

    def _number(self, rng: np.random.Generator, sheet: Sheet, column: Column) -> None:
        bottom = sheet.height - 2
        if rng.random() > 0.25 or sheet.room < 20 or column.y + 3 * column.pitch > bottom:
            return
        number = int(rng.integers(1, 400))
        forms = (f"{number}", f"– {number} –", f"Page {number}", f"{number} / {number + 7}")  # noqa: RUF001
        text = forms[int(rng.integers(len(forms)))]
        style = column.body
        width = sheet.measure(text, style)
        x = rng.choice([(sheet.width - width) / 2, sheet.width * 0.95 - width, sheet.width * 0.05])
        column.open_block()
        sheet.write(encode(text), style, float(x), bottom - round(0.5 * style.pixels), RANDOM)


TRAINING_MIX = Mix((0.45, 0.40, 0.15), (0.30, 0.26, 0.12, 0.12, 0.10, 0.10))
FIRST_MIX = Mix((0.15, 0.75, 0.10), (0.80, 0.08, 0.0, 0.0, 0.08, 0.04))
KIND_NAMES = {NATURAL: "natural", RANDOM: "random", SALAD: "salad"}

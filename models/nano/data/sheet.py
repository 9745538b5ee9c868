"""A page under construction: its Markdown, and every glyph, line and shade with its place."""

from dataclasses import dataclass, field

import numpy as np

from models.nano.data.corpus import decode, encode
from models.nano.data.faces import NUM_SMALL, SIZES, SPACE, Metrics, is_hinted_big

CENTRE_RISE = 0.27
"""A glyph's centre lies this share of an em above the baseline."""


@dataclass(frozen=True)
class Style:
    """How a run of text is drawn.

    Attributes:
        face: Index of the face.
        size: Index of `SIZES`.
        mode: 0 hinted with whole advances, 1 unhinted.
    """

    face: int
    size: int
    mode: int

    @property
    def pixels(self) -> int:
        """Pixels an em."""
        return SIZES[self.size]

    @property
    def effective_mode(self) -> int:
        """The rendering that exists: a big size has only one."""
        return self.mode if self.size < NUM_SMALL else int(not is_hinted_big(self.size))


@dataclass(frozen=True)
class Run:
    """A stretch of text on one baseline, for renderers that draw strings.

    Attributes:
        text: What it says.
        style: How it looks.
        x: Where the pen starts, pixels.
        y: The baseline, pixels.
        gap: Added to each space, pixels.
    """

    text: str
    style: Style
    x: float
    y: int
    gap: float


@dataclass(frozen=True)
class Page:
    """A finished page.

    Attributes:
        height: Pixels; `width` alike.
        width: See above.
        text: The Markdown.
        layout: What kind of page it is.
        kinds: [len(text)] uint8, the kind of text of each character.
        current: [len(text)] int16, the glyph that shows the character, or -1.
        following: [len(text) + 1] int16, the first glyph at or after each character, or -1.
        face: [glyphs] int16; the four below describe the glyphs too.
        size: Index of `SIZES`.
        variant: Rendering of a small glyph.
        char: Index of `CHARACTERS`.
        corner: [glyphs, 2] int16, x of the pen and y of the baseline in whole pixels.
        centre: [glyphs, 2] float32, x and y.
        rules: [n, 5] float32, x0, y0, x1, y1 and ink of filled boxes in front of the paper.
        shades: Alike, behind the text.
        runs: The text again, for renderers that draw strings.
    """

    height: int
    width: int
    text: str
    layout: str
    kinds: np.ndarray
    current: np.ndarray
    following: np.ndarray
    face: np.ndarray
    size: np.ndarray
    variant: np.ndarray
    char: np.ndarray
    corner: np.ndarray
    centre: np.ndarray
    rules: np.ndarray
    shades: np.ndarray
    runs: tuple[Run, ...]


@dataclass
class Sheet:
    """Collects a page.

    Attributes:
        height: Pixels; `width` alike.
        width: See above.
        limit: Characters that the Markdown may have.
        metrics: Of the faces.
    """

    height: int
    width: int
    limit: int
    metrics: Metrics
    length: int = 0
    rules: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    shades: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _kinds: list[np.ndarray] = field(default_factory=list)
    _runs: list[Run] = field(default_factory=list)
    _glyphs: list[tuple[np.ndarray, np.ndarray, np.ndarray, Style, int]] = field(
        default_factory=list
    )

    @property
    def room(self) -> int:
        """Characters left."""
        return self.limit - self.length

    def advances(self, index: np.ndarray, style: Style) -> np.ndarray:
        """Returns the widths of characters, pixels."""
        return self.metrics.advance[style.face, style.size, style.effective_mode][index]

    def measure(self, text: str, style: Style) -> float:
        """Returns the width of a text, pixels."""
        return float(self.advances(encode(text), style).sum())

    def say(self, text: str, kind: int = 0) -> None:
        """Adds Markdown that no glyph shows."""
        self._texts.append(text)
        self._kinds.append(np.full(len(text), kind, np.uint8))
        self.length += len(text)

    def write(
        self, index: np.ndarray, style: Style, x: float, y: int, kind: int, gap: float = 0.0
    ) -> float:
        """Adds text to the Markdown and to the page.

        Args:
            index: [n], its characters.
            style: How it looks.
            x: Where the pen starts.
            y: The baseline.
            kind: Of the text.
            gap: Added to each space.

        Returns:
            Where the pen ends.
        """
        widths = self.advances(index, style)
        if gap:
            widths = widths + gap * (index == SPACE)
        ends = x + np.cumsum(widths)
        shown = np.flatnonzero(index != SPACE)
        starts = ends - widths
        tokens = self.length + shown
        middle = starts[shown] + widths[shown] * 0.5
        self._glyphs.append((index[shown], starts[shown], np.stack([middle, tokens]), style, y))
        text = decode(index)
        self._runs.append(Run(text, style, x, y, gap))
        self.say(text, kind)
        return float(ends[-1]) if index.size else x

    def mark(self, char: str, target: str, style: Style, x: float, y: int) -> None:
        """Draws a character that the Markdown spells as another one."""
        self.write(encode(char), style, x, y, 0)
        self._texts[-1] = target

    def finish(self, layout: str) -> Page:
        """Returns the page."""
        text = "".join(self._texts)
        chars = [g[0] for g in self._glyphs]
        char = np.concatenate(chars) if chars else np.zeros(0, np.int16)
        count = char.size
        counts = [c.size for c in chars]
        repeat = lambda values: np.repeat(np.array(values, np.int16), counts)  # noqa: E731
        if count:
            start = np.concatenate([g[1] for g in self._glyphs])
            middle, token = np.concatenate([g[2] for g in self._glyphs], 1)
        else:
            start = middle = token = np.zeros(0)
        baseline = repeat([g[4] for g in self._glyphs])
        size = repeat([g[3].size for g in self._glyphs])
        mode = repeat([g[3].effective_mode for g in self._glyphs])
        halves = np.round(start * 2).astype(np.int64)
        whole = np.round(start).astype(np.int64)
        fine = (mode == 1) & (size < NUM_SMALL)
        variant = np.where(fine, 1 + halves % 2, 0)
        pixels = np.array(SIZES)[size] if count else np.zeros(0)
        current = np.full(len(text), -1, np.int16)
        current[token.astype(np.int64)] = np.arange(count)
        return Page(
            self.height, self.width, text, layout,
            np.concatenate(self._kinds) if self._kinds else np.zeros(0, np.uint8),
            current, following(current),
            repeat([g[3].face for g in self._glyphs]), size, variant.astype(np.int16), char,
            np.stack([np.where(fine, halves // 2, whole), baseline], 1).astype(np.int16),
            np.stack([middle, baseline - CENTRE_RISE * pixels], 1).astype(np.float32),
            np.array(self.rules, np.float32).reshape(-1, 5),
            np.array(self.shades, np.float32).reshape(-1, 5),
            tuple(self._runs),
        )  # fmt: skip


def following(current: np.ndarray) -> np.ndarray:
    """Returns for each place the first entry >= 0 at or after it, -1 behind the last one."""
    padded = np.append(current, -1)
    places = np.where(padded >= 0, np.arange(padded.size), padded.size)
    nearest = np.minimum.accumulate(places[::-1])[::-1]
    return np.append(padded, -1)[np.minimum(nearest, padded.size)].astype(np.int16)


def break_lines(
    index: np.ndarray, widths: np.ndarray, width: float, indent: float = 0.0
) -> list[tuple[int, int]]:
    """Breaks text at spaces, or inside a word that is wider than a line.

    Args:
        index: [n], characters.
        widths: [n], pixels.
        width: Of a line.
        indent: What the first line has less.

    Returns:
        Start and end of each line; a space between two lines belongs to neither.
    """
    edges = np.concatenate([[0.0], np.cumsum(widths)])
    spaces = np.flatnonzero(index == SPACE)
    lines = []
    start, room = 0, width - indent
    while start < index.size:
        fit = int(np.searchsorted(edges, edges[start] + room, side="right")) - 1
        end = max(fit, start + 1)
        if end < index.size and index[end] != SPACE:
            before = int(np.searchsorted(spaces, end)) - 1
            if before >= 0 and spaces[before] > start:
                end = int(spaces[before])
        lines.append((start, min(end, index.size)))
        start = end + int(end < index.size and index[end] == SPACE)
        room = width
    return lines

"""The parts of a page: each draws itself into a column and says what its Markdown is."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from models.nano.data.corpus import RANDOM, Writer, encode
from models.nano.data.faces import nearest_size
from models.nano.data.sheet import Sheet, Style, break_lines

LEADING_MARKS = "-–—*•+#>|`=~0123456789. "  # noqa: RUF001 what Markdown or a list would read


@dataclass
class Column:
    """Where a part draws, and with what.

    Attributes:
        rng: Source of randomness.
        sheet: The page.
        writer: Source of text.
        kind: Of text.
        left: Pixels; `right`, `y` (the top of what comes next) and `bottom` alike.
        right: See above.
        y: See above.
        bottom: See above.
        body: Style of running text.
        bold: Face for headings.
        mono: Style of code.
        pitch: Pixels from line to line.
        justified: Whether paragraphs are.
        indented: Whether paragraphs are told apart by indents instead of gaps.
    """

    rng: np.random.Generator
    sheet: Sheet
    writer: Writer
    kind: int
    left: float
    right: float
    y: int
    bottom: int
    body: Style
    bold: int
    mono: Style
    pitch: int
    justified: bool
    indented: bool

    def baseline(self, style: Style) -> int:
        """Where the baseline of a line at `y` lies."""
        return self.y + round(0.98 * style.pixels)

    def open_block(self) -> None:
        """Separates what follows from what is there."""
        if self.sheet.length:
            self.sheet.say("\n\n")

    def close_block(self) -> None:
        """Leaves the gap below a part."""
        self.y += round(self.pitch * self.rng.uniform(0.5, 1.0))

    def fits(self, lines: int, chars: int, style: Style | None = None) -> bool:
        """Whether so many lines and characters still have a place."""
        pixels = (style or self.body).pixels
        height = (lines - 1) * self.pitch + round(1.3 * pixels)
        return self.y + height <= self.bottom and chars + 2 <= self.sheet.room


def opening(text: str) -> str:
    """Leaves out what a reader would take for the mark of a list or a heading."""
    return text.lstrip(LEADING_MARKS)


def flow(
    column: Column, text: str, style: Style, left: float, indent: float = 0.0, pitch: int = 0
) -> bool:
    """Sets text in lines until it, the column or the page ends; False if nothing was set."""
    sheet, pitch = column.sheet, pitch or column.pitch
    index = encode(text)
    widths = sheet.advances(index, style)
    lines = break_lines(index, widths, column.right - left, indent)
    for number, (start, end) in enumerate(lines):
        if column.y + round(1.3 * style.pixels) > column.bottom or end - start + 1 > sheet.room:
            return number > 0
        if number and index[start - 1] == 0:
            sheet.say(" ", column.kind)
        gap = 0.0
        if column.justified and number < len(lines) - 1:
            spaces = int((index[start:end] == 0).sum())
            slack = column.right - left - indent - float(widths[start:end].sum())
            gap = slack / spaces if spaces else 0.0
            gap = gap if gap < 0.5 * style.pixels else 0.0
        at = left + (indent if number == 0 else 0.0)
        sheet.write(index[start:end], style, at, column.baseline(style), column.kind, gap)
        column.y += pitch
        indent = 0.0 if number == 0 else indent
    return True


def paragraph(column: Column) -> bool:
    """Running text."""
    rng = column.rng
    if not column.fits(1, 12):
        return False
    length = min(int(rng.integers(30, 420)), column.sheet.room - 3)
    text = opening(column.writer.text(rng, column.kind, column.body.face, length))
    if not text:
        return False
    column.open_block()
    indent = 1.6 * column.body.pixels if column.indented else 0.0
    flow(column, text, column.body, column.left, indent)
    if column.indented:
        column.y += int(rng.integers(0, 2))
    else:
        column.close_block()
    return True


def heading(column: Column) -> bool:
    """A heading of the first or second level: the first is larger."""
    rng = column.rng
    level = 1 if rng.random() < 0.4 else 2
    size = nearest_size(column.body.pixels * (1.75 if level == 1 else 1.3))
    style = replace(column.body, face=column.bold, size=size)
    if not column.fits(2, 40, style):
        return False
    text = column.writer.words(rng, column.kind, style.face, int(rng.integers(1, 6)))
    if rng.random() < 0.25 and level == 2:
        text = f"{rng.integers(1, 10)}.{rng.integers(1, 10)} {opening(text)}"
    else:
        text = opening(text)
    if not text:
        return False
    column.open_block()
    column.sheet.say("#" * level + " ")
    justified, column.justified = column.justified, False
    flow(column, text, style, column.left, pitch=round(1.2 * style.pixels))
    column.justified = justified
    column.y += round(0.35 * column.pitch)
    return True


def _items(column: Column, mark: Callable[[int, float], None], hang: float) -> bool:
    rng = column.rng
    placed = 0
    for number in range(int(rng.integers(2, 7))):
        if not column.fits(1, 16):
            break
        length = min(int(rng.integers(8, 110)), column.sheet.room - 8)
        text = opening(column.writer.text(rng, column.kind, column.body.face, length))
        if not text:
            break
        if placed:
            column.sheet.say("\n")
        else:
            column.open_block()
        mark(number, column.left)
        flow(column, text, column.body, column.left + hang)
        column.y += round(column.pitch * 0.15)
        placed += 1
    if placed:
        column.close_block()
    return placed > 0


def bullets(column: Column) -> bool:
    """A list with marks."""
    rng, body = column.rng, column.body
    covered = column.sheet.metrics.covered[body.face]
    sign = "•–-*"[int(rng.choice(4, p=(0.6, 0.15, 0.15, 0.1)))]  # noqa: RUF001 the marks
    sign = sign if covered[encode(sign)[0]] else "-"

    def mark(_: int, left: float) -> None:
        column.sheet.mark(sign, "-", body, left + shift, column.baseline(body))
        column.sheet.say(" ")

    shift = rng.uniform(0, 1.0) * body.pixels
    return _items(column, mark, shift + rng.uniform(0.9, 1.6) * body.pixels)


def numbered(column: Column) -> bool:
    """A numbered list."""
    rng, body = column.rng, column.body
    first = 1 if rng.random() < 0.8 else int(rng.integers(1, 90))

    def mark(number: int, left: float) -> None:
        label = encode(f"{first + number}.")
        column.sheet.write(label, body, left, column.baseline(body), column.kind)
        column.sheet.say(" ")

    hang = column.sheet.measure(f"{first + 9}.", body) + rng.uniform(0.4, 0.9) * body.pixels
    return _items(column, mark, hang)


def _cell(column: Column, face: int) -> str:
    rng = column.rng
    draw = rng.random()
    if draw < 0.35:
        return f"{rng.uniform(0, 10 ** rng.integers(1, 6)):,.{rng.integers(0, 3)}f}"
    if draw < 0.5:
        return f"{rng.integers(1900, 2040)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"
    kind = RANDOM if draw < 0.7 else column.kind
    text = column.writer.words(rng, kind, face, int(rng.integers(1, 3)))
    return text.replace("|", "")[:18].strip() or "-"


def table(column: Column) -> bool:
    """A table with a head row; ruled, ruled across, or bare."""
    rng, sheet, body = column.rng, column.sheet, column.body
    columns, rows = int(rng.integers(2, 5)), int(rng.integers(2, 8))
    head = replace(body, face=column.bold)
    styles = [head] + [body] * rows
    cells = [[_cell(column, s.face) for _ in range(columns)] for s in styles]
    pad = round(rng.uniform(0.4, 0.9) * body.pixels)
    inner = [
        max(sheet.measure(row[c], s) for row, s in zip(cells, styles, strict=True))
        for c in range(columns)
    ]
    while columns > 2 and sum(inner[:columns]) + 2 * pad * columns > column.right - column.left:
        columns -= 1
    if sum(inner[:columns]) + 2 * pad * columns > column.right - column.left:
        return False
    size = sum(sum(len(cell) for cell in row[:columns]) + 3 * columns + 2 for row in cells)
    height = round(column.pitch * rng.uniform(1.05, 1.5))
    if size + 6 * columns > sheet.room or column.y + (rows + 1) * height + pad > column.bottom:
        return False
    slack = column.right - column.left - sum(inner[:columns]) - 2 * pad * columns
    stretch = rng.uniform(0, 1) * slack / columns
    edges = [column.left]
    for width in inner[:columns]:
        edges.append(edges[-1] + width + 2 * pad + stretch)
    right_aligned = rng.random(columns) < 0.3
    column.open_block()
    top = column.y
    for number, (row, style) in enumerate(zip(cells, styles, strict=True)):
        y = top + number * height + round(height / 2 + 0.33 * body.pixels)
        for c in range(columns):
            sheet.say("| ")
            x = edges[c] + pad
            if right_aligned[c]:
                x = edges[c + 1] - pad - sheet.measure(row[c], style)
            sheet.write(encode(row[c]), style, x, y, column.kind)
            sheet.say(" ")
        sheet.say("|" if number == rows else "|\n")
        if number == 0:
            sheet.say("|---" * columns + "|\n")
    bottom = top + (rows + 1) * height
    look, ink = rng.random(), rng.uniform(0.3, 1.0)
    lines = [top, top + height, bottom] if look < 0.6 else []
    if look < 0.35:
        lines = [top + i * height for i in range(rows + 2)]
        sheet.rules += [(x, top, x + 1, bottom + 1, ink) for x in map(round, edges)]
    sheet.rules += [(edges[0], y, edges[-1] + 1, y + 1, ink) for y in lines]
    if look > 0.3 and rng.random() < 0.5:
        sheet.shades.append((edges[0], top, edges[-1], top + height, rng.uniform(0.05, 0.25)))
    column.y = bottom
    column.close_block()
    return True


def form(column: Column) -> bool:
    """Keys with values, one pair a line."""
    rng, sheet, body = column.rng, column.sheet, column.body
    key_style = replace(body, face=column.bold) if rng.random() < 0.5 else body
    keys = [
        opening(column.writer.words(rng, column.kind, key_style.face, 2).replace(":", ""))[:24]
        for _ in range(int(rng.integers(3, 9)))
    ]
    keys = [key.strip() for key in keys if key.strip()]
    if not keys:
        return False
    tab = max(sheet.measure(key + ": ", key_style) for key in keys) + body.pixels
    tabbed = rng.random() < 0.6 and tab < 0.6 * (column.right - column.left)
    ruled = rng.random() < 0.3
    placed = 0
    for key in keys:
        value = _cell(column, body.face)
        if not column.fits(1, len(key) + len(value) + 4):
            break
        y = column.baseline(body)
        if placed:
            sheet.say("\n")
        else:
            column.open_block()
        end = sheet.write(encode(key + ":"), key_style, column.left, y, column.kind)
        sheet.say(" ")
        start = column.left + tab if tabbed else end + sheet.measure(" ", body)
        end = sheet.write(encode(value), body, start, y, column.kind)
        if ruled:
            sheet.rules.append((start, y + 3, min(end + 40, column.right), y + 4, 0.5))
        column.y += round(1.15 * column.pitch)
        placed += 1
    if placed:
        column.close_block()
    return placed > 0


_CODE_LINES = (
    "def {a}({b}, {c}):", "return {a} + {n}", "if {a} == {n}:", "for {b} in range({n}):",
    "{a} = {b}[{n}]", "{a}.{b}({c})", "print(\"{a}\", {b})", "while {a} < {n}:", "# {a} {b}",
    "{a} = {{\"{b}\": {n}}}", "import {a}", "$ {a} --{b}={n}", "{a} += {b} * {n};",
    "int {a} = {n};", "else:", "}}", "{a} -> {b}; // {c}", "x{n} := {a} & 0x{n}",
)  # fmt: skip


def code(column: Column) -> bool:
    """Lines of code on a shade or in a box."""
    rng, sheet, style = column.rng, column.sheet, column.mono
    pitch = round(1.3 * style.pixels)
    pad = round(0.6 * style.pixels)
    step = float(sheet.advances(encode("m"), style)[0])
    top, column.y = column.y, column.y + pad
    depth = placed = 0
    for _ in range(int(rng.integers(2, 9))):
        if column.y + round(1.3 * style.pixels) + pad > column.bottom:
            break
        names = [
            "_".join(column.writer.words(rng, RANDOM, style.face, 1).lower().split())[:8]
            for _ in range(3)
        ]
        template = _CODE_LINES[int(rng.integers(len(_CODE_LINES)))]
        line = template.format(a=names[0], b=names[1], c=names[2], n=rng.integers(1000))
        indent = 4 * depth if rng.random() < 0.9 else 0
        left = column.left + pad + indent * step
        while line and left + sheet.measure(line, style) > column.right - pad:
            line = line[:-1].rstrip()
        if not line or len(line) + indent + 10 > sheet.room:
            break
        if not placed:
            column.open_block()
            sheet.say("```\n")
        sheet.say(" " * indent)
        sheet.write(encode(line), style, left, column.baseline(style), RANDOM)
        sheet.say("\n")
        depth = min(depth + 1, 3) if line.endswith(":") else max(depth - int(rng.integers(2)), 0)
        column.y += pitch
        placed += 1
    if not placed:
        column.y = top
        return False
    sheet.say("```")
    column.y += pad
    box = (column.left, top, column.right, column.y)
    if rng.random() < 0.6:
        sheet.shades.append((*box, rng.uniform(0.04, 0.2)))
    else:
        x0, y0, x1, y1 = map(round, box)
        sheet.rules += [(x0, y0, x1, y0 + 1, 0.6), (x0, y1 - 1, x1, y1, 0.6),
                        (x0, y0, x0 + 1, y1, 0.6), (x1 - 1, y0, x1, y1, 0.6)]  # fmt: skip
    column.close_block()
    return True

"""A bar chart as SVG, for the results of a benchmark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW, BAR, LEFT, WIDTH = 26, 16, 250, 440
INK, FILL, MARK = "#24292f", "#4c78a8", "#c0392b"


def bar_chart(title: str, bars: Sequence[tuple[str, float]], mark: tuple[str, float]) -> str:
    """Returns horizontal bars from 0, and a line where a target lies.

    Args:
        title: Stands above and names the unit.
        bars: Label and value of each, not negative.
        mark: Label and value of the target.
    """
    scale = WIDTH / max(mark[1], *(value for _, value in bars))
    height = ROW * (len(bars) + 2)
    line_x = LEFT + mark[1] * scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 80}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (label, value) in enumerate(bars):
        y = ROW * (index + 1) + 4
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="{FILL}"/>',
            f'<text x="{LEFT + value * scale + 6:.1f}" y="{y + 12}">{value:,.0f}</text>',
        ]
    parts += [
        f'<line x1="{line_x:.1f}" x2="{line_x:.1f}" y1="{ROW}" y2="{height - ROW}" '
        f'stroke="{MARK}" stroke-dasharray="4 3"/>',
        f'<text x="{line_x:.1f}" y="{height - 8}" text-anchor="middle" fill="{MARK}">'
        f"{escape(mark[0])}</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"

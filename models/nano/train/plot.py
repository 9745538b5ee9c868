"""Draws a run's log: losses, and how much is read, over the steps."""

import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE, MARGIN = (1000, 420), 60
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189), (255, 127, 14))
DECADES = (-4, 1)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log that stand for steps, those of resumed runs in a row."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps, offset, last = [], 0, 0
    for line in lines:
        if "config" in line:
            offset += last
            last = 0
        if "step" in line and "text" in line:
            last = line["step"]
            steps.append({**line, "step": line["step"] + offset})
    return steps


def plot(log: Path, out: Path) -> None:
    """Draws a log.

    Args:
        log: `log.jsonl`.
        out: The PNG.
    """
    steps = read_log(log)
    if not steps:
        return
    image = Image.new("RGB", (SIZE[0], 2 * SIZE[1]), "white")
    curves = {
        "loss, random text (nats)": [s["random_loss"] for s in steps],
        "loss, natural text": [s["natural_loss"] for s in steps],
        "guide, first layer": [s["guide"][0] for s in steps],
        "guide, last layer": [s["guide"][-1] for s in steps],
    }
    shares = {
        "next id right, random text": [s["random_right"] for s in steps],
        "next id right, natural text": [s["natural_right"] for s in steps],
        "glyphs named, image tokens": [s["glyph_merged"] for s in steps],
        "glyphs named, patches": [s["glyph_patch"] for s in steps],
    }
    xs = [s["step"] for s in steps]
    _panel(image, 0, xs, curves, logarithmic=True)
    _panel(image, SIZE[1], xs, shares, logarithmic=False)
    image.save(out)


def _panel(
    image: Image.Image, top: int, xs: list[int], curves: dict[str, list[float]], *,
    logarithmic: bool,
) -> None:  # fmt: skip
    from math import log10

    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    width, height = SIZE[0] - 2 * MARGIN, SIZE[1] - MARGIN
    low, high = DECADES if logarithmic else (0, 1)

    def place(x: float, y: float) -> tuple[float, float]:
        value = log10(max(y, 10.0**low)) if logarithmic else y
        share = (min(max(value, low), high) - low) / (high - low)
        return MARGIN + width * x / max(xs[-1], 1), top + 20 + (1 - share) * height

    ticks = [10.0**d for d in range(low, high + 1)] if logarithmic else [0, 0.25, 0.5, 0.75, 1]
    for tick in ticks:
        _, y = place(0, tick)
        draw.line((MARGIN, y, SIZE[0] - MARGIN, y), (220, 220, 220))
        draw.text((4, y - 8), f"{tick:g}", fill="black", font=font)
    for tick in range(0, xs[-1] + 1, max(1, 10 ** len(str(xs[-1])) // 40)):
        draw.text((place(tick, 1)[0], top + 22 + height), str(tick), fill="black", font=font)
    for number, (name, ys) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        draw.line([place(x, y) for x, y in zip(xs, ys, strict=True)], colour, 2)
        draw.text((SIZE[0] - MARGIN - 220, top + 24 + 16 * number), name, fill=colour, font=font)

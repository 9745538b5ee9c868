"""Draws pages with Pillow, as other programs would: whole runs, kerning, real JPEG.

Scores are taken on these pages. Half of them are drawn at the size itself with hints, the others
four times as large and reduced, as programs for PDF files do.
"""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from models.nano.data.faces import SUPERSAMPLE, Face
from models.nano.data.sheet import Page, Run


@dataclass(frozen=True)
class Appearance:
    """How a page came to be a picture; the neutral values give black on white.

    Attributes:
        fine: Drawn large and reduced instead of hinted.
        paper: RGB, 0 to 1.
        ink: RGB, 0 to 1.
        degrees: Of rotation.
        skew: Horizontal shift a pixel of height.
        blur: Radius of a Gaussian, pixels.
        gradient: How much darker one side is.
        noise: Standard deviation, of 1.
        jpeg: Quality, or 0 for none.
    """

    fine: bool = True
    paper: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ink: tuple[float, float, float] = (0.0, 0.0, 0.0)
    degrees: float = 0.0
    skew: float = 0.0
    blur: float = 0.0
    gradient: float = 0.0
    noise: float = 0.0
    jpeg: int = 0


def draw_appearance(rng: np.random.Generator) -> Appearance:
    """Draws an appearance: a quarter of the pages are clean."""
    fine = bool(rng.random() < 0.5)
    if rng.random() < 0.25:
        return Appearance(fine=fine)
    bright, dark = rng.uniform(0.85, 1.0), rng.uniform(0.0, 0.3)
    paper = np.clip(bright - rng.uniform(0, 0.06, 3), 0, 1)
    ink = np.clip(dark + rng.uniform(-0.05, 0.08, 3), 0, 1)
    turned = rng.random() < 0.5
    return Appearance(
        fine=fine,
        paper=(float(paper[0]), float(paper[1]), float(paper[2])),
        ink=(float(ink[0]), float(ink[1]), float(ink[2])),
        degrees=float(rng.uniform(-1.2, 1.2)) if turned else 0.0,
        skew=float(rng.uniform(-0.01, 0.01)) if turned else 0.0,
        blur=float(rng.uniform(0.2, 0.6)) if rng.random() < 0.4 else 0.0,
        gradient=float(rng.uniform(0, 0.1)),
        noise=float(rng.uniform(0, 0.03)),
        jpeg=int(rng.integers(40, 96)) if rng.random() < 0.4 else 0,
    )


def _write(draw: ImageDraw.ImageDraw, run: Run, font: ImageFont.FreeTypeFont, scale: int) -> None:
    x, y = run.x * scale, run.y * scale
    if not run.gap:
        draw.text((x, y), run.text, fill=255, font=font, anchor="ls")
        return
    space = font.getlength(" ") + run.gap * scale
    for word in run.text.split(" "):
        draw.text((x, y), word, fill=255, font=font, anchor="ls")
        x += font.getlength(word) + space


def draw_page(page: Page, faces: list[Face], look: Appearance, seed: int) -> np.ndarray:
    """Draws a page.

    Args:
        page: What to draw.
        faces: The faces that its styles index.
        look: How.
        seed: Of the noise.

    Returns:
        [height, width, 3] uint8, RGB.
    """
    scale = SUPERSAMPLE if look.fine else 1
    ink = Image.new("L", (page.width * scale, page.height * scale))
    draw = ImageDraw.Draw(ink)
    fonts: dict[tuple[int, int], ImageFont.FreeTypeFont] = {}
    for run in page.runs:
        key = (run.style.face, run.style.pixels)
        if key not in fonts:
            fonts[key] = ImageFont.truetype(str(faces[key[0]].path), key[1] * scale)
        _write(draw, run, fonts[key], scale)
    for x0, y0, x1, y1, dark in page.rules.tolist():
        box = [round(v * scale) for v in (x0, y0, x1, y1)]
        draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=round(255 * dark))
    ink = ink.reduce(scale) if scale > 1 else ink
    shade = Image.new("L", ink.size)
    for x0, y0, x1, y1, dark in page.shades.tolist():
        box = [round(v) for v in (x0, y0, x1, y1)]
        ImageDraw.Draw(shade).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), round(255 * dark))
    tone = ImageChops.lighter(ink, shade)
    if look.degrees or look.skew:
        tone = _turn(tone, look.degrees, look.skew)
    if look.blur:
        tone = tone.filter(ImageFilter.GaussianBlur(look.blur))
    rng = np.random.Generator(np.random.PCG64(seed))
    cover = np.asarray(tone, np.float32)[..., None] / 255
    paper, dark = np.array(look.paper, np.float32), np.array(look.ink, np.float32)
    rgb = paper + (dark - paper) * cover
    rgb = rgb * (1 - look.gradient * np.linspace(0, 1, page.width, dtype=np.float32)[:, None])
    rgb = rgb + look.noise * rng.standard_normal(rgb.shape[:2], np.float32)[..., None]
    pixels = np.round(np.clip(rgb, 0, 1) * 255).astype(np.uint8)
    if look.jpeg:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=look.jpeg)
        pixels = np.asarray(Image.open(file))
    return pixels


def _turn(tone: Image.Image, degrees: float, skew: float) -> Image.Image:
    angle = np.deg2rad(degrees)
    matrix = np.array([[np.cos(angle), np.sin(angle) + skew], [-np.sin(angle), np.cos(angle)]])
    middle = np.array(tone.size) / 2
    shift = middle - matrix @ middle
    data = (*matrix[0], shift[0], *matrix[1], shift[1])
    return tone.transform(tone.size, Image.Transform.AFFINE, data, Image.Resampling.BICUBIC)

"""Font faces: which characters they have, how wide these are, and what they look like."""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from models.nano.data.fetch import read_sources
from models.nano.tokenizer import WIDE_CHARACTERS

SPACE = 0
RARE = "¤¦¨ª¬¯´¸º¹√∞†‡"  # noqa: RUF001 left out: many faces lack them or hide them
CHARACTERS = " " + "".join(map(chr, range(0x21, 0x7F)))
CHARACTERS += "".join(char for char in WIDE_CHARACTERS if char not in RARE)
"""What pages are spelled with; the index is the class of a glyph, 0 is a space."""
INDEX = np.full(0x2300, -1, np.int16)
INDEX[[ord(char) for char in CHARACTERS]] = np.arange(len(CHARACTERS))

SIZES = (12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 32, 36, 40)
"""Pixels an em; the first `NUM_SMALL` have small cells and three renderings."""
NUM_SMALL = 9
SMALL_CELL, SMALL_ORIGIN = 32, (5, 24)
BIG_CELL, BIG_ORIGIN = 64, (9, 46)
SUPERSAMPLE = 4
VARIANTS = 3
"""Of a small glyph: 0 hinted, 1 and 2 area-sampled without hints at x + 0 and x + 1/2."""


@dataclass(frozen=True)
class Face:
    """A font file.

    Attributes:
        family: Its family's name.
        kind: sans, serif or mono.
        weight: 0 regular, 1 bold, 2 italic.
        held_out: Whether pages for training may not use it.
        path: The file.
    """

    family: str
    kind: str
    weight: int
    held_out: bool
    path: Path


@dataclass(frozen=True)
class Metrics:
    """What layout needs of all faces.

    Attributes:
        advance: [faces, sizes, 2, characters] float32, pixels; axis 2: hinted, unhinted.
        covered: [faces, characters] bool, the face has the glyph.
        ambiguous: [faces, characters] bool, another glyph of the face looks the same.
    """

    advance: np.ndarray
    covered: np.ndarray
    ambiguous: np.ndarray


def list_faces(cache: Path) -> list[Face]:
    """Returns the faces of `sources.toml`, in its order, as they lie in the cache."""
    faces = []
    for source in read_sources()["fonts"]:
        for family in source["families"]:
            for weight, file in enumerate(family["faces"]):
                if file:
                    bold_less = len(family["faces"]) < 3 and "Italic" in file
                    weight = 2 if bold_less else weight  # noqa: PLW2901
                    path = cache / "fonts" / file
                    face = Face(family["name"], family["kind"], weight, family["held_out"], path)
                    faces.append(face)
    return faces


def open_font(path: Path, size: float) -> ImageFont.FreeTypeFont:
    """Opens a face without ligatures or kerning across what we place ourselves."""
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def _coverage(path: Path) -> np.ndarray:
    font = open_font(path, 32)
    missing = {bytes(font.getmask(char)) for char in "\ue123\u0378\U000e0101"}
    covered = [bytes(font.getmask(char)) not in missing for char in CHARACTERS]
    covered[SPACE] = True
    return np.array(covered)


def _ambiguity(path: Path) -> np.ndarray:
    font = open_font(path, 48)
    seen: dict[tuple[bytes, tuple[int, ...]], int] = {}
    ambiguous = np.zeros(len(CHARACTERS), bool)
    for index, char in enumerate(CHARACTERS[1:], 1):
        top = font.getbbox(char, anchor="ls")[1]
        key = (bytes(font.getmask(char)), (top,))
        if key in seen:
            ambiguous[[index, seen[key]]] = True
        seen.setdefault(key, index)
    return ambiguous


def face_metrics(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns one face's part of `Metrics`."""
    advance = np.zeros((len(SIZES), 2, len(CHARACTERS)), np.float32)
    for row, size in enumerate(SIZES):
        for mode, scale in enumerate((1, SUPERSAMPLE)):
            font = open_font(path, size * scale)
            advance[row, mode] = [font.getlength(char) / scale for char in CHARACTERS]
    return advance, _coverage(path), _ambiguity(path)


def _stamp(font: ImageFont.FreeTypeFont, char: str, cell: int, x: int, y: int) -> Image.Image:
    image = Image.new("L", (cell, cell))
    ImageDraw.Draw(image).text((x, y), char, fill=255, font=font, anchor="ls")
    return image


def face_glyphs(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Draws all glyphs of a face.

    Returns:
        Coverage as uint8: [NUM_SMALL, VARIANTS, characters, SMALL_CELL, SMALL_CELL], and
        [other sizes, characters, BIG_CELL, BIG_CELL], hinted for every other size.
    """
    small = np.zeros((NUM_SMALL, VARIANTS, len(CHARACTERS), SMALL_CELL, SMALL_CELL), np.uint8)
    num_big = len(SIZES) - NUM_SMALL
    big = np.zeros((num_big, len(CHARACTERS), BIG_CELL, BIG_CELL), np.uint8)
    scale = SUPERSAMPLE
    for row, size in enumerate(SIZES):
        plain, fine = open_font(path, size), open_font(path, size * scale)
        cell, (x, y) = (SMALL_CELL, SMALL_ORIGIN) if row < NUM_SMALL else (BIG_CELL, BIG_ORIGIN)
        for index, char in enumerate(CHARACTERS[1:], 1):
            if row < NUM_SMALL:
                small[row, 0, index] = _stamp(plain, char, cell, x, y)
                for phase in (0, 1):
                    at = scale * x + phase * scale // 2
                    image = _stamp(fine, char, scale * cell, at, scale * y)
                    small[row, 1 + phase, index] = image.reduce(scale)
            elif is_hinted_big(row):
                big[row - NUM_SMALL, index] = _stamp(plain, char, cell, x, y)
            else:
                image = _stamp(fine, char, scale * cell, scale * x, scale * y)
                big[row - NUM_SMALL, index] = image.reduce(scale)
    return small, big


def is_hinted_big(size_index: int) -> bool:
    """Whether the one rendering of a big size is the hinted one."""
    return size_index % 2 == 0


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def load_metrics(faces: list[Face], workers: int) -> Metrics:
    """Measures all faces."""
    with _pool(workers) as pool:
        parts = list(pool.map(face_metrics, [face.path for face in faces]))
    return Metrics(*(np.stack(column) for column in zip(*parts, strict=True)))


def load_glyphs(faces: list[Face], workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws all faces: [faces, ...] of both results of `face_glyphs`."""
    with _pool(workers) as pool:
        parts = pool.map(face_glyphs, [face.path for face in faces])
        small, big = zip(*parts, strict=True)
    return np.stack(small), np.stack(big)


def save_metrics(metrics: Metrics, path: Path) -> None:
    """Writes metrics for other processes."""
    np.savez(path, advance=metrics.advance, covered=metrics.covered, ambiguous=metrics.ambiguous)


def restore_metrics(path: Path) -> Metrics:
    """Reads what `save_metrics` wrote."""
    with np.load(path) as data:
        return Metrics(data["advance"], data["covered"], data["ambiguous"])


def cached_metrics(cache: Path, workers: int) -> Path:
    """Returns the file with the metrics of all faces, which it makes if need be.

    It travels with the fonts: another FreeType may measure otherwise, and pages with it.
    """
    path = cache / "metrics.npz"
    faces = list_faces(cache)
    shape = (len(faces), len(CHARACTERS))
    if not path.exists() or restore_metrics(path).covered.shape != shape:
        save_metrics(load_metrics(faces, workers), path)
    return path


def glyph_index(
    face: np.ndarray, size: np.ndarray, variant: np.ndarray, char: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where glyphs lie in the flattened atlases.

    Args:
        face: [n], all of them integers.
        size: [n], index of `SIZES`.
        variant: [n], 0 to 2; of no meaning for big sizes.
        char: [n].

    Returns:
        [n] int32, index in the small or in the big atlas; [n] bool, it is a big one.
    """
    count, big_sizes = len(CHARACTERS), len(SIZES) - NUM_SMALL
    is_big = size >= NUM_SMALL
    small = ((face * NUM_SMALL + size) * VARIANTS + variant) * count + char
    big = (face * big_sizes + size - NUM_SMALL) * count + char
    return np.where(is_big, big, small).astype(np.int32), is_big


def nearest_size(pixels: float) -> int:
    """Returns the index of the size nearest to so many pixels an em."""
    return min(range(len(SIZES)), key=lambda index: math.fabs(SIZES[index] - pixels))

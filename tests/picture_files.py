"""Random pictures and files of them, with the upright RGB picture computed without a decoder.

Everything follows from a seed through SHAKE-256, so it is the same for every version of Python and
NumPy: recorded results of the reference rest on it.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

T = TypeVar("T")

ORIENTATION = 274
NUM_RECORDED = 200


class Draw:
    """Random numbers that follow from a name."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.count = 0

    def octets(self, *shape: int) -> npt.NDArray[np.uint8]:
        self.count += 1
        size = int(np.prod(shape))
        stream = hashlib.shake_256(f"{self.seed}/{self.count}".encode()).digest(size)
        return np.frombuffer(stream, np.uint8).reshape(shape)

    def below(self, limit: int) -> int:
        return int(self.octets(8).view("<u8")[0] % limit)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A file, and the upright RGB picture that is in it, uint8 [height, width, 3]."""

    name: str
    data: bytes
    mime_type: str
    upright: npt.NDArray[np.uint8]


def as_stored(upright: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Turns an upright picture to how a file with that EXIF orientation stores it.

    The tag says which sides of the upright picture the first row and the first column are: 1 top
    and left, 2 top, right, 3 bottom, right, 4 bottom, left, 5 left, top, 6 right, top, 7 right,
    bottom, 8 left, bottom.
    """
    across = upright.swapaxes(0, 1)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: across,
        6: across[::-1],
        7: across[::-1, ::-1],
        8: across[:, ::-1],
    }[orientation]
    return np.ascontiguousarray(stored)


def on_white(colours: npt.NDArray[np.uint8], alpha: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Lays [h, w, 3] with [h, w] of opacity on white, rounded to nearest."""
    opacity = alpha.astype(np.int64)[..., None]
    return ((colours * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def gray_rgb(gray: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.repeat(gray[..., None], 3, axis=2)


def png_file(samples: npt.NDArray[np.uint16], orientation: int = 1) -> bytes:
    """Writes a PNG of 16 bits a sample: [h, w] gray or [h, w, 3] RGB."""
    height, width = samples.shape[:2]
    rows = samples.astype(">u2").reshape(height, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if samples.ndim == 3 else 0, 0, 0, 0)
    exif = (
        b"MM\0*\0\0\0\x08\0\x01"
        + struct.pack(">HHIHH", ORIENTATION, 3, 1, orientation, 0)
        + b"\0" * 4
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        png_chunk(kind, body)
        for kind, body in (
            (b"IHDR", header),
            (b"eXIf", exif),
            (b"IDAT", zlib.compress(raw, 1)),
            (b"IEND", b""),
        )
    )


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encode(
    stored: Image.Image, image_format: str, orientation: int = 1, **options: object
) -> bytes:
    """Writes a file that says how it is turned."""
    out = io.BytesIO()
    if image_format not in {"BMP", "GIF"}:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    stored.save(out, image_format, **options)
    return out.getvalue()


def picture(draw: Draw, height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """Draws [height, width, channels]: noise, coarse blocks, or marks on white."""
    kind = draw.below(3)
    if kind == 0:
        return draw.octets(height, width, channels)
    step = 1 + draw.below(24)
    coarse = draw.octets(-(-height // step), -(-width // step), channels)
    blocks = coarse.repeat(step, axis=0).repeat(step, axis=1)[:height, :width]
    if kind == 1:
        return blocks
    return np.where(blocks > 200, blocks - 200, 255).astype(np.uint8)


def _orientation(draw: Draw, image_format: str) -> int:
    return 1 if image_format in {"BMP", "GIF"} else 1 + draw.below(8)


def _lossless(draw: Draw, formats: Sequence[str]) -> tuple[str, dict[str, Any]]:
    image_format = draw.pick(formats)
    options: dict[str, Any] = {}
    if image_format == "WEBP":
        options = {"lossless": True, "exact": True, "quality": 0, "method": 0}
    if image_format == "TIFF":
        options = {"compression": draw.pick(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    return image_format, options


def _rgb(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    upright = picture(draw, height, width, 3)
    image_format, options = _lossless(draw, ["PNG", "TIFF", "BMP", "WEBP"])
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(upright, turn))
    return encode(stored, image_format, turn, **options), image_format, upright


def _gray(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    upright = picture(draw, height, width, 1)[..., 0]
    image_format, options = _lossless(draw, ["PNG", "TIFF", "BMP", "GIF"])
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(upright, turn))
    return encode(stored, image_format, turn, **options), image_format, gray_rgb(upright)


def _bilevel(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    upright = (picture(draw, height, width, 1)[..., 0] > 127).astype(np.uint8) * 255
    image_format, options = _lossless(draw, ["PNG", "TIFF", "BMP"])
    if image_format == "TIFF" and draw.below(2):
        options = {"compression": "group4"}  # 0 is white
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(upright, turn)).convert("1")
    return encode(stored, image_format, turn, **options), image_format, gray_rgb(upright)


def _palette(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    colours = draw.octets(256, 3)
    indices = picture(draw, height, width, 1)[..., 0]
    image_format = draw.pick(["PNG", "GIF", "TIFF", "BMP"])
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(indices, turn))
    stored.putpalette(colours.tobytes())
    upright = colours[indices]
    options: dict[str, Any] = {}
    if image_format == "PNG":
        alphas = draw.octets(256)
        options["transparency"] = alphas.tobytes()
        upright = on_white(upright, alphas[indices])
    if image_format == "GIF":
        options["transparency"] = clear = int(indices[0, 0])
        upright = np.where((indices == clear)[..., None], np.uint8(255), upright)
    return encode(stored, image_format, turn, **options), image_format, upright


def _alpha(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    has_colour = bool(draw.below(2))
    upright = picture(draw, height, width, 4 if has_colour else 2)
    formats = ["PNG", "WEBP", "TIFF"] if has_colour else ["PNG", "TIFF"]
    image_format, options = _lossless(draw, formats)
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(upright, turn), "RGBA" if has_colour else "LA")
    colours = upright[..., :3] if has_colour else gray_rgb(upright[..., 0])
    return (
        encode(stored, image_format, turn, **options),
        image_format,
        on_white(colours, upright[..., -1]),
    )


def _deep(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    shape = [(height, width), (height, width, 3)][draw.below(2)]
    samples = draw.octets(*shape, 2).view("<u2")[..., 0]
    upright = (samples >> 8).astype(np.uint8)
    turn = 1 + draw.below(8)
    stored = as_stored(samples, turn)
    if len(shape) == 3:
        return png_file(stored, turn), "PNG", upright
    if draw.below(2):
        return png_file(stored, turn), "PNG", gray_rgb(upright)
    return encode(Image.fromarray(stored), "TIFF", turn), "TIFF", gray_rgb(upright)


def _cmyk(draw: Draw, height: int, width: int) -> tuple[bytes, str, Any]:
    inks = picture(draw, height, width, 4)
    image_format, options = _lossless(draw, ["TIFF"])
    turn = _orientation(draw, image_format)
    stored = Image.fromarray(as_stored(inks, turn), "CMYK")
    key = 255 - inks[..., 3:].astype(np.int64)
    # What the inks let through, rounded to nearest in the middle as in the end.
    upright = (key - (inks[..., :3] * key + 127) // 255).astype(np.uint8)
    return encode(stored, image_format, turn, **options), image_format, upright


MAKERS: dict[str, Callable[[Draw, int, int], tuple[bytes, str, Any]]] = {
    "rgb": _rgb,
    "gray": _gray,
    "bilevel": _bilevel,
    "palette": _palette,
    "alpha": _alpha,
    "deep": _deep,
    "cmyk": _cmyk,
}


def random_file(index: int, name: str = "picture") -> PictureFile:
    """Makes the file of that number: mode, format, size, orientation and content at random."""
    draw = Draw(f"{name} {index}")
    mode = list(MAKERS)[index % len(MAKERS)]
    if draw.below(8) == 0:  # a strip
        short = 2 + draw.below(8)
        height, width = short, min(short * 200, 400 + draw.below(800))
        if draw.below(2):
            height, width = width, height
    else:
        height, width = 2 + draw.below(400), 2 + draw.below(400)
    data, image_format, upright = MAKERS[mode](draw, height, width)
    label = f"{index}: {mode} {image_format} {width} x {height}"
    return PictureFile(label, data, f"image/{image_format.lower()}", upright)


def recorded_case(index: int) -> dict[str, Any]:
    """The settings of the reference for the file of that number."""
    draw = Draw(f"case {index}")
    min_pixels, max_pixels = draw.pick(
        [(65536, 16777216), (65536, 16777216), (1024, 65536), (3136, 1003520), (1024, 16777216)]
    )
    clip = draw.below(2)  # CLIP's numbers, or those that the published checkpoints have
    return {
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "image_mean": [0.48145466, 0.4578275, 0.40821073] if clip else [0.5, 0.5, 0.5],
        "image_std": [0.26862954, 0.26130258, 0.27577711] if clip else [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
    }

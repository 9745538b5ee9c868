"""Headers are read, and held to the limits, without decoding and in no time."""

from __future__ import annotations

import io
import random
import struct
import time
import tracemalloc
import zlib

import pytest
from picture_files import MAKERS, Draw, png_chunk, random_file
from PIL import Image

from server.images import (
    ImageFormat,
    ImageLimits,
    ImageRefusedError,
    RefusalReason,
    check_header,
)

LIMITS = ImageLimits()
FORMATS = ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"]


def file_of(image_format: str, width: int = 20, height: int = 10) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "navy").save(out, image_format)
    return out.getvalue()


def png_of_one_bit(width: int, height: int) -> bytes:
    """A whole PNG file, made without its pixels in memory."""
    packer = zlib.compressobj(6)
    row = bytes(1 + (width + 7) // 8)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)


def jpeg_header(width: int, height: int, before: bytes = b"") -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return b"\xff\xd8" + before + b"\xff\xc0" + struct.pack(">H", 2 + len(frame)) + frame


def gif_header(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0;"


def tiff_header(width: int, height: int, *, order: str = "<", big: bool = False) -> bytes:
    mark = b"II" if order == "<" else b"MM"
    if big:
        entries = [
            struct.pack(order + "HHQQ", tag, 16, 1, side)
            for tag, side in ((256, width), (257, height))
        ]
        return mark + struct.pack(order + "HHHQQ", 43, 8, 0, 16, 2) + b"".join(entries) + bytes(8)
    entries = [
        struct.pack(order + "HHII", tag, 4, 1, side) for tag, side in ((256, width), (257, height))
    ]
    return mark + struct.pack(order + "HIH", 42, 8, 2) + b"".join(entries) + bytes(4)


def webp_header(width: int, height: int) -> bytes:
    sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return b"RIFF\x1a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + sides


def bmp_header(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<IiiHH", 40, width, height, 1, 24) + bytes(24)


GIANTS = {
    "PNG": png_header(40_000, 40_000),
    "PNG of 2^31": png_header(0x7FFFFFFF, 0x7FFFFFFF),
    "JPEG": jpeg_header(30_000, 30_000),
    "GIF": gif_header(65_535, 65_535),
    "TIFF": tiff_header(60_000, 60_000),
    "TIFF, big-endian": tiff_header(60_000, 60_000, order=">"),
    "BigTIFF": tiff_header(1 << 40, 1 << 40, big=True),
    "WebP": webp_header(16_384, 16_384),
    "BMP": bmp_header(50_000, -50_000),
}


def refused(data: bytes, mime_type: str | None = None, limits: ImageLimits = LIMITS) -> str:
    """Returns reason and message."""
    with pytest.raises(ImageRefusedError) as caught:
        check_header(data, limits, mime_type)
    return f"{caught.value.reason.value}: {caught.value}"


@pytest.mark.parametrize("index", range(60))
def test_size_of_files_in_every_mode(index: int) -> None:
    draw = Draw(f"header {index}")
    height, width = 2 + draw.below(99), 2 + draw.below(99)
    data, name, upright = MAKERS[list(MAKERS)[index % len(MAKERS)]](draw, height, width)
    header = check_header(data, LIMITS, f"image/{name.lower()}")
    assert header.format is ImageFormat(name)
    assert {header.width, header.height} == set(upright.shape[:2])


@pytest.mark.parametrize("image_format", FORMATS)
def test_width_and_height_are_not_mixed_up(image_format: str) -> None:
    header = check_header(file_of(image_format, 37, 11), LIMITS)
    assert (header.format.value, header.width, header.height) == (image_format, 37, 11)


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"lossless": False}, {"exif": b"Exif\0\0"}]
)
def test_each_kind_of_webp(options: dict[str, object]) -> None:
    out = io.BytesIO()
    Image.new("RGB", (33, 21)).save(out, "WEBP", **options)
    header = check_header(out.getvalue(), LIMITS)
    assert (header.width, header.height) == (33, 21)


def test_kinds_of_tiff_and_bmp() -> None:
    for order in "<>":
        for big in (False, True):
            header = check_header(tiff_header(40, 30, order=order, big=big), LIMITS)
            assert (header.width, header.height) == (40, 30)
    old = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 40, 30, 1, 24)
    for data in (old, bmp_header(40, 30), bmp_header(40, -30)):
        header = check_header(data, LIMITS)
        assert (header.width, header.height) == (40, 30)


@pytest.mark.parametrize("name", GIANTS)
def test_giants_are_refused_by_their_header(name: str) -> None:
    """I3: a small file that declares giant pixels."""
    tracemalloc.start()
    began = time.perf_counter()
    text = refused(GIANTS[name])
    took_s = time.perf_counter() - began
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text.startswith("IMAGE_TOO_LARGE: ")
    assert " x " in text
    assert f"the limit is {LIMITS.max_pixels}" in text
    assert took_s < 0.1
    assert peak_bytes < 1 << 20


def test_giant_of_194_kb() -> None:
    """I3: the whole file, as it was reported."""
    data = png_of_one_bit(40_000, 40_000)
    assert len(data) < 200_000
    assert refused(data) == (
        "IMAGE_TOO_LARGE: the image is 40000 x 40000 pixels = 1600000000, the limit is 64000000"
    )


def test_pixels_up_to_the_limit() -> None:
    limits = ImageLimits(max_pixels=5000)
    assert check_header(png_header(100, 50), limits).width == 100
    with pytest.raises(ImageRefusedError) as caught:
        check_header(png_header(100, 51), limits)
    assert caught.value.reason is RefusalReason.TOO_LARGE
    assert caught.value.metadata == {"value": "5100", "limit": "5000"}


def test_bytes_up_to_the_limit() -> None:
    data = file_of("PNG")
    assert check_header(data, ImageLimits(max_bytes=len(data))).width == 20
    with pytest.raises(ImageRefusedError) as caught:
        check_header(data, ImageLimits(max_bytes=len(data) - 1))
    assert caught.value.reason is RefusalReason.TOO_LARGE
    assert caught.value.metadata == {"value": str(len(data)), "limit": str(len(data) - 1)}


def test_strips_up_to_the_limit() -> None:
    """I6: a side may be 200 times the other, no more."""
    for sides in ((20, 4000), (4000, 20)):
        assert check_header(png_header(*sides), LIMITS).width == sides[0]
    for sides in ((20, 4001), (20, 5000), (5000, 20)):
        text = refused(png_header(*sides))
        assert text.startswith("IMAGE_INVALID: ")
        assert f"{sides[0]} x {sides[1]}" in text
        assert "the limit is 200 times" in text


def test_sides_too_short() -> None:
    assert refused(png_header(1, 1)) == (
        "IMAGE_INVALID: the image is 1 x 1 pixels, the shortest side allowed is 2"
    )
    assert "1 x 20000" in refused(png_header(1, 20_000))
    assert "0 x 5" in refused(gif_header(0, 5))
    assert "7 x 0" in refused(jpeg_header(7, 0))
    assert "-5 x 7" in refused(bmp_header(-5, 7))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 bytes"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"<svg xmlns=''>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"plain words", "70 6c 61 69 6e 20 77 6f"),
        (bytes(100), "00 00 00 00"),
        (b"\x89", "89"),
    ],
)
def test_what_is_no_picture(data: bytes, says: str) -> None:
    """I4: other files get a reason that names what was found and what is supported."""
    text = refused(data)
    assert text.startswith("IMAGE_INVALID: ")
    assert says in text
    assert "PNG, JPEG, WebP, TIFF, BMP and GIF" in text


@pytest.mark.parametrize("image_format", FORMATS)
def test_cut_anywhere_in_the_header(image_format: str) -> None:
    data = file_of(image_format)
    size = (check_header(data, LIMITS).width, check_header(data, LIMITS).height)
    refusals = []
    for cut in range(min(len(data), 700)):
        try:
            header = check_header(data[:cut], LIMITS)
        except ImageRefusedError as error:
            refusals.append(error.reason)
        else:
            assert (header.width, header.height) == size
    assert len(refusals) >= 10
    assert set(refusals) == {RefusalReason.INVALID}


def test_declared_types() -> None:
    png = file_of("PNG")
    for fine in (None, "", "image/png", "IMAGE/PNG", "image/png; charset=binary"):
        assert check_header(png, LIMITS, fine).format is ImageFormat.PNG
    assert check_header(file_of("JPEG"), LIMITS, "image/jpg").format is ImageFormat.JPEG
    assert "'image/jpeg', but the file is PNG" in refused(png, "image/jpeg")
    text = refused(png, "application/octet-stream")
    assert "'application/octet-stream'; supported are image/png" in text
    assert len(refused(png, "x" * 100_000)) < 500


def test_walks_have_a_bound() -> None:
    """No file keeps the event loop: not of empty segments, fill bytes, or TIFF entries."""
    many = b"\xff\xe0\0\2" * 5_000_000
    entries = struct.pack("<HHII", 1, 4, 1, 1) * 65_535
    slow = {
        "segments": jpeg_header(9, 9, many),
        "fill bytes": b"\xff\xd8" + b"\xff" * 20_000_000,
        "entries": b"II*\0" + struct.pack("<IH", 8, 65_535) + entries,
        "BigTIFF entries": b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 1 << 62) + bytes(1 << 20),
    }
    for name, data in slow.items():
        began = time.perf_counter()
        assert refused(data).startswith("IMAGE_INVALID"), name
        assert time.perf_counter() - began < 0.05, name
    # As many as a camera and an editor together write.
    assert check_header(jpeg_header(9, 8, b"\xff\xe1\xff\xff" + bytes(65_533)), LIMITS).height == 8


def test_random_bytes_are_refused_or_read() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    files = [random_file(index, "header").data[:400] for index in range(28)]
    longest = 0
    for _ in range(20_000):
        data = bytearray(draw.choice(files))
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            header = check_header(bytes(data), LIMITS)
        except ImageRefusedError as error:
            longest = max(longest, len(str(error)))
        else:
            assert header.width * header.height <= LIMITS.max_pixels
    assert 20 < longest < 500

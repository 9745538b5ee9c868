"""Format and size of a picture from the first bytes of its file, before anything decodes it.

Nothing here allocates what a file declares, and every walk through a file has a bound, so a check
takes microseconds (a few milliseconds for a JPEG of thousands of segments) and may run on the event
loop.
"""

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass

from server.images.limits import ImageLimits
from server.images.refusal import ImageRefusedError, RefusalReason

# A JPEG of 32 MiB that is all EXIF, ICC and XMP has some 500 segments before its frame header.
MAX_JPEG_SEGMENTS = 2048
# TIFF 6.0 defines fewer than 100 tags; they are sorted, and the size comes first.
MAX_TIFF_ENTRIES = 512


class ImageFormat(enum.Enum):
    """A supported format; its value is Pillow's name of it."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    TIFF = "TIFF"
    BMP = "BMP"
    GIF = "GIF"


SUPPORTED = "PNG, JPEG, WebP, TIFF, BMP and GIF"
MIME_TYPES = {
    "image/png": ImageFormat.PNG,
    "image/apng": ImageFormat.PNG,
    "image/jpeg": ImageFormat.JPEG,
    "image/jpg": ImageFormat.JPEG,
    "image/webp": ImageFormat.WEBP,
    "image/tiff": ImageFormat.TIFF,
    "image/bmp": ImageFormat.BMP,
    "image/x-ms-bmp": ImageFormat.BMP,
    "image/gif": ImageFormat.GIF,
}
# What people send by mistake, by the first bytes: names for the message.
OTHER_FORMATS = {
    b"%PDF": "a PDF document, which ParseDocument takes",
    b"<svg": "SVG",
    b"<htm": "HTML",
    b"<!do": "HTML",
    b"<?xm": "XML",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"PK\x03\x04": "a ZIP archive",
}


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of itself; sizes in pixels, before EXIF turns the picture."""

    format: ImageFormat
    width: int
    height: int


def check_header(data: bytes, limits: ImageLimits, mime_type: str | None = None) -> ImageHeader:
    """Reads format and size of a picture and holds them to the limits; decodes nothing.

    Args:
        data: The file.
        limits: What is allowed.
        mime_type: The declared media type, parameters ignored; None or "" says nothing.

    Raises:
        ImageRefusedError: The message says what was found and what is allowed.
    """
    if not data:
        raise _invalid(f"the image has 0 bytes; needed is a file of {SUPPORTED}")
    if len(data) > limits.max_bytes:
        raise _too_large(
            f"the image has {len(data)} bytes, the limit is {limits.max_bytes}",
            len(data),
            limits.max_bytes,
        )
    image_format = _format_of(data)
    _check_type(image_format, mime_type)
    try:
        width, height = SIZE_READERS[image_format](data)
    except (struct.error, IndexError):
        raise _invalid(
            f"the {image_format.value} file ends inside its header, after {len(data)} bytes"
        ) from None
    header = ImageHeader(image_format, width, height)
    check_size(width, height, limits)
    return header


def check_size(width: int, height: int, limits: ImageLimits, name: str = "the image") -> None:
    """Holds a size in pixels to the limits.

    Raises:
        ImageRefusedError: It is too large, too small or too long.
    """
    found = f"{name} is {width} x {height} pixels"
    if min(width, height) < limits.min_side:
        raise _invalid(f"{found}, the shortest side allowed is {limits.min_side}")
    if width * height > limits.max_pixels:
        raise _too_large(
            f"{found} = {width * height}, the limit is {limits.max_pixels}",
            width * height,
            limits.max_pixels,
        )
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_side_ratio:
        raise _invalid(
            f"{found}, one side {ratio:.1f} times the other; "
            f"the limit is {limits.max_side_ratio:g} times"
        )


def _invalid(message: str) -> ImageRefusedError:
    return ImageRefusedError(RefusalReason.INVALID, message)


def _too_large(message: str, value: int, limit: int) -> ImageRefusedError:
    return ImageRefusedError(
        RefusalReason.TOO_LARGE, message, {"value": str(value), "limit": str(limit)}
    )


def _format_of(data: bytes) -> ImageFormat:
    """Returns the format that the first bytes belong to."""
    start = data[:12]
    for signature, image_format in (
        (b"\x89PNG\r\n\x1a\n", ImageFormat.PNG),
        (b"\xff\xd8\xff", ImageFormat.JPEG),
        (b"II*\0", ImageFormat.TIFF),
        (b"MM\0*", ImageFormat.TIFF),
        (b"II+\0", ImageFormat.TIFF),
        (b"MM\0+", ImageFormat.TIFF),
        (b"GIF87a", ImageFormat.GIF),
        (b"GIF89a", ImageFormat.GIF),
        (b"BM", ImageFormat.BMP),
    ):
        if start.startswith(signature):
            return image_format
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return ImageFormat.WEBP
    for signature, name in OTHER_FORMATS.items():
        if start.lower().startswith(signature.lower()):
            raise _invalid(f"the file is {name}; supported are {SUPPORTED}")
    if start[4:8] == b"ftyp":
        raise _invalid(f"the file is HEIC, AVIF or a video; supported are {SUPPORTED}")
    raise _invalid(
        f"the file of {len(data)} bytes starts with {start[:8].hex(' ')}, "
        f"which is none of {SUPPORTED}"
    )


def _check_type(image_format: ImageFormat, mime_type: str | None) -> None:
    """Holds the declared type to the one found."""
    if not mime_type:
        return
    declared = mime_type.partition(";")[0].strip().lower()
    if declared not in MIME_TYPES:
        raise _invalid(
            f"the media type is {declared[:64]!r}; supported are {', '.join(MIME_TYPES)}"
        )
    if MIME_TYPES[declared] is not image_format:
        raise _invalid(f"the media type is {declared!r}, but the file is {image_format.value}")


def _png_size(data: bytes) -> tuple[int, int]:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise _invalid(f"the PNG file begins with a chunk {kind!r} of {length} bytes, not IHDR")
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Walks the segments to the frame header (ITU-T T.81, B.1 and B.2.2)."""
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[at] != 0xFF:
            raise _invalid(f"the JPEG file has no marker at byte {at}")
        marker = data[at + 1]
        at += 1 if marker == 0xFF else 2  # a fill byte before a marker
        if marker in {0x01, 0xFF} or 0xD0 <= marker <= 0xD8:
            continue
        if marker in {0xD9, 0xDA}:
            raise _invalid("the JPEG file has no frame header before its first scan")
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2:
            raise _invalid(f"the JPEG file has a segment of {length} bytes at byte {at}")
        at += length
    raise _invalid(f"the JPEG file has no frame header in its first {MAX_JPEG_SEGMENTS} segments")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Reads the first chunk: VP8X, VP8L (RFC 9649) or VP8 (RFC 6386, 9.1)."""
    kind = data[12:16]
    if kind == b"VP8X":
        low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", data, 24)
        return 1 + (low_w | high_w << 16), 1 + (low_h | high_h << 16)
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise _invalid("the WebP file has a VP8L chunk without its signature")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        signature, width, height = struct.unpack_from("<3sHH", data, 23)
        if signature != b"\x9d\x01\x2a":
            raise _invalid("the WebP file has a VP8 chunk that begins with no key frame")
        return width & 0x3FFF, height & 0x3FFF
    if len(kind) < 4:
        raise IndexError
    raise _invalid(f"the WebP file begins with a chunk {kind!r}, not with VP8, VP8L or VP8X")


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _bmp_size(data: bytes) -> tuple[int, int]:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:  # OS/2 1.x
        width, height = struct.unpack_from("<HH", data, 18)
        return width, height
    if not 16 <= length <= 256:
        raise _invalid(f"the BMP file has a header of {length} bytes, known are 12 to 124")
    width, height = struct.unpack_from("<ii", data, 18)
    return width, abs(height)  # a negative height says that the top row comes first


def _tiff_size(data: bytes) -> tuple[int, int]:
    """Reads ImageWidth and ImageLength in the first directory; TIFF 6.0 and BigTIFF."""
    order = "<" if data[:2] == b"II" else ">"
    big = b"+" in data[2:4]
    offset_at, offset_type, count_type, entry_len = (8, "Q", "Q", 20) if big else (4, "I", "H", 12)
    (directory,) = struct.unpack_from(order + offset_type, data, offset_at)
    if directory >= len(data):
        raise _invalid(
            f"the TIFF file has its directory at byte {directory} of {len(data)}: it was cut short"
        )
    (count,) = struct.unpack_from(order + count_type, data, directory)
    first = directory + struct.calcsize("<" + count_type)
    sides: dict[int, int] = {}
    for index in range(min(count, MAX_TIFF_ENTRIES)):
        at = first + index * entry_len
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in {256, 257} and kind in TIFF_INTEGERS:
            (sides[tag],) = struct.unpack_from(
                order + TIFF_INTEGERS[kind], data, at + 4 + struct.calcsize("<" + offset_type)
            )
        if len(sides) == 2:
            return sides[256], sides[257]
    raise _invalid("the TIFF file has no width and height in its first directory")


TIFF_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # BYTE, SHORT, LONG, LONG8
SIZE_READERS: dict[ImageFormat, Callable[[bytes], tuple[int, int]]] = {
    ImageFormat.PNG: _png_size,
    ImageFormat.JPEG: _jpeg_size,
    ImageFormat.WEBP: _webp_size,
    ImageFormat.TIFF: _tiff_size,
    ImageFormat.BMP: _bmp_size,
    ImageFormat.GIF: _gif_size,
}

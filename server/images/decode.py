"""Bytes of a file become an upright RGB picture.

Runs in a worker process: codecs may crash, hang, or allocate what a file makes them. Only the first
frame is read.
"""

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageChops,
    ImageCms,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from server.images.formats import ImageFormat, check_size
from server.images.limits import ImageLimits
from server.images.refusal import ImageRefusedError, RefusalReason

Samples = npt.NDArray[Any]

# Imported so that Pillow knows them; it would look for others at the first file it cannot read.
PLUGINS = (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
# Rows that are converted at once: what lies between takes no memory to speak of.
BAND_ROWS = 256
# What makes the picture upright, by the value of the EXIF tag (EXIF 2.32, 4.6.4.A).
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
# Pillow's modes that an embedded profile of a colour space speaks of.
PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def decode(data: bytes, image_format: ImageFormat, limits: ImageLimits) -> Image.Image:
    """Returns the first frame of a file, upright, RGB, on white.

    Args:
        data: The file.
        image_format: What its header says; no other codec is tried.
        limits: Its size is looked at again, since what a codec finds may differ from the header.

    Raises:
        ImageRefusedError: The picture is larger than its header said and than allowed, or the file
            is damaged.
        Exception: Whatever Pillow raises for a damaged file; the file is at fault.
    """
    if image_format is ImageFormat.PNG:
        _check_png(data)
    with _open(data, image_format, limits) as picture:
        check_size(picture.width, picture.height, limits)
        picture.load()
        check_size(picture.width, picture.height, limits)
        orientation = _orientation(picture)
        rgb = _to_rgb(picture)
    return rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb


def _open(data: bytes, image_format: ImageFormat, limits: ImageLimits) -> Image.Image:
    """Opens a file, which reads what comes before its pixels."""
    # Guards the places where Pillow sees a size before it can be asked for it.
    Image.MAX_IMAGE_PIXELS = limits.max_pixels
    try:
        return Image.open(io.BytesIO(data), formats=[image_format.value])
    except Image.DecompressionBombError:
        limit = str(limits.max_pixels)
        raise ImageRefusedError(
            RefusalReason.TOO_LARGE,
            f"the {image_format.value} file has a frame far larger than its header says; "
            f"the limit is {limit} pixels",
            {"value": f"over {limit}", "limit": limit},
        ) from None
    except UnidentifiedImageError:
        raise ImageRefusedError(
            RefusalReason.INVALID,
            f"the {image_format.value} file of {len(data)} bytes is damaged or cut short: what "
            "follows its size cannot be read",
        ) from None


def _check_png(data: bytes) -> None:
    """Holds critical chunks to their checksums, which Pillow does not do for pixels.

    Raises:
        ImageRefusedError: A checksum is wrong, or the file ends before its last chunk.
    """
    at = 8
    view = memoryview(data)
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            break
        critical = not kind[0] & 0x20  # an upper case letter (PNG 3rd edition, 5.4)
        if critical and zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise ImageRefusedError(
                RefusalReason.INVALID,
                f"the PNG file has a chunk {kind.decode('latin-1')} at byte {at} with a wrong "
                "checksum: it is damaged",
            )
        if kind == b"IEND":
            return
        at = end
    raise ImageRefusedError(
        RefusalReason.INVALID, f"the PNG file ends after {len(data)} bytes, before its last chunk"
    )


def _orientation(picture: Image.Image) -> int:
    """Returns the EXIF orientation, 1 where there is none or the block is broken.

    A TIFF is upright already: Pillow turns it while it loads.
    """
    if picture.format == "TIFF":
        return 1
    try:
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001  # a block of anything makes Pillow raise anything
        return 1


def _to_rgb(picture: Image.Image) -> Image.Image:
    """Converts any mode to RGB, in sRGB where a profile says how, transparency on white."""
    profile = picture.info.get("icc_profile")
    if picture.mode in {"I", "F"} or picture.mode.startswith("I;16"):
        picture = _deep_gray_to_8_bits(picture)
    if picture.mode in {"1", "P", "PA", "La", "YCbCr"}:
        picture = _to_plain_mode(picture)
    if picture.mode == "LAB":
        return _transform(picture, LAB)
    if picture.mode == "CMYK" and picture.format == "JPEG" and "adobe" not in picture.info:
        # Pillow takes every such file for one of Adobe's, which store 255 - ink.
        picture = ImageChops.invert(picture)
    if not picture.has_transparency_data:
        return _opaque_to_rgb(picture, profile)
    with_alpha = picture.convert("RGBA")
    alpha = with_alpha.getchannel("A")
    rgb = _opaque_to_rgb(with_alpha.convert("RGB"), profile)
    white = Image.new("RGB", rgb.size, "white")
    white.paste(rgb, mask=alpha)
    return white


def _to_plain_mode(picture: Image.Image) -> Image.Image:
    """Converts to the mode L, LA, RGB or RGBA that holds the same."""
    if picture.mode == "1" and not picture.has_transparency_data:
        return picture.convert("L")
    if picture.mode == "La":
        return picture.convert("LA")
    return picture.convert("RGBA" if picture.has_transparency_data else "RGB")


def _opaque_to_rgb(picture: Image.Image, profile: bytes | None) -> Image.Image:
    """Converts L, RGB or CMYK to RGB, through the profile where it is sane and fits the mode."""
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            space = source.profile.xcolor_space.strip()
            # sRGB to sRGB would only round.
            known = "srgb" in (source.profile.profile_description or "").lower()
            if PROFILE_MODES.get(space) == picture.mode and not known:
                return _transform(picture, source)
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            pass  # a broken profile says nothing
    return picture.convert("RGB")


def _transform(picture: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    """Returns the picture in sRGB."""
    converted = ImageCms.profileToProfile(
        picture,
        source,
        SRGB,
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        outputMode="RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if converted is None:
        raise TypeError("profileToProfile returned no picture")
    return converted


def _deep_gray_to_8_bits(picture: Image.Image) -> Image.Image:
    """Converts gray of more bits or of floats to L, or LA where one level is transparent."""
    bits, signed, white_is_zero = _sample_format(picture)
    samples: Samples = np.asarray(picture)
    gray = np.empty(samples.shape, np.uint8)
    for top in range(0, len(samples), BAND_ROWS):
        band = slice(top, top + BAND_ROWS)
        gray[band] = _upper_8_bits(samples[band], bits, signed=signed)
    if white_is_zero:
        np.subtract(255, gray, out=gray)
    converted = Image.fromarray(gray)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        alpha = Image.fromarray((samples != transparent).astype(np.uint8) * np.uint8(255))
        converted = Image.merge("LA", (converted, alpha))
    return converted


def _upper_8_bits(samples: Samples, bits: int, *, signed: bool) -> Samples:
    """Returns samples as 8 bits.

    Integers keep their upper 8 bits, as Pillow does with 16-bit RGB, and negative ones are black.
    Floats run from 0, black, to 1, white.
    """
    if samples.dtype.kind == "f":
        # NaN is black: it is not over 0.
        levels: Samples = np.rint(np.where(samples > 0, np.minimum(samples, 1), 0) * 255)
        return levels
    if signed:
        samples, bits = np.maximum(samples, 0), bits - 1
    elif samples.dtype.kind == "i":
        samples = samples.view(np.uint32)  # Pillow's mode of 32 bits has a sign, the file has none
    upper: Samples = np.right_shift(samples, bits - 8)
    return upper


def _sample_format(picture: Image.Image) -> tuple[int, bool, bool]:
    """Returns bits of a sample, whether it has a sign, and whether 0 is white."""
    if not isinstance(picture, TiffImagePlugin.TiffImageFile):
        return 16, False, False
    tags = picture.tag_v2
    bits = int(tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0])
    signed = tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 2  # noqa: PLR2004
    return bits, signed, tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0

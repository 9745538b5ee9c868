"""Any mode, turn and profile becomes the upright RGB picture on white that a viewer shows."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from picture_files import as_stored, encode, gray_rgb, on_white, png_chunk, png_file
from PIL import Image, ImageCms

from server.images.decode import decode
from server.images.formats import check_header
from server.images.limits import ImageLimits
from server.images.refusal import ImageRefusedError, RefusalReason

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, about what is broken on purpose
LIMITS = ImageLimits()
# The upright page: no two of its eight turns are alike.
PAGE = np.full((48, 64, 3), 255, np.uint8)
PAGE[:16, :16] = (200, 30, 30)
PAGE[:16, 16:40] = (20, 20, 160)
PAGE[32:, :8] = (30, 120, 40)


def decoded(data: bytes, limits: ImageLimits = LIMITS) -> np.ndarray:
    return np.asarray(decode(data, check_header(data, limits).format, limits))


def saved(picture: Image.Image, image_format: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, image_format, **options)
    return out.getvalue()


def tiff(samples: np.ndarray, **tags: tuple[int, int]) -> bytes:
    """Writes a TIFF of one strip without compression: any sample format and photometric."""
    height, width = samples.shape[:2]
    entries: dict[int, tuple[int, int]] = {
        256: (4, width),
        257: (4, height),
        258: (3, samples.dtype.itemsize * 8),
        259: (3, 1),
        262: (3, 1),
        273: (4, 8),
        277: (3, 1),
        278: (4, height),
        279: (4, samples.nbytes),
        339: (3, {"u": 1, "i": 2, "f": 3}[samples.dtype.kind]),
    } | {int(tag): value for tag, value in tags.items()}
    body = samples.astype(samples.dtype.newbyteorder("<")).tobytes()
    body += bytes(len(body) % 2)
    directory = struct.pack("<H", len(entries))
    for tag, (kind, value) in sorted(entries.items()):
        directory += struct.pack("<HHII", tag, kind, 1, value)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + directory + bytes(4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "WEBP"])
def test_orientation(image_format: str, orientation: int) -> None:
    """I1: photos read sideways. Every turn gives the upright page, to the last bit."""
    stored = Image.fromarray(as_stored(PAGE, orientation))
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = encode(stored, image_format, orientation, **options)
    np.testing.assert_array_equal(decoded(data), PAGE)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_jpeg(orientation: int) -> None:
    """I1: as a phone writes it; the blocks of 8 keep the turns alike up to rounding."""
    stored = Image.fromarray(as_stored(PAGE, orientation))
    data = encode(stored, "JPEG", orientation, quality=95, subsampling=0)
    difference = np.abs(decoded(data).astype(int) - PAGE)
    assert difference.mean() < 2
    assert difference.max() < 40


BROKEN_EXIF = {
    "empty": b"",
    "no header": b"Exif\0\0",
    "text": b"Exif\0\0what is this doing here",
    "directory past the end": b"Exif\0\0MM\0*\xff\xff\xff\xff",
    "many entries": b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff\6\0\0\0",
    "orientation of text": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\2\0\0\0\4abcd\0\0\0\0",
    "orientation 9": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\x09\0\0\0\0\0\0",
    "orientation 0": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\0\0\0\0\0\0\0",
}


@pytest.mark.parametrize("exif", BROKEN_EXIF.values(), ids=BROKEN_EXIF)
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_broken_exif_is_ignored(image_format: str, exif: bytes) -> None:
    """I1: a bad block is no reason to refuse a page."""
    without = saved(Image.fromarray(PAGE), image_format)
    data = saved(Image.fromarray(PAGE), image_format, exif=exif)
    np.testing.assert_array_equal(decoded(data), decoded(without))


def test_orientation_and_directory_that_a_tiff_does_not_have() -> None:
    gray = np.arange(48, dtype=np.uint8).reshape(6, 8)
    for tags in ({"274": (3, 99)}, {"274": (3, 0)}, {"34665": (4, 99_999_999)}):
        np.testing.assert_array_equal(decoded(tiff(gray, **tags)), gray_rgb(gray))


def test_cmyk_jpeg_of_adobe_and_of_others() -> None:
    """Adobe's files hold 255 - ink and say so in a marker; others hold the ink."""
    inks = np.zeros((16, 16, 4), np.uint8)
    inks[..., 0], inks[..., 3] = 200, 20
    adobe = saved(Image.fromarray(inks, "CMYK"), "JPEG", quality=100)
    expected = np.array([235 - 235 * 200 / 255, 235, 235])
    assert np.abs(decoded(adobe) - expected).max() <= 2
    # The same numbers without the marker are ink.
    at = adobe.index(b"\xff\xee")
    assert adobe[at + 4 : at + 9] == b"Adobe"
    plain = adobe[:at] + adobe[at + 2 + int.from_bytes(adobe[at + 2 : at + 4]) :]
    assert np.abs(decoded(plain) - np.array([20 * 200 / 255, 0, 0])).max() <= 2


def test_gray_of_16_bits() -> None:
    samples = np.array([[0, 255, 256, 32767, 32768, 65279, 65280, 65535]] * 2, np.uint16)
    expected = gray_rgb((samples >> 8).astype(np.uint8))
    np.testing.assert_array_equal(decoded(png_file(samples)), expected)
    np.testing.assert_array_equal(decoded(tiff(samples)), expected)
    np.testing.assert_array_equal(decoded(tiff(samples, **{"262": (3, 0)})), 255 - expected)


def test_gray_of_other_depths() -> None:
    signed = np.array([[-32768, -1, 0, 128, 16384, 32767]] * 2, np.int16)
    np.testing.assert_array_equal(decoded(tiff(signed))[0, :, 0], [0, 0, 0, 1, 128, 255])
    wide = np.array([[0, 1 << 24, 1 << 31, (1 << 32) - 1]] * 2, np.uint32)
    np.testing.assert_array_equal(decoded(tiff(wide))[0, :, 0], [0, 1, 128, 255])
    np.testing.assert_array_equal(
        decoded(tiff((wide >> 1).astype(np.int32)))[0, :, 0], [0, 1, 128, 255]
    )
    floats = np.array([[-1, 0, 0.25, 0.5, 1, 7, np.inf, np.nan]] * 2, np.float32)
    np.testing.assert_array_equal(decoded(tiff(floats))[0, :, 0], [0, 0, 64, 128, 255, 255, 255, 0])
    white_is_0 = np.array([[0, 10, 255]] * 2, np.uint8)
    np.testing.assert_array_equal(
        decoded(tiff(white_is_0, **{"262": (3, 0)}))[0, :, 0], [255, 245, 0]
    )


def test_rgb_of_16_bits() -> None:
    samples = np.random.default_rng().integers(0, 1 << 16, (5, 7, 3), dtype=np.uint16)
    np.testing.assert_array_equal(decoded(png_file(samples)), (samples >> 8).astype(np.uint8))


def test_transparency_lies_on_white() -> None:
    rgba = np.random.default_rng().integers(0, 256, (9, 7, 4), dtype=np.uint8)
    rgba[0, 0, 3], rgba[0, 1, 3] = 0, 255
    expected = on_white(rgba[..., :3], rgba[..., 3])
    assert (expected[0, 0] == 255).all()
    assert (expected[0, 1] == rgba[0, 1, :3]).all()
    for image_format in ("PNG", "TIFF"):
        data = saved(Image.fromarray(rgba, "RGBA"), image_format)
        np.testing.assert_array_equal(decoded(data), expected)


def test_one_transparent_colour() -> None:
    """PNG's tRNS on gray, RGB and 16 bits; the hidden colour is no ink."""
    gray = np.array([[7, 8, 9]] * 2, np.uint8)
    data = saved(Image.fromarray(gray), "PNG", transparency=8)
    np.testing.assert_array_equal(decoded(data)[0, :, 0], [7, 255, 9])
    colours = np.array([[[1, 2, 3], [4, 5, 6]]] * 2, np.uint8)
    data = saved(Image.fromarray(colours), "PNG", transparency=(4, 5, 6))
    np.testing.assert_array_equal(decoded(data)[0], [[1, 2, 3], [255, 255, 255]])
    deep = png_file(np.array([[0x0700, 0x0801, 0x0802]] * 2, np.uint16))
    at = deep.index(b"IDAT") - 4
    data = deep[:at] + png_chunk(b"tRNS", b"\x08\x01") + deep[at:]
    np.testing.assert_array_equal(decoded(data)[0, :, 0], [7, 255, 8])


def test_ycbcr_and_lab() -> None:
    picture = Image.fromarray(PAGE)
    data = saved(picture.convert("YCbCr"), "TIFF")
    assert np.abs(decoded(data).astype(int) - PAGE).max() <= 2
    lab = ImageCms.profileToProfile(
        picture, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab is not None
    assert np.abs(decoded(saved(lab, "TIFF")).astype(int) - PAGE).max() <= 4


def test_first_frame_of_many() -> None:
    first, second = Image.fromarray(PAGE), Image.new("RGB", (64, 48), "black")
    for image_format, options in (
        ("GIF", {}),
        ("TIFF", {}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
    ):
        data = saved(first, image_format, save_all=True, append_images=[second], **options)
        got = decoded(data)
        assert got.shape == PAGE.shape
        assert np.abs(got.astype(int) - PAGE).max() <= 1


def rgb_profile(primaries: list[tuple[float, float, float]], gamma: float) -> bytes:
    """Writes an ICC profile (v2, matrix and one gamma); XYZ of the primaries, D50."""

    def fixed(value: float) -> bytes:
        return struct.pack(">i", round(value * 65536))

    description = b"wide test space\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(description)) + description + bytes(78),
        b"wtpt": b"XYZ \0\0\0\0" + b"".join(map(fixed, (0.9642, 1.0, 0.8249))),
    }
    for name, xyz in zip("rgb", primaries, strict=True):
        tags[name.encode() + b"XYZ"] = b"XYZ \0\0\0\0" + b"".join(map(fixed, xyz))
        curve = struct.pack(">IH", 1, round(gamma * 256))
        tags[name.encode() + b"TRC"] = b"curv\0\0\0\0" + curve
    body, table = b"", struct.pack(">I", len(tags))
    for name, content in tags.items():
        padded = content + bytes(-len(content) % 4)
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(body), len(content))
        body += padded
    head = struct.pack(
        ">I4sI4s4s4s",
        132 + len(table) - 4 + len(body),
        b"lcms",
        0x02100000,
        b"mntr",
        b"RGB ",
        b"XYZ ",
    )
    head += bytes(12) + b"acsp" + bytes(28) + b"".join(map(fixed, (0.9642, 1.0, 0.8249)))
    return head.ljust(128, b"\0") + table + body


# XYZ (D50) of the primaries of sRGB, and the same with red and green exchanged.
SRGB_PRIMARIES = [(0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)]
SWAPPED = rgb_profile([SRGB_PRIMARIES[1], SRGB_PRIMARIES[0], SRGB_PRIMARIES[2]], 2.2)


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_profiles_are_followed(image_format: str) -> None:
    """A space in which the first channel is green: what is red in the file is shown green."""
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = 220, 40
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = saved(Image.fromarray(pixels), image_format, icc_profile=SWAPPED, **options)
    assert np.abs(decoded(data)[4, 4].astype(int) - (40, 220, 0)).max() <= 8


def test_profile_under_transparency_and_palette() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 220, 128
    data = saved(Image.fromarray(rgba, "RGBA"), "PNG", icc_profile=SWAPPED)
    assert np.abs(decoded(data)[0, 0].astype(int) - (127, 237, 127)).max() <= 8
    flat = Image.new("P", (4, 4), 0)
    flat.putpalette([220, 40, 0] + [0] * 765)
    data = saved(flat, "PNG", icc_profile=SWAPPED)
    assert np.abs(decoded(data)[0, 0].astype(int) - (40, 220, 0)).max() <= 8


def test_srgb_profile_changes_nothing() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pixels = np.random.default_rng().integers(0, 256, (9, 9, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), "PNG", icc_profile=srgb)
    np.testing.assert_array_equal(decoded(data), pixels)


@pytest.mark.parametrize(
    "profile",
    [
        b"no profile",
        SWAPPED[:200],
        SWAPPED[:128] + bytes(len(SWAPPED) - 128),
        bytes(4000),
        SWAPPED.replace(b"RGB ", b"CMYK", 1),
        SWAPPED.replace(b"mntr", b"link", 1),
    ],
    ids=["text", "cut", "no tags", "zeros", "of CMYK", "a link"],
)
def test_broken_profile_is_ignored(profile: bytes) -> None:
    data = saved(Image.fromarray(PAGE), "PNG", icc_profile=profile)
    np.testing.assert_array_equal(decoded(data), PAGE)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"])
def test_cut_files(image_format: str) -> None:
    """I4: a file that ends early is refused wherever it ends, as long as pixels are missing."""
    noise = np.random.default_rng().integers(0, 256, (60, 80, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), image_format)
    for cut in (0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
        with pytest.raises((ImageRefusedError, OSError, SyntaxError, ValueError)):
            decoded(data[: int(len(data) * cut)])


@pytest.mark.parametrize("chunk", [b"IHDR", b"PLTE", b"IDAT", b"IEND"])
def test_png_with_a_wrong_checksum(chunk: bytes) -> None:
    """I4: damage in a critical chunk, even where only the checksum is wrong."""
    picture = Image.fromarray(PAGE).convert("P")
    data = bytearray(saved(picture, "PNG"))
    at = data.index(chunk)
    length = int.from_bytes(data[at - 4 : at])
    data[at + 4 + length] ^= 1
    with pytest.raises(ImageRefusedError, match="checksum") as caught:
        decoded(bytes(data))
    assert caught.value.reason is RefusalReason.INVALID


@pytest.mark.parametrize(("max_pixels", "says"), [(60_000, "300 x 300"), (10_000, "frame")])
def test_frame_larger_than_the_screen_of_a_gif(max_pixels: int, says: str) -> None:
    """The header is held to the limits, and so is what the codec finds after it."""
    data = bytearray(saved(Image.new("P", (300, 300)), "GIF"))
    data[6:10] = struct.pack("<HH", 10, 10)
    limits = ImageLimits(max_pixels=max_pixels)
    assert check_header(bytes(data), limits).width == 10
    with pytest.raises(ImageRefusedError, match=says) as caught:
        decoded(bytes(data), limits)
    assert caught.value.reason is RefusalReason.TOO_LARGE
    assert caught.value.metadata["limit"] == str(max_pixels)

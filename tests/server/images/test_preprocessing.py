"""The way from a file to the model's input gives what the reference image processor gives."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random

import numpy as np
import PIL
import pytest
from conftest import DATA
from picture_files import NUM_RECORDED, random_file, recorded_case
from PIL import Image
from reference.pixel_values import pixel_values

from server.images.decode import decode
from server.images.formats import check_header
from server.images.limits import ImageLimits, ImageSize
from server.images.resize import normalisation_table, resize, smart_resize

LIMITS = ImageLimits()
RECORDED = json.loads((DATA / "preprocessing" / "digests.json").read_text())


def size_of(case: dict) -> ImageSize:
    return ImageSize(min_pixels=case["min_pixels"], max_pixels=case["max_pixels"])


def table_of(case: dict) -> np.ndarray:
    return normalisation_table(case["image_mean"], case["image_std"], case["rescale_factor"])


def model_input(data: bytes, mime_type: str, case: dict) -> tuple[np.ndarray, list[int]]:
    """What the product makes of a file: pixel values and grid."""
    header = check_header(data, LIMITS, mime_type)
    pixels = np.asarray(resize(decode(data, header.format, LIMITS), size_of(case)))
    return pixel_values(pixels, table_of(case)), [1, pixels.shape[0] // 16, pixels.shape[1] // 16]


def test_pillow_is_the_one_that_was_recorded() -> None:
    assert PIL.__version__ == RECORDED["pillow"]


@pytest.mark.parametrize("index", range(NUM_RECORDED))
def test_recorded_tensors_of_the_reference(index: int) -> None:
    file = random_file(index)
    header = check_header(file.data, LIMITS, file.mime_type)
    upright = np.asarray(decode(file.data, header.format, LIMITS))
    np.testing.assert_array_equal(upright, file.upright, err_msg=file.name)
    values, grid = model_input(file.data, file.mime_type, recorded_case(index))
    digest = hashlib.sha256(values.tobytes())
    digest.update(np.array([grid], "<i8").tobytes())
    assert digest.hexdigest() == RECORDED["digests"][index], file.name


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_reference_processor_itself() -> None:
    from data.record_preprocessing import reference_digest

    for index in range(0, NUM_RECORDED, 5):
        assert reference_digest(index) == RECORDED["digests"][index]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (224, 224, (256, 256)),
        (480, 640, (480, 640)),
        (720, 1280, (704, 1280)),
        (1024, 1024, (1024, 1024)),
        (1080, 1920, (1088, 1920)),
        (2160, 3840, (2176, 3840)),
        (4096, 4096, (4096, 4096)),
        (6000, 8000, (3520, 4704)),
        (100, 15, (672, 128)),
    ],
)
def test_sizes_of_the_published_setting(height: int, width: int, expected: tuple[int, int]) -> None:
    assert smart_resize(height, width, ImageSize(65536, 16777216)) == expected


def test_any_size_gets_multiples_of_the_factor_within_the_pixels() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(5000):
        size = ImageSize(draw.randint(1024, 1 << 17), draw.randint(1 << 18, 1 << 24))
        short = draw.randint(2, 3000)
        long = min(short * draw.randint(1, 200), 20000)
        for height, width in ((short, long), (long, short)):
            new_height, new_width = smart_resize(height, width, size)
            assert new_height % 32 == 0 == new_width % 32
            assert new_height >= 32 <= new_width
            assert new_height * new_width >= size.min_pixels
            if min(new_height, new_width) > 32:
                assert new_height * new_width <= size.max_pixels


def test_table_differs_from_other_orders_of_rounding() -> None:
    """The reference rounds twice; computing in float64 throughout gives other bits."""
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    table = normalisation_table(mean, std, 1 / 255)
    assert table.shape == (3, 256)
    assert table.dtype == np.float32
    exact = (np.arange(256) / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]
    np.testing.assert_allclose(table, exact, rtol=0, atol=2e-6)
    assert (table != exact.astype(np.float32)).any()


def test_a_picture_of_the_right_size_keeps_its_pixels() -> None:
    pixels = np.random.default_rng().integers(0, 256, (256, 288, 3), dtype=np.uint8)
    resized = resize(Image.fromarray(pixels), ImageSize(65536, 16777216))
    np.testing.assert_array_equal(np.asarray(resized), pixels)

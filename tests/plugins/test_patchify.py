import numpy as np
import pytest
from reference.patchify import patchify

from runtime._native import plugins

# height and width in patches, patch_size, merge_size, num_frames
CASES = [(1, 1, 1, 1, 1), (2, 2, 16, 2, 2), (6, 10, 16, 2, 2), (3, 9, 5, 3, 1), (20, 14, 16, 2, 2)]


@pytest.mark.parametrize(("height", "width", "size", "merge", "frames"), CASES)
def test_equals_reference_in_any_pieces(
    rng: np.random.Generator, height: int, width: int, size: int, merge: int, frames: int
) -> None:
    pixels = rng.integers(0, 256, (height * size, width * size, 3), np.uint8)
    levels = rng.normal(size=(3, 256)).astype(np.float32)
    want = patchify(pixels, levels, size, merge, frames)
    pool = plugins.ThreadPool(2)
    for piece in (1, 7, len(want)):
        out = np.full_like(want, np.nan)
        for first in range(0, len(want), piece):
            rows = out[first : first + piece]
            plugins.patchify(pixels, levels, rows, size, merge, frames, first, pool)
        np.testing.assert_array_equal(out, want)


def test_refuses_what_does_not_fit() -> None:
    def run(shape: tuple[int, ...], rows: int, first: int, merge: int = 2) -> None:
        out = np.zeros((rows, 3 * 16 * 16), np.float32)
        levels = np.zeros((3, 256), np.float32)
        plugins.patchify(np.zeros(shape, np.uint8), levels, out, 16, merge, 1, first)

    run((32, 32, 3), 0, 4)
    with pytest.raises(ValueError, match="expected rows inside the 4 of the picture, got 2 from 3"):
        run((32, 32, 3), 2, 3)
    with pytest.raises(ValueError, match="expected rows inside"):
        run((32, 32, 3), 1, -1)
    with pytest.raises(ValueError, match="whole blocks of 2 x 2 patches, got 3 x 2"):
        run((48, 32, 3), 1, 0)
    with pytest.raises(ValueError, match="whole blocks of 0 x 0"):
        run((32, 32, 3), 1, 0, 0)
    with pytest.raises(ValueError, match="expected pixels in whole patches of side 16"):
        run((32, 40, 3), 1, 0)
    with pytest.raises(ValueError, match=r"patchify: expected pixels of shape \[32, 32, 3\]"):
        run((32, 32, 4), 1, 0)

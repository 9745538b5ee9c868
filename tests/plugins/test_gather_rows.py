import numpy as np
import pytest
from reference.gather_rows import gather_rows

from runtime._native import plugins


@pytest.mark.parametrize(("num_tokens", "num_out", "dim"), [(1, 1, 1), (5, 9, 7), (512, 32, 2560)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_copies_rows_exactly(
    rng: np.random.Generator, num_tokens: int, num_out: int, dim: int, dtype: type
) -> None:
    x = rng.integers(0, 2**16, (num_tokens, dim)).astype(dtype)
    index = rng.integers(0, num_tokens, num_out, np.int32)
    out = np.full((num_out, dim), 0x7FFF, dtype)
    plugins.gather_rows(x, index, out, plugins.ThreadPool(2))
    np.testing.assert_array_equal(out, gather_rows(x, index))


@pytest.mark.parametrize("row", [-1, 3])
def test_refuses_an_index_outside(row: int) -> None:
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match=rf"gather_rows: expected index in \[0, 3\), found {row}"):
        plugins.gather_rows(x, np.array([row], np.int32), np.zeros((1, 4), np.float32))

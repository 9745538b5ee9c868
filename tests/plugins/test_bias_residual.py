import numpy as np
import pytest

from runtime._native import plugins


@pytest.mark.parametrize(("num_rows", "dim"), [(0, 4), (1, 1), (5, 33), (90, 1152)])
def test_adds_in_the_order_of_the_formula(
    rng: np.random.Generator, num_rows: int, dim: int
) -> None:
    y, residual = rng.normal(size=(2, num_rows, dim)).astype(np.float32)
    bias = rng.normal(size=dim).astype(np.float32)
    want = residual + (y + bias)
    for pool in (None, plugins.ThreadPool(2)):
        out = residual.copy()
        plugins.bias_residual(y, bias, out, pool)
        np.testing.assert_array_equal(out, want)


def test_refuses_a_wrong_shape() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"bias_residual: expected residual of shape \[2, 8\]"):
        plugins.bias_residual(x, x[0], x[:1])

import numpy as np
import pytest
from reference.layer_norm import layer_norm

from runtime._native import plugins

CASES = [(1, 1), (3, 7), (5, 16), (65, 100), (33, 192), (300, 1152)]
EPS = 1e-6


@pytest.mark.parametrize(("num_rows", "dim"), CASES)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_equals_reference(rng: np.random.Generator, num_rows: int, dim: int, mean: float) -> None:
    x = (mean + rng.normal(size=(num_rows, dim))).astype(np.float32)
    weight, bias = rng.normal(size=(2, dim)).astype(np.float32)
    want = layer_norm(x, weight, bias, EPS)
    out = np.full_like(x, np.nan)
    plugins.layer_norm(x, weight, bias, out, EPS)
    # The header's bound: the mean's error through the division, that of the division, the last one.
    n = dim / 16 + 8
    deviation = np.sqrt(x.astype(np.float64).var(-1, keepdims=True) + EPS)
    of_mean = n * np.abs(x).mean(-1, keepdims=True) / deviation * np.abs(weight)
    bound = 2.0**-24 * (of_mean + (n + 4) * np.abs(want - bias) + np.abs(want))
    assert (np.abs(out - want) <= bound).all()

    in_place = x.copy()
    plugins.layer_norm(in_place, weight, bias, in_place, EPS, plugins.ThreadPool(2))
    assert in_place.tobytes() == out.tobytes()
    alone = np.full((1, dim), np.nan, np.float32)
    for row in range(0, num_rows, 9):
        plugins.layer_norm(x[row : row + 1], weight, bias, alone, EPS)
        assert alone.tobytes() == out[row].tobytes()


def test_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 40)).astype(np.float32)
    weight, bias = rng.normal(size=(2, 40)).astype(np.float32)
    x[1, 3] = np.nan
    out = np.zeros_like(x)
    plugins.layer_norm(x, weight, bias, out, EPS)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_refuses_a_wrong_shape() -> None:
    x, row = np.zeros((2, 8), np.float32), np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"layer_norm: expected bias of shape \[8\], found \[7\]"):
        plugins.layer_norm(x, row, row[:7], x, EPS)
    with pytest.raises(ValueError, match=r"layer_norm: expected out of shape \[2, 8\]"):
        plugins.layer_norm(x, row, row, x[:1], EPS)

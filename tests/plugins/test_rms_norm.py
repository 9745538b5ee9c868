import numpy as np
import pytest
from reference.rms_norm import rms_norm

from runtime._native import plugins

CASES = [(1, 1), (3, 7), (5, 16), (65, 100), (33, 1024), (4, 5120)]
RTOL = 2e-6  # the sum of squares adds dim / 16 numbers in a row; its square root halves the error


@pytest.mark.parametrize(("num_tokens", "dim"), CASES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equals_reference(
    rng: np.random.Generator, num_tokens: int, dim: int, unit_offset: bool, with_residual: bool
) -> None:
    x = rng.normal(size=(num_tokens, dim)).astype(np.float32)
    residual = rng.normal(size=(num_tokens, dim)).astype(np.float32) if with_residual else None
    weight = rng.normal(size=dim).astype(np.float32)
    total = x if residual is None else x + residual
    want = rms_norm(total, weight, 1e-6, unit_offset=unit_offset)
    out = np.full_like(x, np.nan)
    added = None if residual is None else residual.copy()
    plugins.rms_norm(x, weight, out, 1e-6, unit_offset, added)
    np.testing.assert_allclose(out, want, rtol=RTOL, atol=1e-30)
    if added is not None:
        np.testing.assert_array_equal(added, total)

    in_place = x.copy()
    added = None if residual is None else residual.copy()
    plugins.rms_norm(in_place, weight, in_place, 1e-6, unit_offset, added, plugins.ThreadPool(2))
    assert in_place.tobytes() == out.tobytes()


def test_a_row_does_not_depend_on_the_others(rng: np.random.Generator) -> None:
    x = rng.normal(size=(40, 1000)).astype(np.float32)
    weight = rng.normal(size=1000).astype(np.float32)
    together = np.full_like(x, np.nan)
    plugins.rms_norm(x, weight, together, 1e-6, True, pool=plugins.ThreadPool(2))
    alone = np.full((1, 1000), np.nan, np.float32)
    for row in range(40):
        plugins.rms_norm(x[row : row + 1], weight, alone, 1e-6, True)
        assert alone.tobytes() == together[row].tobytes()


def test_zeros_stay_zeros_and_nan_stays_in_its_row() -> None:
    x = np.zeros((3, 20), np.float32)
    x[1, 19] = np.nan
    out = np.ones_like(x)
    plugins.rms_norm(x, np.ones(20, np.float32), out, 1e-6, True)
    assert np.isnan(out[1]).all()
    assert not out[[0, 2]].any()


def test_refuses_what_it_would_have_to_convert() -> None:
    x, weight = np.zeros((2, 4), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"rms_norm: expected weight of shape \[4\], found \[5\]"):
        plugins.rms_norm(x, np.zeros(5, np.float32), x, 1e-6, True)
    with pytest.raises(ValueError, match="expected dim > 0"):
        plugins.rms_norm(x[:, :0].copy(), weight[:0].copy(), x[:, :0].copy(), 1e-6, True)
    for out in (np.zeros((2, 4)), np.zeros((2, 8), np.float32)[:, ::2]):
        with pytest.raises(TypeError):  # a converted copy would swallow the result
            plugins.rms_norm(x, weight, out, 1e-6, True)

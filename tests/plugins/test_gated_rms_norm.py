import numpy as np
import pytest
from reference.gated_rms_norm import gated_rms_norm

from runtime._native import plugins

EPS = 1e-6
CASES = [(1, 1, 1), (3, 2, 17), (5, 4, 32), (9, 3, 100), (4, 32, 128)]


@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), CASES)
def test_equals_reference(
    rng: np.random.Generator, num_tokens: int, num_heads: int, head_dim: int, extra: int
) -> None:
    x = rng.normal(size=(num_tokens, num_heads, head_dim)).astype(np.float32)
    z = (4 * rng.normal(size=(num_tokens, num_heads * head_dim + extra))).astype(np.float32)
    weight = rng.normal(size=head_dim).astype(np.float32)
    out = np.full_like(x, np.nan)
    plugins.gated_rms_norm(x, z, weight, out, EPS)
    gate = z[:, : num_heads * head_dim].reshape(x.shape)
    want = gated_rms_norm(
        x.astype(np.float64), gate.astype(np.float64), weight.astype(np.float64), EPS
    )
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-30)

    threaded = np.full_like(x, np.nan)
    plugins.gated_rms_norm(x, z, weight, threaded, EPS, plugins.ThreadPool(2))
    assert threaded.tobytes() == out.tobytes()
    in_place = x.copy()
    plugins.gated_rms_norm(in_place, z, weight, in_place, EPS)
    assert in_place.tobytes() == out.tobytes()


def test_extreme_gates_and_a_head_of_zeros() -> None:
    z = np.array([[-3e38, -1e4, -100, -87, -1, 0, 1, 87, 1e4, 1e30]], np.float32)
    x = np.ones((1, 1, 10), np.float32)
    out = np.full_like(x, np.nan)
    plugins.gated_rms_norm(x, z, np.ones(10, np.float32), out, EPS)
    with np.errstate(over="ignore"):
        want = gated_rms_norm(np.ones((1, 1, 10)), z.astype(np.float64)[None], np.ones(10), EPS)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=4e-37)  # silu ends at -88.4
    plugins.gated_rms_norm(np.zeros_like(x), z, np.ones(10, np.float32), out, EPS)
    assert not out.any()


def test_nan_stays_in_its_head(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 2, 20)).astype(np.float32)
    x[0, 1, 19] = np.nan
    z = rng.normal(size=(2, 40)).astype(np.float32)
    out = np.zeros_like(x)
    plugins.gated_rms_norm(x, z, np.ones(20, np.float32), out, EPS)
    np.testing.assert_array_equal(np.isnan(out).any(-1), [[False, True], [False, False]])


def test_refuses_a_wrong_shape() -> None:
    x = np.zeros((2, 2, 8), np.float32)
    z = np.zeros((2, 16), np.float32)
    with pytest.raises(ValueError, match=r"expected weight of shape \[8\], found \[7\]"):
        plugins.gated_rms_norm(x, z, np.zeros(7, np.float32), x, EPS)
    with pytest.raises(ValueError, match="z_stride"):
        plugins.gated_rms_norm(x, z[:, :15].copy(), np.zeros(8, np.float32), x, EPS)

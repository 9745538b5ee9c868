import numpy as np
import pytest
from reference.silu_mul import silu_mul

from runtime._native import plugins

CASES = [(1, 1), (7, 13), (5, 16), (33, 1000), (16, 9728)]
RTOL = 2e-6  # exp 2 ulp, one division, two products


@pytest.mark.parametrize(("num_tokens", "dim"), CASES)
def test_equals_reference(rng: np.random.Generator, num_tokens: int, dim: int) -> None:
    gate_up = (4 * rng.normal(size=(num_tokens, 2 * dim))).astype(np.float32)
    out = np.full((num_tokens, dim), np.nan, np.float32)
    plugins.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, silu_mul(gate_up), rtol=RTOL, atol=1e-30)
    threaded = np.full_like(out, np.nan)
    plugins.silu_mul(gate_up, threaded, plugins.ThreadPool(2))
    assert threaded.tobytes() == out.tobytes()


def test_extreme_gates_do_not_overflow() -> None:
    gate = np.array([-3e38, -1e4, -100, -87, -1, -0.0, 0, 1e-30, 1, 87, 1e4, 1e30], np.float32)
    gate_up = np.concatenate([gate, np.ones_like(gate)])[None]
    out = np.full((1, len(gate)), np.nan, np.float32)
    plugins.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, silu_mul(gate_up), rtol=RTOL, atol=4e-37)


def test_nan_stays_in_its_place(rng: np.random.Generator) -> None:
    gate_up = rng.normal(size=(2, 40)).astype(np.float32)
    gate_up[0, 3] = gate_up[1, 27] = np.nan
    out = np.zeros((2, 20), np.float32)
    plugins.silu_mul(gate_up, out)
    np.testing.assert_array_equal(np.argwhere(np.isnan(out)), [[0, 3], [1, 7]])


def test_refuses_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"silu_mul: expected gate_up of shape \[2, 8\], found"):
        plugins.silu_mul(np.zeros((2, 9), np.float32), np.zeros((2, 4), np.float32))

from collections.abc import Callable

import numpy as np
import pytest
from reference.bias_activation import gelu_erf, gelu_tanh, identity

from runtime._native import plugins

CASES = [(1, 1), (3, 7), (5, 16), (65, 100), (33, 4304)]
ACTIVATIONS = [
    (plugins.Activation.NONE, identity),
    (plugins.Activation.GELU_TANH, gelu_tanh),
    (plugins.Activation.GELU_ERF, gelu_erf),
]
Formula = Callable[[np.ndarray], np.ndarray]


def check(v: np.ndarray, out: np.ndarray, formula: Formula) -> None:
    """Where v is what the op has: rounded once."""
    bound = 4 * 2.0**-24 * np.maximum(np.abs(v), 1)
    assert (np.abs(out - formula(v.astype(np.float64))) <= bound).all()


@pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS)
@pytest.mark.parametrize(("num_rows", "dim"), CASES)
def test_equals_reference(
    rng: np.random.Generator,
    num_rows: int,
    dim: int,
    activation: plugins.Activation,
    formula: Formula,
) -> None:
    x = (3 * rng.normal(size=(num_rows, dim))).astype(np.float32)
    bias = rng.normal(size=dim).astype(np.float32)
    out = np.full_like(x, np.nan)
    plugins.bias_activation(x, bias, out, activation)
    check(x + bias, out, formula)
    in_place = x.copy()
    plugins.bias_activation(in_place, bias, in_place, activation, plugins.ThreadPool(2))
    assert in_place.tobytes() == out.tobytes()


@pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS)
def test_over_the_whole_range(activation: plugins.Activation, formula: Formula) -> None:
    ends = np.array([1e4, 1e12, 3e38], np.float32)
    x = np.concatenate([np.linspace(-12, 12, 300_000, dtype=np.float32), -ends, ends])[None]
    out = np.full_like(x, np.nan)
    plugins.bias_activation(x, np.zeros(x.shape[1], np.float32), out, activation)
    with np.errstate(over="ignore"):
        check(x, out, formula)


@pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS)
def test_nan_stays_nan(activation: plugins.Activation, formula: Formula) -> None:
    del formula
    x = np.zeros((1, 20), np.float32)
    x[0, [0, 17]] = np.nan
    out = np.zeros_like(x)
    plugins.bias_activation(x, np.ones(20, np.float32), out, activation)
    assert np.isnan(out[0]).nonzero()[0].tolist() == [0, 17]


def test_refuses_a_wrong_shape() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"bias_activation: expected bias of shape \[8\]"):
        plugins.bias_activation(x, np.zeros(9, np.float32), x, plugins.Activation.NONE)

import numpy as np
import pytest
from reference.linear import linear, linear_bound, to_bfloat16

from runtime._native import plugins

CASES = [(1, 1, 1), (3, 17, 5), (7, 32, 16), (9, 100, 33), (2, 2560, 40), (70, 333, 130)]


def run(x: np.ndarray, weight: np.ndarray, pool: plugins.ThreadPool | None = None) -> np.ndarray:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    plugins.linear(x, weight, out, pool)
    return out


@pytest.mark.parametrize(("num_tokens", "in_dim", "out_dim"), CASES)
def test_within_rounding_of_exact_sum(
    rng: np.random.Generator, num_tokens: int, in_dim: int, out_dim: int
) -> None:
    x = rng.normal(size=(num_tokens, in_dim)).astype(np.float32)
    weight = to_bfloat16(rng.normal(size=(out_dim, in_dim)))
    error = np.abs(run(x, weight) - linear(x, weight))
    assert (error <= linear_bound(x, weight)).all()


@pytest.mark.parametrize(("in_dim", "out_dim"), [(64, 48), (100, 37), (1500, 19)])
def test_a_row_has_the_same_bits_in_every_batch(
    rng: np.random.Generator, in_dim: int, out_dim: int
) -> None:
    x = rng.normal(size=(33, in_dim)).astype(np.float32)
    weight = to_bfloat16(rng.normal(size=(out_dim, in_dim)))
    alone = np.concatenate([run(x[t : t + 1], weight) for t in range(len(x))])
    pools = [None, plugins.ThreadPool(1), plugins.ThreadPool(2)]
    for num_tokens in range(1, len(x) + 1):
        picked = rng.permutation(len(x))[:num_tokens]
        for pool in pools:
            got = run(np.ascontiguousarray(x[picked]), weight, pool)
            assert got.tobytes() == alone[picked].tobytes()


def test_an_output_has_the_same_bits_whatever_the_other_outputs(rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 77)).astype(np.float32)
    weight = to_bfloat16(rng.normal(size=(50, 77)))
    whole = run(x, weight)
    for first, last in [(0, 1), (3, 20), (17, 50), (49, 50)]:
        part = run(x, np.ascontiguousarray(weight[first:last]))
        assert part.tobytes() == np.ascontiguousarray(whole[:, first:last]).tobytes()


def test_a_row_of_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    x = rng.normal(size=(6, 40)).astype(np.float32)
    weight = to_bfloat16(rng.normal(size=(20, 40)))
    clean = run(x, weight)
    x[2] = np.nan
    got = run(x, weight)
    assert np.isnan(got[2]).all()
    assert np.delete(got, 2, axis=0).tobytes() == np.delete(clean, 2, axis=0).tobytes()


def test_no_tokens() -> None:
    assert run(np.zeros((0, 8), np.float32), np.zeros((4, 8), np.uint16)).shape == (0, 4)


def test_refuses_a_wrong_shape() -> None:
    x = np.zeros((2, 8), np.float32)
    message = r"linear: expected weight of shape \[4, 8\], found \[4, 9\]"
    with pytest.raises(ValueError, match=message):
        run(x, np.zeros((4, 9), np.uint16))
    with pytest.raises(ValueError, match=r"linear: expected out of shape \[2, 4\], found \[3, 4\]"):
        plugins.linear(x, np.zeros((4, 8), np.uint16), np.zeros((3, 4), np.float32))


def test_refuses_a_wrong_dtype_or_layout() -> None:
    x = np.zeros((8, 8), np.float32)
    weight = np.zeros((4, 8), np.uint16)
    for wrong in (x.astype(np.float64), np.zeros((8, 16), np.float32)[:, ::2], x[0]):
        with pytest.raises(TypeError, match="linear"):
            plugins.linear(wrong, weight, np.zeros((8, 4), np.float32))

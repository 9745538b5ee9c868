import itertools

import numpy as np
import pytest
from reference.linear import linear, linear_bound, to_bfloat16

from runtime._native import plugins

# The smallest; odd ones around a vector, a panel, a tile of tokens and a sum of 256; a wide one.
CASES = [
    (1, 1, 1),
    (3, 17, 5),
    (7, 32, 16),
    (8, 255, 31),
    (9, 257, 33),
    (2, 2560, 40),
    (13, 513, 129),
    (70, 333, 130),
    (300, 48, 70),
]
DTYPES = ["bfloat16", "float32"]

pytestmark = pytest.mark.usefixtures("instruction_set")


def make_weight(rng: np.random.Generator, out_dim: int, in_dim: int, dtype: str) -> np.ndarray:
    weight = rng.normal(size=(out_dim, in_dim)).astype(np.float32)
    return to_bfloat16(weight) if dtype == "bfloat16" else weight


def run(x: np.ndarray, weight: np.ndarray, pool: plugins.ThreadPool | None = None) -> np.ndarray:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    plugins.linear(x, weight, out, pool)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "in_dim", "out_dim"), CASES)
def test_within_rounding_of_exact_sum(
    rng: np.random.Generator, num_tokens: int, in_dim: int, out_dim: int, dtype: str
) -> None:
    x = rng.normal(size=(num_tokens, in_dim)).astype(np.float32)
    weight = make_weight(rng, out_dim, in_dim, dtype)
    error = np.abs(run(x, weight) - linear(x, weight))
    assert (error <= linear_bound(x, weight)).all()


def test_both_weight_dtypes_give_the_same_bits(rng: np.random.Generator) -> None:
    weight = to_bfloat16(rng.normal(size=(45, 300)).astype(np.float32))
    for num_tokens in (1, 3, 8, 20):
        x = rng.normal(size=(num_tokens, 300)).astype(np.float32)
        widened = (weight.astype(np.uint32) << 16).view(np.float32)
        assert run(x, weight).tobytes() == run(x, widened).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_dim", "out_dim"), [(64, 48), (100, 37), (261, 19), (1500, 70)])
def test_a_row_has_the_same_bits_in_every_batch(
    rng: np.random.Generator, in_dim: int, out_dim: int, dtype: str
) -> None:
    x = rng.normal(size=(33, in_dim)).astype(np.float32)
    weight = make_weight(rng, out_dim, in_dim, dtype)
    alone = np.concatenate([run(x[t : t + 1], weight) for t in range(len(x))])
    pools = [None, plugins.ThreadPool(1), plugins.ThreadPool(2)]
    for num_tokens in range(1, len(x) + 1):
        picked = rng.permutation(len(x))[:num_tokens]
        for pool in pools:
            got = run(np.ascontiguousarray(x[picked]), weight, pool)
            assert got.tobytes() == alone[picked].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_batch_gives_the_bits_of_its_ranges(rng: np.random.Generator, dtype: str) -> None:
    x = rng.normal(size=(700, 300)).astype(np.float32)
    weight = make_weight(rng, 200, 300, dtype)
    whole = run(x, weight, plugins.ThreadPool(3))
    borders = [0, *sorted(rng.integers(1, 700, size=6)), 700]
    ranges = [run(x[a:b], weight) for a, b in itertools.pairwise(borders)]
    assert np.concatenate(ranges).tobytes() == whole.tobytes()
    for token in rng.integers(0, 700, size=10):
        assert run(x[token : token + 1], weight).tobytes() == whole[token].tobytes()


def test_an_output_has_the_same_bits_whatever_the_other_outputs(rng: np.random.Generator) -> None:
    for num_tokens in (5, 11):
        x = rng.normal(size=(num_tokens, 77)).astype(np.float32)
        weight = to_bfloat16(rng.normal(size=(50, 77)))
        whole = run(x, weight)
        for first, last in [(0, 1), (3, 20), (17, 50), (49, 50)]:
            part = run(x, np.ascontiguousarray(weight[first:last]))
            assert part.tobytes() == np.ascontiguousarray(whole[:, first:last]).tobytes()


def test_a_row_of_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    for num_tokens in (6, 30):
        x = rng.normal(size=(num_tokens, 40)).astype(np.float32)
        weight = to_bfloat16(rng.normal(size=(20, 40)))
        clean = run(x, weight)
        x[2] = np.nan
        got = run(x, weight)
        assert np.isnan(got[2]).all()
        assert np.delete(got, 2, axis=0).tobytes() == np.delete(clean, 2, axis=0).tobytes()


def test_a_nan_weight_stays_in_its_output(rng: np.random.Generator) -> None:
    for num_tokens in (1, 4, 30):
        x = rng.normal(size=(num_tokens, 40)).astype(np.float32)
        weight = to_bfloat16(rng.normal(size=(50, 40)))
        clean = run(x, weight)
        weight[33, 39] = 0x7FC0
        got = run(x, weight)
        assert np.isnan(got[:, 33]).all()
        assert np.delete(got, 33, axis=1).tobytes() == np.delete(clean, 33, axis=1).tobytes()


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

import numpy as np
import pytest
from reference.bfloat16 import from_bits, to_bits
from reference.embedding import embedding

from runtime._native import plugins

CASES = [(1, 1, 1), (7, 5, 13), (300, 1000, 64), (9, 4096, 2560)]


@pytest.mark.parametrize(("num_tokens", "vocab_size", "hidden"), CASES)
def test_copies_rows_exactly(
    rng: np.random.Generator, num_tokens: int, vocab_size: int, hidden: int
) -> None:
    table = to_bits(rng.normal(size=(vocab_size, hidden)))
    ids = rng.integers(0, vocab_size, num_tokens, np.int32)
    out = np.full((num_tokens, hidden), np.nan, np.float32)
    plugins.embedding(ids, table, out, plugins.ThreadPool(2))
    np.testing.assert_array_equal(out, embedding(ids, from_bits(table)))


def test_an_id_outside_the_table_gives_zeros(rng: np.random.Generator) -> None:
    table = to_bits(rng.normal(size=(5, 24)))
    ids = np.array([-1, 4, 5, -(2**31), 2**31 - 1, 0], np.int32)
    out = np.full((6, 24), np.nan, np.float32)
    plugins.embedding(ids, table, out)
    np.testing.assert_array_equal(out, embedding(ids, from_bits(table)))


def test_an_empty_batch_is_valid() -> None:
    plugins.embedding(
        np.empty(0, np.int32), np.zeros((3, 4), np.uint16), np.empty((0, 4), np.float32)
    )


def test_refuses_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"embedding: expected out of shape \[2, 4\], found \[2,"):
        plugins.embedding(
            np.zeros(2, np.int32), np.zeros((3, 4), np.uint16), np.zeros((2, 5), np.float32)
        )

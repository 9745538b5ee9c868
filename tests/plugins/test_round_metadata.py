import numpy as np
import pytest
from reference.round_metadata import round_metadata

from runtime._native import plugins


def call(
    table: np.ndarray, row_slots: np.ndarray, row_len: np.ndarray, num_tokens: int
) -> dict[str, np.ndarray]:
    """Runs the op into poisoned arrays."""
    num_rows = len(row_slots)
    out = {
        "slots": np.full(num_rows, -7, np.int32),
        "row_start": np.full(num_rows + 1, -7, np.int32),
        "token_ids": np.full(num_tokens, -7, np.int32),
        "positions": np.full((3, num_tokens), -7, np.int32),
        "sample_start": np.full(num_rows, -7, np.int32),
        "sample_len": np.full(num_rows, -7, np.int32),
    }
    plugins.round_metadata(table, row_slots, row_len, **out)
    return out


@pytest.mark.parametrize(("num_slots", "max_len"), [(1, 1), (4, 2), (9, 8), (70, 16)])
def test_equals_reference(rng: np.random.Generator, num_slots: int, max_len: int) -> None:
    table = plugins.make_slot_table(num_slots)
    for name, high in (("last_token", 1000), ("kv_len", 100_000)):
        table[name] = rng.integers(0, high, num_slots)
    table["rope_delta"] = rng.integers(-50, 50, num_slots)
    before = table.tobytes()
    row_slots = rng.permutation(num_slots).astype(np.int32)
    row_slots[rng.random(num_slots) < 0.2] = -1
    row_len = np.where(row_slots < 0, 0, rng.integers(1, max_len + 1, num_slots)).astype(np.int32)
    num_tokens = int(row_len.sum()) + 3  # a bucket is wider than its rows
    out = call(table, row_slots, row_len, num_tokens)

    ids, positions = np.zeros(num_tokens, np.int32), np.zeros((3, num_tokens), np.int32)
    starts = np.concatenate([[0], np.cumsum(row_len)])
    drafted = np.zeros(num_tokens, bool)  # left to the drafter
    for slot, start, length in zip(row_slots, starts, row_len, strict=False):
        if slot >= 0:
            state = table[slot]
            ids[start], positions[:, start : start + length] = round_metadata(
                state["last_token"], state["kv_len"], state["rope_delta"], length
            )
            drafted[start + 1 : start + length] = True
    np.testing.assert_array_equal(out["token_ids"][~drafted], ids[~drafted])
    np.testing.assert_array_equal(out["positions"], positions)
    np.testing.assert_array_equal(out["slots"], row_slots)
    np.testing.assert_array_equal(out["row_start"], starts)
    np.testing.assert_array_equal(out["sample_start"], np.where(row_slots < 0, -1, starts[:-1]))
    np.testing.assert_array_equal(out["sample_len"], row_len)
    assert table.tobytes() == before


def test_refuses_rows_that_do_not_fit() -> None:
    table = plugins.make_slot_table(1)
    zero = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="expected rows of at most 3 tokens together, got 4"):
        call(table, zero, zero + 4, 3)
    with pytest.raises(ValueError, match=r"expected slots in \[-1, 1\), found 1 in row 0"):
        call(table, zero + 1, zero + 1, 3)
    with pytest.raises(ValueError, match="expected row_len >= 0, found -1"):
        call(table, zero, zero - 1, 3)

import numpy as np
import pytest
from reference.round_metadata import round_metadata
from runtime._native import plugins


@pytest.mark.parametrize(("num_slots", "max_draft"), [(1, 0), (4, 1), (9, 7), (70, 15)])
def test_equals_reference(rng: np.random.Generator, num_slots: int, max_draft: int) -> None:
    table = plugins.make_slot_table(num_slots)
    for name, high in (("last_token", 1000), ("kv_len", 100_000)):
        table[name] = rng.integers(0, high, num_slots)
    table["rope_delta"] = rng.integers(-50, 50, num_slots)
    before = table.tobytes()
    drafts = rng.integers(0, 1000, (num_slots, max_draft), np.int32)
    slots = np.where(rng.random(num_slots) < 0.2, -1, rng.permutation(num_slots)).astype(np.int32)
    row_start = np.zeros(num_slots + 1, np.int32)
    row_start[1:] = np.cumsum(rng.integers(1, max_draft + 2, num_slots))
    num_tokens = int(row_start[-1]) + 3  # a bucket is wider than its rows
    token_ids = np.full(num_tokens, -7, np.int32)
    positions = np.full((3, num_tokens), -7, np.int32)
    plugins.round_metadata(table, drafts, slots, row_start, token_ids, positions)

    want_ids, want_positions = np.full_like(token_ids, -7), np.full_like(positions, -7)
    for slot, start, end in zip(slots, row_start, row_start[1:], strict=False):
        if slot >= 0:
            want_ids[start:end], want_positions[:, start:end] = round_metadata(
                table["last_token"][slot],
                table["kv_len"][slot],
                table["rope_delta"][slot],
                drafts[slot, : end - start - 1],
            )
    np.testing.assert_array_equal(token_ids, want_ids)
    np.testing.assert_array_equal(positions, want_positions)
    assert table.tobytes() == before


def test_refuses_a_row_longer_than_its_drafts() -> None:
    table = plugins.make_slot_table(1)
    args = (np.zeros(1, np.int32), np.array([0, 4], np.int32))
    with pytest.raises(ValueError, match="round_metadata: expected rows of at most 3 tokens"):
        plugins.round_metadata(
            table, np.zeros((1, 2), np.int32), *args, np.zeros(4, np.int32), np.zeros((3, 4), "i4")
        )

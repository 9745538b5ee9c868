import numpy as np
import pytest
from reference.scripted_draft import scripted_draft

from runtime._native import plugins

VOCAB_SIZE = 11
MAX_FORCED = 12


@pytest.mark.parametrize(("num_slots", "max_draft"), [(1, 1), (5, 7), (40, 15)])
def test_equals_reference(rng: np.random.Generator, num_slots: int, max_draft: int) -> None:
    table = plugins.make_slot_table(num_slots)
    forced = rng.integers(0, VOCAB_SIZE, (num_slots, MAX_FORCED), np.int32)
    script = rng.integers(0, max_draft + 2, (num_slots, MAX_FORCED), np.int32)
    table["num_forced"] = rng.integers(0, MAX_FORCED + 1, num_slots)
    table["num_script"] = rng.integers(0, MAX_FORCED + 1, num_slots)
    table["num_emitted"] = rng.integers(0, 2 * MAX_FORCED, num_slots)
    table["num_rounds"] = rng.integers(0, 100, num_slots)
    slots = np.where(rng.random(num_slots) < 0.2, -1, rng.permutation(num_slots)).astype(np.int32)
    row_len = rng.integers(1, max_draft + 2, num_slots)
    row_start = np.concatenate([[0], np.cumsum(row_len)]).astype(np.int32)
    token_ids = np.full(row_start[-1] + 2, -7, np.int32)
    plugins.scripted_draft(table, forced, script, slots, row_start, token_ids, VOCAB_SIZE)

    want = np.full_like(token_ids, -7)
    for slot, start, length in zip(slots, row_start, row_len, strict=False):
        if slot >= 0 and table["num_script"][slot] > 0:
            want[start + 1 : start + length] = scripted_draft(
                forced[slot, : table["num_forced"][slot]].tolist(),
                script[slot, : table["num_script"][slot]].tolist(),
                num_emitted=int(table["num_emitted"][slot]),
                num_rounds=int(table["num_rounds"][slot]),
                num_drafts=int(length) - 1,
                vocab_size=VOCAB_SIZE,
            )
    np.testing.assert_array_equal(token_ids, want)

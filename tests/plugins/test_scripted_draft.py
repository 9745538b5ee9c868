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
    drafts = np.full((num_slots, max_draft), -7, np.int32)
    row_start = np.arange(num_slots + 1, dtype=np.int32)
    plugins.scripted_draft(table, forced, script, slots, row_start, drafts, VOCAB_SIZE)

    want = np.full_like(drafts, -7)
    for slot in slots[slots >= 0]:
        if table["num_script"][slot] > 0:
            want[slot] = scripted_draft(
                forced[slot, : table["num_forced"][slot]].tolist(),
                script[slot, : table["num_script"][slot]].tolist(),
                num_emitted=int(table["num_emitted"][slot]),
                num_rounds=int(table["num_rounds"][slot]),
                max_draft=max_draft,
                vocab_size=VOCAB_SIZE,
            )
    np.testing.assert_array_equal(drafts, want)

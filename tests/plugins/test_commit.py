import numpy as np
import pytest
from reference.commit import Slot, commit_prefill, commit_verify

from runtime._native import plugins

NUM_SLOTS = 7
MAX_ROW = 8
# Ring rows and the limit of the flush rule: absorb at start, then lazy rings.
POLICIES = [(8, 0), (16, 0), (16, 8), (32, 16)]


def check_slot(state: np.void, slot: Slot) -> None:
    assert state["kv_len"] == slot.kv_len
    assert (state["ring_base"], state["ring_history"]) == (slot.ring_base, slot.ring_history)
    assert slot.folded + slot.ring_history == slot.kv_len
    assert state["num_emitted"] == len(slot.emitted)
    assert state["num_remaining"] == slot.max_tokens - len(slot.emitted)
    assert state["last_token"] == (slot.emitted[-1] if slot.emitted else 0)
    assert state["finish_reason"] == slot.finish_reason
    assert state["num_rounds"] == slot.num_rounds


def new_slot(rng: np.random.Generator, table: np.ndarray, index: int) -> Slot:
    slot = Slot(prompt_len=int(rng.integers(1, 40)), max_tokens=int(rng.integers(1, 60)))
    table[index] = np.zeros((), table.dtype)
    table["num_remaining"][index] = slot.max_tokens
    table["seed"][index] = 1 + index
    return slot


@pytest.mark.parametrize(("ring_rows", "history_limit"), POLICIES)
def test_many_random_rounds(rng: np.random.Generator, ring_rows: int, history_limit: int) -> None:
    table = plugins.make_slot_table(NUM_SLOTS)
    slots = [new_slot(rng, table, i) for i in range(NUM_SLOTS)]
    seen_finished_row = False
    for _ in range(600):
        prefill = bool(rng.random() < 0.3)
        wanted = [i for i in range(NUM_SLOTS) if (slots[i].kv_len < slots[i].prompt_len) == prefill]
        rows = [int(i) for i in rng.permutation(wanted)[: rng.integers(0, NUM_SLOTS + 1)]]
        rows += [-1] * int(rng.integers(0, 3))
        rng.shuffle(rows)
        num_rows = len(rows)
        lens = rng.integers(1, MAX_ROW + 1, num_rows)
        tokens = np.full((num_rows, MAX_ROW), -1, np.int32)
        emitted = rng.integers(-9, 99, num_rows).astype(np.int32)  # junk on padded rows
        reasons = rng.integers(-9, 99, num_rows).astype(np.int32)
        untouched = [i for i in range(NUM_SLOTS) if i not in rows]
        before = table[untouched].tobytes()
        for row, index in enumerate(rows):
            if index < 0:
                continue
            slot = slots[index]
            if prefill:
                lens[row] = min(lens[row], slot.prompt_len - slot.kv_len)
                most = int(slot.kv_len + lens[row] == slot.prompt_len)
                count = most
            else:
                most = min(int(lens[row]), slot.max_tokens - len(slot.emitted))
                count = int(rng.integers(1, most + 1)) if most > 0 else 0
            ends = count > 0 and (
                rng.random() < 0.1 or count + len(slot.emitted) == slot.max_tokens
            )
            if slot.finish_reason != 0:
                seen_finished_row = True
                count = int(rng.integers(0, MAX_ROW + 1))  # must be ignored
            emitted[row] = count
            reasons[row] = int(rng.integers(1, 3)) if ends else 0
            tokens[row, :count] = rng.integers(0, 1000, count)
            new = tokens[row, :count].tolist()
            if prefill:
                commit_prefill(slot, int(lens[row]), new, int(reasons[row]))
            else:
                commit_verify(
                    slot,
                    int(lens[row]),
                    new,
                    int(reasons[row]),
                    ring_rows=ring_rows,
                    history_limit=history_limit,
                )
        row_start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        plugins.commit_round(
            table,
            np.array(rows, np.int32).reshape(-1),
            row_start,
            tokens,
            emitted,
            reasons,
            ring_rows,
            history_limit,
            prefill,
        )
        for i in range(NUM_SLOTS):
            check_slot(table[i], slots[i])
            assert slots[i].ring_history <= ring_rows
        assert table[untouched].tobytes() == before
        np.testing.assert_array_equal(table["seed"], 1 + np.arange(NUM_SLOTS))
        for i in range(NUM_SLOTS):
            if slots[i].finish_reason != 0 and rng.random() < 0.1:
                slots[i] = new_slot(rng, table, i)
    assert seen_finished_row


def test_a_finished_slot_still_mirrors_the_flush() -> None:
    table = plugins.make_slot_table(1)
    table["ring_base"], table["ring_history"], table["kv_len"] = 12, 6, 40
    table["finish_reason"], table["last_token"], table["num_rounds"] = 1, 77, 3
    one = np.array([4], np.int32)
    rows = (np.zeros(1, np.int32), np.array([0, 4], np.int32))
    plugins.commit_round(
        table, *rows, np.full((1, 4), 5, np.int32), one, np.zeros(1, np.int32), 16, 8, False
    )
    state = table[0]
    assert (state["ring_base"], state["ring_history"], state["kv_len"]) == (2, 0, 40)
    assert (state["finish_reason"], state["last_token"], state["num_rounds"]) == (1, 77, 3)


def test_counts_what_slots_with_penalties_emit(rng: np.random.Generator) -> None:
    """Prefill and verify rows alike; slots without penalties, finished and padded rows do not."""
    vocab_size = 50
    table = plugins.make_slot_table(6)
    table["num_remaining"] = 1000
    table["repetition_penalty"] = [1.2, 0, 0, 0, 1.2, 0]
    table["presence_penalty"] = [0, -0.5, 0, 0, 0, 0]
    table["frequency_penalty"] = [0, 0, 0.5, 0, 0, 0]
    table["num_biases"][3] = table["min_tokens"][3] = 7  # rules, but no penalties
    table["finish_reason"][4] = 1
    counts = rng.integers(0, 2**16, (6, vocab_size), np.uint16)
    counts[:, :5] = [0x7FFF, 0xFFFF, 0x7FFE, 0x8000, 0]
    want = counts.astype(np.int64)
    for round_ in range(40):
        prefill = round_ % 4 == 0
        slots = np.append(rng.permutation(6), -1).astype(np.int32)
        rng.shuffle(slots)
        lens = rng.integers(1, MAX_ROW + 1, 7)
        emitted = rng.integers(0, np.full(7, 2) if prefill else lens + 1).astype(np.int32)
        tokens = np.full((7, MAX_ROW), -1, np.int32)
        for row, slot in enumerate(slots):
            tokens[row, : emitted[row]] = rng.integers(0, 9, emitted[row])
            if slot < 0:
                emitted[row] = -3
            elif slot < 3:
                for token in tokens[row, : emitted[row]]:
                    want[slot, token] += (want[slot, token] & 0x7FFF) != 0x7FFF
        plugins.commit_round(
            table,
            slots,
            np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
            tokens,
            emitted,
            np.zeros(7, np.int32),
            16,
            8,
            prefill,
            counts,
        )
        np.testing.assert_array_equal(counts, want)


def test_refuses_what_would_read_past_the_tokens() -> None:
    table = plugins.make_slot_table(1)
    rows = (np.zeros(1, np.int32), np.array([0, 4], np.int32))
    zeros = np.zeros(1, np.int32)
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(
        ValueError, match=r"commit_round: expected num_emitted in \[0, 4\], found 5"
    ):
        plugins.commit_round(table, *rows, tokens, zeros + 5, zeros, 16, 8, False)
    with pytest.raises(ValueError, match="expected ring_rows to be a power of two, got 12"):
        plugins.commit_round(table, *rows, tokens, zeros, zeros, 12, 8, False)
    counts = np.zeros((1, 9), np.uint16)
    with pytest.raises(ValueError, match=r"expected tokens in \[0, 9\), found 9 in row 0"):
        plugins.commit_round(table, *rows, tokens + 9, zeros + 1, zeros, 16, 8, False, counts)
    with pytest.raises(ValueError, match=r"expected token_counts of shape \[1, any\]"):
        plugins.commit_round(
            table, *rows, tokens, zeros, zeros, 16, 8, False, np.zeros((2, 9), np.uint16)
        )

"""How the cursors of a slot move."""

from dataclasses import dataclass, field


@dataclass
class Slot:
    """A sequence as the table describes it; `folded` counts the tokens in the state S0."""

    prompt_len: int
    max_tokens: int
    emitted: list[int] = field(default_factory=list)
    kv_len: int = 0
    folded: int = 0
    ring_base: int = 0
    ring_history: int = 0
    num_rounds: int = 0
    finish_reason: int = 0


def commit_prefill(slot: Slot, row_len: int, emitted: list[int], finish_reason: int) -> None:
    """A prefill chunk goes straight into the state; the last one emits the first token."""
    slot.kv_len += row_len
    slot.folded = slot.kv_len
    slot.ring_base = slot.ring_history = 0
    if slot.finish_reason == 0:
        slot.emitted += emitted
        slot.finish_reason = finish_reason


def commit_verify(
    slot: Slot,
    row_len: int,
    emitted: list[int],
    finish_reason: int,
    *,
    ring_rows: int,
    history_limit: int,
) -> None:
    """The layers fold the history where the row would not fit below the limit, then append."""
    if slot.ring_history + row_len > (history_limit or row_len):
        slot.folded += slot.ring_history
        slot.ring_base = (slot.ring_base + slot.ring_history) % ring_rows
        slot.ring_history = 0
    if slot.finish_reason != 0:
        return
    slot.kv_len += len(emitted)
    slot.ring_history += len(emitted)
    slot.emitted += emitted
    slot.num_rounds += 1
    slot.finish_reason = finish_reason

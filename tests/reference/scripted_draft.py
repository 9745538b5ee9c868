"""A drafter that is right exactly as often as its script says."""

from collections.abc import Sequence


def scripted_draft(
    forced: Sequence[int],
    script: Sequence[int],
    *,
    num_emitted: int,
    num_rounds: int,
    num_drafts: int,
    vocab_size: int,
) -> list[int]:
    """The drafts of one slot in its round `num_rounds`."""
    right = script[num_rounds % len(script)]
    drafts = []
    for i in range(num_drafts):
        index = num_emitted + i
        token = forced[index] if index < len(forced) else 0
        drafts.append(token if i < right else (token + 1) % vocab_size)
    return drafts

"""Token ids and rotary positions of a verify step."""

import numpy as np


def round_metadata(
    last_token: int, kv_len: int, rope_delta: int, drafts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [1 + drafts] and positions [3, 1 + drafts] of one row: the same on all three axes."""
    ids = np.concatenate([[last_token], drafts])
    return ids, np.tile(kv_len + rope_delta + np.arange(len(ids)), (3, 1))

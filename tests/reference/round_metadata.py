"""What a round derives from the slot table."""

import numpy as np


def round_metadata(
    last_token: int, kv_len: int, rope_delta: int, row_len: int
) -> tuple[int, np.ndarray]:
    """First token id of one row, and its positions [3, row_len]: the same on all three axes."""
    return last_token, np.tile(kv_len + rope_delta + np.arange(row_len), (3, 1))

"""Rows of a bfloat16 embedding table."""

import numpy as np


def embedding(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Looks `ids` [num_tokens] up in `table` [vocab_size, hidden]; zeros for an id outside it."""
    out = np.zeros((len(ids), table.shape[1]), table.dtype)
    inside = (ids >= 0) & (ids < len(table))
    out[inside] = table[ids[inside]]
    return out

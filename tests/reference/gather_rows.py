"""Picks rows of a matrix."""

import numpy as np


def gather_rows(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Row index[i] of x [num_tokens, dim] for each i."""
    return x[index]

"""LayerNorm over the last axis."""

import numpy as np


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float64."""
    x = x.astype(np.float64)
    difference = x - x.mean(-1, keepdims=True)
    variance = (difference**2).mean(-1, keepdims=True)
    return difference / np.sqrt(variance + eps) * weight + bias

"""The SwiGLU activation."""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) in float64, without overflow."""
    x = x.astype(np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """SwiGLU of gate and up, side by side in [num_tokens, 2 * dim], in float64."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gate * sigmoid(gate) * up

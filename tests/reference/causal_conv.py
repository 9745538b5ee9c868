"""NumPy truth of the `causal_conv` op: the whole sequence at once, no ring."""

import numpy as np
from numpy.typing import NDArray


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1.0 + np.exp(-x))


def causal_conv(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of x [num_tokens, channels] from the sequence's start; weight [channels, kernel]."""
    kernel = weight.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1]), x.dtype), x])
    return silu(sum(padded[j : j + len(x)] * weight[:, j] for j in range(kernel)))

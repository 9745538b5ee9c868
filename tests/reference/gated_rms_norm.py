"""NumPy truth of the `gated_rms_norm` op."""

import numpy as np
from numpy.typing import NDArray
from reference.causal_conv import silu


def gated_rms_norm(
    x: NDArray[np.float64], z: NDArray[np.float64], weight: NDArray[np.float64], eps: float
) -> NDArray[np.float64]:
    """Norm first, gate second; x and z [num_tokens, num_heads, head_dim], weight [head_dim]."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight * silu(z)

"""RMSNorm over the last axis."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, *, unit_offset: bool) -> np.ndarray:
    """X / sqrt(mean(x^2) + eps) * (1 + weight, or weight), in float64."""
    x = x.astype(np.float64)
    gain = weight.astype(np.float64) + (1.0 if unit_offset else 0.0)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain

"""Attention of patches over all patches of their picture, in both directions."""

import numpy as np


def vision_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> np.ndarray:
    """For q [num_rows, num_heads, head_dim], keys and values [num_patches, ...]; in float64."""
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    scores = scale * np.einsum("qhd,khd->hqk", q, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)

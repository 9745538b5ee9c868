"""2-D rotary embedding of the patches of a picture."""

import numpy as np
from reference.patch_grid import places


def vision_angles(
    height: int, width: int, merge_size: int, head_dim: int, theta: float
) -> np.ndarray:
    """Angles [height * width, head_dim / 2]: a quarter of the dims by row, a quarter by column.

    Frequencies and angles are float32, as the op has them.
    """
    quarter = head_dim // 4
    frequency = (1 / np.float64(theta) ** (np.arange(quarter) / quarter)).astype(np.float32)
    at = places(height, width, merge_size).astype(np.float32)
    return (at[:, :, None] * frequency).reshape(len(at), 2 * quarter)


def vision_rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotates [num_patches, num_heads, head_dim] in halves layout, in float64."""
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    cosine, sine = (f(angles.astype(np.float64))[:, None] for f in (np.cos, np.sin))
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)

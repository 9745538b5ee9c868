"""Patches of a picture, normalised through a table."""

import numpy as np
from reference.patch_grid import places


def patchify(
    pixels: np.ndarray, levels: np.ndarray, patch_size: int, merge_size: int, num_frames: int
) -> np.ndarray:
    """Rows [num_patches, 3 * num_frames * patch_size^2]: channel, frame, y, x."""
    normal = np.stack([levels[c][pixels[..., c]] for c in range(3)])
    height, width = (side // patch_size for side in pixels.shape[:2])
    rows = []
    for row, column in places(height, width, merge_size) * patch_size:
        patch = normal[:, row : row + patch_size, column : column + patch_size]
        rows.append(np.repeat(patch[:, None], num_frames, axis=1).ravel())
    return np.stack(rows)

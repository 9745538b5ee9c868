"""The patches of a still picture as the reference image processor lays them out."""

import numpy as np
import numpy.typing as npt

PATCH, MERGE, FRAMES = 16, 2, 2


def pixel_values(
    pixels: npt.NDArray[np.uint8], table: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Returns float32 [num_patches, 3 * 2 * 16 * 16].

    Patches come in 2 x 2 blocks in raster order, in each block top left, top right, bottom left,
    bottom right. The values of a patch run channel, frame, row, column; both frames are the same.

    Args:
        pixels: uint8 [height, width, 3], multiples of 32.
        table: float32 [3, 256], the model's input for each channel and value.
    """
    height, width, _ = pixels.shape
    channels = np.stack([table[c][pixels[:, :, c]] for c in range(3)])
    patches = []
    for block_top in range(0, height, MERGE * PATCH):
        for block_left in range(0, width, MERGE * PATCH):
            for top in (block_top, block_top + PATCH):
                for left in (block_left, block_left + PATCH):
                    patch = channels[:, top : top + PATCH, left : left + PATCH]
                    patches.append(np.stack([patch] * FRAMES, axis=1).ravel())
    return np.stack(patches)

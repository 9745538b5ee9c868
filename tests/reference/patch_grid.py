"""Where the rows of vision buffers lie in their picture."""

import numpy as np


def places(height: int, width: int, merge_size: int) -> np.ndarray:
    """Row and column of each patch [height * width, 2], in merge-block order."""
    m = merge_size
    return np.array(
        [
            (block_row * m + i, block_column * m + j)
            for block_row in range(height // m)
            for block_column in range(width // m)
            for i in range(m)
            for j in range(m)
        ]
    )

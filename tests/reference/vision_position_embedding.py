"""The learned position table, interpolated over the patches of a picture."""

import numpy as np
from reference.patch_grid import places


def position_embedding(table: np.ndarray, height: int, width: int, merge_size: int) -> np.ndarray:
    """[height * width, dim] in float64 of a table [side * side, dim], end points aligned."""
    side = round(len(table) ** 0.5)
    table = table.reshape(side, side, -1).astype(np.float64)

    def along(count: int) -> np.ndarray:
        """[count, side]: how much each entry gives to each position."""
        at = np.linspace(0, side - 1, count)[:, None]
        return np.maximum(0, 1 - np.abs(at - np.arange(side)))

    grid = np.einsum("ya,xb,abd->yxd", along(height), along(width), table)
    rows, columns = places(height, width, merge_size).T
    return grid[rows, columns]

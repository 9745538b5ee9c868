"""Rotary positions of a prompt with pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def prompt_positions(
    ids: Sequence[int], sizes: Sequence[tuple[int, int]], image_id: int
) -> tuple[np.ndarray, int]:
    """Rotary positions of a prompt.

    Args:
        ids: placeholders expanded.
        sizes: rows and columns of each picture's tokens.
        image_id: the placeholder.

    Returns:
        [3, num_tokens] (time, row, column), and what is added to the index of later tokens.
    """
    columns: list[tuple[int, int, int]] = []
    count, pictures, index = 0, iter(sizes), 0
    while index < len(ids):
        if ids[index] != image_id:
            columns.append((count, count, count))
            count, index = count + 1, index + 1
            continue
        height, width = next(pictures)
        columns += [(count, count + y, count + x) for y in range(height) for x in range(width)]
        count, index = count + max(height, width), index + height * width
    return np.array(columns).T, count - len(ids)

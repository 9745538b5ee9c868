"""The vision encoder of the Qwen3.5 family in NumPy, and where its pictures stand in a prompt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from reference.qwen3_5 import rotate, softmax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

Array = np.ndarray[Any, Any]

PREFIX = "model.visual."
EPS = 1e-6
THETA = 10000.0


def patch_places(height: int, width: int, merge: int) -> Array:
    """Row and column of each patch, [height * width, 2]: merge blocks, then inside a block."""
    return np.array(
        [
            (block_row + row, block_column + column)
            for block_row in range(0, height, merge)
            for block_column in range(0, width, merge)
            for row in range(merge)
            for column in range(merge)
        ]
    )


def prompt_positions(
    ids: Sequence[int], sizes: Sequence[tuple[int, int]], image_id: int
) -> tuple[Array, int]:
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


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * weight + bias


def gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class Qwen35Vision:
    """A checkpoint's vision encoder.

    Args:
        config: config.json with a `vision_config`.
        weights: tensors under `model.visual.`.
        dtype: float32 or float64, for the whole computation.
    """

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Array], dtype: DTypeLike = np.float32
    ) -> None:
        self.config: dict[str, Any] = config["vision_config"]
        self.dtype = np.dtype(dtype)
        self.weights = {
            name.removeprefix(PREFIX): value.astype(self.dtype)
            for name, value in weights.items()
            if name.startswith(PREFIX)
        }

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, x: Array, name: str) -> Array:
        return layer_norm(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def patches(self, pixels: Array, mean: float = 0.5, std: float = 0.5) -> Array:
        """uint8 [height, width, 3] -> [num_patches, 3 * frames * 16 * 16]."""
        size, frames = self.config["patch_size"], self.config["temporal_patch_size"]
        values = (pixels.astype(self.dtype) / 255 - mean) / std
        height, width = pixels.shape[0] // size, pixels.shape[1] // size
        rows = []
        for row, column in patch_places(height, width, self.config["spatial_merge_size"]):
            patch = values[row * size :, column * size :][:size, :size].transpose(2, 0, 1)
            rows.append(np.repeat(patch[:, None], frames, 1).ravel())
        return np.stack(rows)

    def position_embedding(self, places: Array, height: int, width: int) -> Array:
        table = self.weights["pos_embed.weight"]
        side = math.isqrt(len(table))
        out = np.zeros((len(places), table.shape[1]), self.dtype)
        for index, (row, column) in enumerate(places):
            y = row * (side - 1) / max(1, height - 1)
            x = column * (side - 1) / max(1, width - 1)
            top, left = int(y), int(x)
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                weight = abs(1 - dy - (y - top)) * abs(1 - dx - (x - left))
                corner = min(top + dy, side - 1) * side + min(left + dx, side - 1)
                out[index] += weight * table[corner]
        return out

    def attention(self, x: Array, name: str, rotary: tuple[Array, Array]) -> Array:
        num_patches, num_heads = len(x), self.config["num_heads"]
        qkv = self.linear(x, name + "qkv").reshape(num_patches, 3, num_heads, -1)
        q, k, v = rotate(qkv[:, 0], *rotary), rotate(qkv[:, 1], *rotary), qkv[:, 2]
        scores = np.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
        out = np.einsum("hnm,mhd->nhd", softmax(scores), v)
        return self.linear(out.reshape(num_patches, -1), name + "proj")

    def forward(self, pixels: Array) -> Array:
        """Returns [num_tokens, out_hidden_size] for uint8 [height, width, 3]."""
        c = self.config
        height, width = (extent // c["patch_size"] for extent in pixels.shape[:2])
        places = patch_places(height, width, c["spatial_merge_size"])
        kernel = self.weights["patch_embed.proj.weight"]
        x = self.patches(pixels) @ kernel.reshape(len(kernel), -1).T
        x += self.weights["patch_embed.proj.bias"] + self.position_embedding(places, height, width)
        quarter = c["hidden_size"] // c["num_heads"] // 4
        inv_freq = THETA ** (-np.arange(quarter) / quarter)
        angles = (places[:, :, None] * inv_freq).reshape(len(places), -1)
        rotary = np.cos(angles), np.sin(angles)
        for index in range(c["depth"]):
            block = f"blocks.{index}."
            x = x + self.attention(self.norm(x, block + "norm1"), block + "attn.", rotary)
            inner = gelu_tanh(self.linear(self.norm(x, block + "norm2"), block + "mlp.linear_fc1"))
            x = x + self.linear(inner, block + "mlp.linear_fc2")
        merged = self.norm(x, "merger.norm").reshape(len(x) // c["spatial_merge_size"] ** 2, -1)
        return self.linear(gelu_erf(self.linear(merged, "merger.linear_fc1")), "merger.linear_fc2")

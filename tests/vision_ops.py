"""The vision encoder as a chain of the ops, called through their bindings."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
from reference.linear import to_bfloat16

from runtime._native import plugins

EPS = 1e-6
THETA = 10000.0
PREFIX = "model.visual."
TILE = 64


def aligned(*shape: int) -> np.ndarray:
    """A float32 array of NaN on a cache line border."""
    size = int(np.prod(shape))
    raw = np.full(size + 16, np.nan, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    return raw[skip : skip + size].reshape(shape)


def kv_buffers(num_patches: int, num_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a picture for vision_rotary and vision_attention, NaN."""
    tiles = -(-num_patches // TILE)
    padded = -(-head_dim // 16) * 16
    return aligned(num_heads, tiles, head_dim, TILE), aligned(num_heads, tiles * TILE, padded)


class VisionChain:
    """Runs one picture at a time and counts the seconds of each op.

    Args:
        config: `vision_config` of the checkpoint.
        weights: Tensors by their names in the checkpoint, widened from BF16.
        num_threads: Threads of the ops.
        slice_rows: Rows that pass through the ops together; None is the whole picture.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, np.ndarray],
        num_threads: int = 1,
        slice_rows: int | None = None,
    ) -> None:
        self.config = config
        self.vectors: dict[str, np.ndarray] = {}
        self.matrices: dict[str, np.ndarray] = {}
        for name, value in weights.items():
            if not name.startswith(PREFIX):
                continue
            if value.ndim == 1:
                self.vectors[name.removeprefix(PREFIX)] = value
            else:
                self.matrices[name.removeprefix(PREFIX)] = to_bfloat16(value).reshape(
                    len(value), -1
                )
        self.pool = plugins.ThreadPool(num_threads)
        self.slice_rows = slice_rows
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def call(self, op: str, *args: object, **kwargs: object) -> None:
        begin = time.perf_counter()
        getattr(plugins, op)(*args, **kwargs, pool=self.pool)
        self.seconds[op] += time.perf_counter() - begin

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """Without the bias."""
        weight = self.matrices[f"{name}.weight"]
        out = aligned(len(x), len(weight))
        self.call("linear", x, weight, out)
        return out

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        out = aligned(*x.shape)
        self.call(
            "layer_norm", x, self.vectors[f"{name}.weight"], self.vectors[f"{name}.bias"], out, EPS
        )
        return out

    def bias(self, name: str) -> np.ndarray:
        return self.vectors[f"{name}.bias"]

    def slices(self, num_rows: int) -> list[slice]:
        step = self.slice_rows or num_rows
        return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]

    def forward(self, pixels: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixels [height, width, 3] to the last block's output and the merger's."""
        c = self.config
        merge, size, width = c["spatial_merge_size"], c["patch_size"], c["hidden_size"]
        frames = c["temporal_patch_size"]
        head_dim = width // c["num_heads"]
        grid = (pixels.shape[0] // size, pixels.shape[1] // size, merge)
        x = aligned(grid[0] * grid[1], width)
        pieces = self.slices(len(x))
        for rows in pieces:
            patches = aligned(rows.stop - rows.start, 3 * frames * size * size)
            self.call(
                "patchify", pixels, levels, patches, size, merge, frames, first_row=rows.start
            )
            x[rows] = self.linear(patches, "patch_embed.proj")
            self.call(
                "vision_position_embedding",
                x[rows],
                self.matrices["pos_embed.weight"],
                *grid,
                bias=self.bias("patch_embed.proj"),
                first_row=rows.start,
            )
        angles = aligned(max(grid[:2]), 2, head_dim // 4)
        plugins.vision_rotary_angles(head_dim, THETA, angles)
        keys, values = kv_buffers(len(x), c["num_heads"], head_dim)
        q = aligned(len(x), width)
        for layer in range(c["depth"]):
            block = f"blocks.{layer}."
            for rows in pieces:
                qkv = self.linear(self.norm(x[rows], block + "norm1"), block + "attn.qkv")
                self.call(
                    "vision_rotary",
                    qkv,
                    self.bias(block + "attn.qkv"),
                    angles,
                    q[rows],
                    keys,
                    values,
                    *grid,
                    first_row=rows.start,
                )
            for rows in pieces:
                self.call(
                    "vision_attention", q[rows], keys, values, len(x), q[rows], head_dim**-0.5
                )
                y = self.linear(q[rows], block + "attn.proj")
                self.call("bias_residual", y, self.bias(block + "attn.proj"), x[rows])
                hidden = self.linear(self.norm(x[rows], block + "norm2"), block + "mlp.linear_fc1")
                self.call(
                    "bias_activation",
                    hidden,
                    self.bias(block + "mlp.linear_fc1"),
                    hidden,
                    plugins.Activation.GELU_TANH,
                )
                y = self.linear(hidden, block + "mlp.linear_fc2")
                self.call("bias_residual", y, self.bias(block + "mlp.linear_fc2"), x[rows])
        merged = self.norm(x, "merger.norm").reshape(len(x) // merge**2, -1)
        for name, activation in (
            ("merger.linear_fc1", plugins.Activation.GELU_ERF),
            ("merger.linear_fc2", plugins.Activation.NONE),
        ):
            merged = self.linear(merged, name)
            self.call("bias_activation", merged, self.bias(name), merged, activation)
        return x, merged

"""Vision encoder of the qwen3_5 family in NumPy, put together from the references of the ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference.bias_activation import gelu_erf, gelu_tanh
from reference.layer_norm import layer_norm
from reference.vision_attention import vision_attention
from reference.vision_position_embedding import position_embedding
from reference.vision_rotary import vision_angles, vision_rotate

EPS = 1e-6
THETA = 10000.0
PREFIX = "model.visual."


class VisionEncoder:
    """One picture at a time, in float64.

    Args:
        config: `vision_config` of the checkpoint.
        weights: Tensors by their names in the checkpoint, widened.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = {
            name.removeprefix(PREFIX): value.astype(np.float64)
            for name, value in weights.items()
            if name.startswith(PREFIX)
        }

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.weights[f"{name}.weight"]
        return x @ weight.reshape(len(weight), -1).T + self.weights[f"{name}.bias"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)

    def forward(
        self, patches: np.ndarray, height: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Patches [height * width, 1536] to the last block's output and the merger's."""
        merge, heads = self.config["spatial_merge_size"], self.config["num_heads"]
        head_dim = self.config["hidden_size"] // heads
        x = self.linear(patches.astype(np.float64), "patch_embed.proj")
        x += position_embedding(self.weights["pos_embed.weight"], height, width, merge)
        angles = vision_angles(height, width, merge, head_dim, THETA)
        for layer in range(self.config["depth"]):
            block = f"blocks.{layer}."
            qkv = self.linear(self.norm(x, block + "norm1"), block + "attn.qkv")
            q, k, v = qkv.reshape(len(x), 3, heads, head_dim).swapaxes(0, 1)
            mixed = vision_attention(
                vision_rotate(q, angles), vision_rotate(k, angles), v, head_dim**-0.5
            )
            x = x + self.linear(mixed.reshape(len(x), -1), block + "attn.proj")
            hidden = self.linear(self.norm(x, block + "norm2"), block + "mlp.linear_fc1")
            x = x + self.linear(gelu_tanh(hidden), block + "mlp.linear_fc2")
        merged = self.norm(x, "merger.norm").reshape(len(x) // merge**2, -1)
        merged = gelu_erf(self.linear(merged, "merger.linear_fc1"))
        return x, self.linear(merged, "merger.linear_fc2")

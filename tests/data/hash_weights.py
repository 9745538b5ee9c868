"""The weights of the tiny checkpoints: a closed-form function of tensor name and element index.

No random generator is involved, so any language can rebuild a checkpoint bit for bit:

    u32 h  = fnv1a_32(tensor name, UTF-8)
    u32 x  = h + i * 0x9E3779B9                  (i: flat row-major index, wraps modulo 2^32)
    x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
    v      = x / 2^31 - 1                        (double, in [-1, 1))
    weight = centre + scale * v                  (double, rounded to float32, then to the stored
                                                  type, both to nearest even)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Ending of the name -> (centre, scale) of the uniform distribution; the first that fits counts.
DISTRIBUTIONS: tuple[tuple[tuple[str, ...], tuple[float, float]], ...] = (
    (("linear_attn.norm.weight",), (1.0, 0.3)),  # used as it is, so centred on 1
    (("A_log",), (-1.5, 1.5)),  # A = exp(A_log) within about (0.05, 1)
    (("dt_bias",), (-1.0, 1.0)),
    (("conv1d.weight",), (0.0, 0.9)),
    # 1 + w of about 1.8 sharpens attention, so that a wrong rotation shows in the logits.
    (("q_norm.weight", "k_norm.weight"), (0.8, 0.3)),
    # Zero-centred RMSNorm, used as 1 + w.
    (
        ("norm.weight", "layernorm.weight", "norm_embedding.weight", "norm_hidden.weight"),
        (0.0, 0.3),
    ),
    (("bias",), (0.0, 0.1)),
    (("pos_embed.weight",), (0.0, 0.5)),
    (("embed_tokens.weight",), (0.0, 1.0)),
    (("lm_head.weight",), (0.0, 0.6)),
)


def fnv1a_32(text: str) -> int:
    h = 0x811C9DC5
    for byte in text.encode():
        h = ((h ^ byte) * 0x01000193) & 0xFFFFFFFF
    return h


def hash_noise(name: str, size: int) -> NDArray[np.float64]:
    x = np.arange(size, dtype=np.uint64) * 0x9E3779B9 + fnv1a_32(name)
    x &= 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    x ^= x >> 16
    return x.astype(np.float64) / 2147483648.0 - 1.0


def distribution(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Returns (centre, scale) of one tensor's uniform distribution."""
    if (
        name.startswith("model.visual.") and ".norm" in name
    ):  # LayerNorm: weight about 1, bias about 0
        return (1.0, 0.3) if name.endswith("weight") else (0.0, 0.2)
    for endings, centre_scale in DISTRIBUTIONS:
        if name.endswith(endings):
            return centre_scale
    gain = 8.0 if name.endswith("self_attn.o_proj.weight") else 2.2
    fan_in = int(np.prod(shape[1:]))
    return 0.0, gain / fan_in**0.5


def is_stored_as_f32(name: str) -> bool:
    """Tells F32 tensors from BF16 ones, split as in the published checkpoints."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def make_weight(name: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """Returns one weight before it is rounded to the stored type."""
    centre, scale = distribution(name, shape)
    values = centre + scale * hash_noise(name, int(np.prod(shape)))
    return values.astype(np.float32).reshape(shape)

"""q/k norm and partial interleaved M-RoPE of a full-attention layer, for one sequence's tokens."""

import numpy as np
from reference.rms_norm import rms_norm


def rotary_axes(num_frequencies: int, section: tuple[int, int, int]) -> np.ndarray:
    """Which position axis (time, height, width) each frequency reads: t, h, w, t, h, w, ..."""
    axis = np.zeros(num_frequencies, np.int64)
    axis[1 : 3 * section[1] : 3] = 1
    axis[2 : 3 * section[2] : 3] = 2
    return axis


def contiguous_axes(num_frequencies: int, section: tuple[int, int, int]) -> np.ndarray:
    """The layout of older models, in blocks; wrong for Qwen3.5, so tests must tell it apart."""
    del num_frequencies
    return np.repeat(np.arange(3), section)


def rotate(
    x: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    axes: np.ndarray,
    attention_factor: float = 1.0,
) -> np.ndarray:
    """Rotates the leading dims of `x` [num_tokens, num_heads, head_dim], halves layout.

    The angle is a float32 product, as the op has it: at position 100,000 its rounding is the
    whole difference. Everything else is float64.
    """
    angle = positions[axes].T.astype(np.float32) * inv_freq.astype(np.float32)
    cos = np.cos(angle.astype(np.float64))[:, None] * attention_factor
    sin = np.sin(angle.astype(np.float64))[:, None] * attention_factor
    half = len(inv_freq)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


def project_heads(
    qkv: np.ndarray, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, gates, keys and values of fused rows: query and gate alternate per head."""
    num_tokens = len(qkv)
    split = 2 * num_heads * head_dim
    kv = num_kv_heads * head_dim
    q_gate = qkv[:, :split].reshape(num_tokens, num_heads, 2 * head_dim)
    k = qkv[:, split : split + kv].reshape(num_tokens, num_kv_heads, head_dim)
    v = qkv[:, split + kv : split + 2 * kv].reshape(num_tokens, num_kv_heads, head_dim)
    return q_gate[..., :head_dim], q_gate[..., head_dim:], k, v


def norm_rotate(
    x: np.ndarray,
    weight: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    axes: np.ndarray,
    *,
    eps: float,
    attention_factor: float = 1.0,
) -> np.ndarray:
    """The norm over head_dim (1 + weight) and the rotation of queries or keys, in float64."""
    normed = rms_norm(x, weight, eps, unit_offset=True)
    return rotate(normed, positions, inv_freq, axes, attention_factor)

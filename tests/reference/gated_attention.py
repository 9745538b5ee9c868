"""Causal softmax attention with a sigmoid output gate, for one sequence."""

import numpy as np
from reference.silu_mul import sigmoid


def gated_attention(
    q: np.ndarray, gate: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> np.ndarray:
    """The last len(q) tokens of a sequence attend to it and to themselves, in float64.

    Args:
        q: [num_tokens, num_heads, head_dim].
        gate: as q, before the sigmoid.
        keys: [kv_len, num_kv_heads, head_dim], kv_len >= num_tokens.
        values: as keys.
        scale: what scores are multiplied by.
    """
    num_tokens, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = keys.shape
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    visible = np.arange(kv_len) <= (kv_len - num_tokens + np.arange(num_tokens))[:, None]
    out = np.empty(q.shape)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = np.where(visible, q[:, head] @ keys[:, kv_head].T * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights @ values[:, kv_head] / weights.sum(-1, keepdims=True)
    return out * sigmoid(gate)

"""Text model of the qwen3_5 family in NumPy: what every other implementation is held to.

One sequence at a time, clarity over speed. The formulas are those of transformers 5.14.1
(`modeling_qwen3_5.py`) with one difference: a float32 or float64 run stays in that type
throughout, so there is no rounding to BF16 between the steps. The MTP head, which transformers does
not have, is that of vLLM.

Shapes: `num_tokens` rows first, weights as stored, [out, in]. A Gated DeltaNet (GDN) layer has HK
key heads of DK and HV value heads of DV; HV is a multiple of HK and DK need not equal DV.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Array = NDArray[Any]
LONG_PREFIX, SHORT_PREFIX = "model.language_model.", "model."
L2_NORM_EPS = 1e-6  # fixed in the model class, not rms_norm_eps of the config


def load_safetensors(path: Path, dtype: DTypeLike = np.float32) -> dict[str, Array]:
    """Reads the BF16 and F32 tensors of one file, widened to `dtype`."""
    raw = path.read_bytes()
    body = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:body]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        data = raw[body + start : body + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(data, "<f4")
        else:
            raise ValueError(f"{name}: expected BF16 or F32, got {entry['dtype']}")
        tensors[name] = values.reshape(entry["shape"]).astype(dtype)
    return tensors


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))  # does not overflow for large -x


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalises the last axis and scales it by `weight` as it is."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def l2_norm(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_NORM_EPS)


def causal_conv(x: Array, weight: Array, history: Array) -> tuple[Array, Array]:
    """Depthwise convolution of [num_tokens, channels] and silu; the last tap is the token itself.

    Args:
        x: [num_tokens, channels].
        weight: [channels, kernel].
        history: [kernel - 1, channels], the inputs just before `x`; zeros at a sequence's start.

    Returns:
        The output [num_tokens, channels] and the history for the next call.
    """
    num_tokens, kernel = len(x), weight.shape[1]
    rows = np.concatenate([history, x])
    out = sum(rows[tap : tap + num_tokens] * weight[:, tap] for tap in range(kernel))
    return silu(np.asarray(out)), rows[num_tokens:]


def gated_delta_rule(
    q: Array, k: Array, v: Array, beta: Array, g: Array, state: Array
) -> tuple[Array, Array]:
    """The recurrence of a GDN layer (arXiv:2412.06464, eq. 10), token by token.

    Args:
        q: [num_tokens, HK, DK], normalised and scaled.
        k: [num_tokens, HK, DK], normalised.
        v: [num_tokens, HV, DV].
        beta: [num_tokens, HV], write strength in (0, 1).
        g: [num_tokens, HV], logarithm of the decay, <= 0.
        state: [HV, DK, DV]; zeros at a sequence's start.

    Returns:
        The output [num_tokens, HV, DV] and the state after the last token.
    """
    ratio = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, ratio, 1), np.repeat(k, ratio, 1)  # value head h reads key head h // ratio
    out = np.empty_like(v)
    for i in range(len(v)):
        state = state * np.exp(g[i])[:, None, None]
        read = np.einsum("hk,hkv->hv", k[i], state)  # from the state that has already decayed
        error = (v[i] - read) * beta[i][:, None]
        state = state + k[i][:, :, None] * error[:, None, :]
        out[i] = np.einsum("hk,hkv->hv", q[i], state)
    return out, state


def rotary_cos_sin(positions: Array, rope: dict[str, Any], head_dim: int) -> tuple[Array, Array]:
    """Angles of interleaved M-RoPE.

    Args:
        positions: [3, num_tokens]: time, row and column; all equal for text.
        rope: `rope_parameters` of the config.
        head_dim: size of an attention head, of which only a part is rotated.

    Returns:
        Cosine and sine in float64, [num_tokens, rotary_dim / 2].
    """
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 0.25))
    inv_freq = 1.0 / rope["rope_theta"] ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    axis = np.zeros(rotary_dim // 2, int)
    for row in (1, 2):  # frequencies take turns: time, row, column, time, ...
        axis[row : 3 * rope["mrope_section"][row] : 3] = row
    angles = positions[axis].T * inv_freq
    return np.cos(angles), np.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the leading dims of [num_tokens, num_heads, head_dim]; dim j pairs with j + half."""
    cos, sin = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Attention of the last `num_tokens` of `kv_len` positions.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim].
        v: [kv_len, num_kv_heads, head_dim].

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    (num_tokens, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
    visible = np.arange(kv_len)[None] <= (kv_len - num_tokens + np.arange(num_tokens))[:, None]
    out = np.empty_like(q)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T * head_dim**-0.5
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, kv_head]
    return out


@dataclass
class AttentionState:
    """Keys and values of one attention layer, [kv_len, num_kv_heads, head_dim] each."""

    k: Array
    v: Array


@dataclass
class GdnState:
    """State of one GDN layer."""

    conv: Array  # [kernel - 1, channels], inputs of the convolution, before it
    recurrent: Array  # [HV, DK, DV]


@dataclass
class SequenceState:
    """All that one sequence carries from call to call."""

    layers: list[AttentionState | GdnState]
    num_tokens: int = 0
    rope_delta: int = 0  # position of a decoded token minus its index; not 0 after an image
    hidden: list[Array] = field(
        default_factory=list
    )  # of the last call: embeddings, then each layer


class Qwen35Text:
    """A checkpoint's language model and, where it has one, its MTP head.

    Args:
        config: config.json, flat or with a `text_config`.
        weights: tensors under the long (`model.language_model.`) or short (`model.`) names.
        dtype: float32 or float64, for the whole computation.
    """

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Array], dtype: DTypeLike = np.float32
    ) -> None:
        self.config: dict[str, Any] = config.get("text_config", config)
        self.rope: dict[str, Any] = self.config.get("rope_parameters") or self.config
        self.eps: float = self.config["rms_norm_eps"]
        self.dtype = np.dtype(dtype)
        self.weights = {name: value.astype(self.dtype) for name, value in weights.items()}
        is_long = LONG_PREFIX + "norm.weight" in weights
        self.prefix = LONG_PREFIX if is_long else SHORT_PREFIX
        self.embed_tokens = self.weights[self.prefix + "embed_tokens.weight"]
        is_tied = config.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
        self.lm_head = self.embed_tokens if is_tied else self.weights["lm_head.weight"]

    @classmethod
    def load(cls, folder: Path, dtype: DTypeLike = np.float32) -> Qwen35Text:
        config = json.loads((folder / "config.json").read_text())
        return cls(config, load_safetensors(folder / "model.safetensors"), dtype)

    def new_state(self) -> SequenceState:
        c = self.config
        kv_shape = (0, c["num_key_value_heads"], c["head_dim"])
        num_k_heads, k_dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
        num_v_heads, v_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
        channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim
        layers: list[AttentionState | GdnState] = []
        for kind in c["layer_types"]:
            if kind == "full_attention":
                empty = np.zeros(kv_shape, self.dtype)
                layers.append(AttentionState(empty, empty))
            else:
                conv = np.zeros((c["linear_conv_kernel_dim"] - 1, channels), self.dtype)
                recurrent = np.zeros((num_v_heads, k_dim, v_dim), self.dtype)
                layers.append(GdnState(conv, recurrent))
        return SequenceState(layers)

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm with a weight stored zero-centred: all norms but the GDN layer's own."""
        return rms_norm(x, 1 + self.weights[name + ".weight"], self.eps)

    def attention(
        self, x: Array, name: str, rotary: tuple[Array, Array], s: AttentionState
    ) -> Array:
        c, num_tokens = self.config, len(x)
        num_heads, num_kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        head_dim = c["head_dim"]
        # Each head's rows are its query, then its gate.
        qg = self.linear(x, name + "q_proj").reshape(num_tokens, num_heads, 2 * head_dim)
        q, gate = np.split(qg, 2, -1)
        k = self.linear(x, name + "k_proj").reshape(num_tokens, num_kv_heads, head_dim)
        v = self.linear(x, name + "v_proj").reshape(num_tokens, num_kv_heads, head_dim)
        q = rotate(self.norm(q, name + "q_norm"), *rotary)
        k = rotate(self.norm(k, name + "k_norm"), *rotary)
        s.k, s.v = np.concatenate([s.k, k]), np.concatenate([s.v, v])
        out = causal_attention(q, s.k, s.v) * sigmoid(gate)
        return self.linear(out.reshape(num_tokens, -1), name + "o_proj")

    def gated_delta_net(self, x: Array, name: str, s: GdnState) -> Array:
        c, num_tokens = self.config, len(x)
        num_k_heads, k_dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
        num_v_heads, v_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
        conv_weight = self.weights[name + "conv1d.weight"][:, 0]
        qkv, s.conv = causal_conv(self.linear(x, name + "in_proj_qkv"), conv_weight, s.conv)
        q, k, v = np.split(qkv, [num_k_heads * k_dim, 2 * num_k_heads * k_dim], -1)
        q = l2_norm(q.reshape(num_tokens, num_k_heads, k_dim)) * k_dim**-0.5
        k = l2_norm(k.reshape(num_tokens, num_k_heads, k_dim))
        v = v.reshape(num_tokens, num_v_heads, v_dim)
        beta = sigmoid(self.linear(x, name + "in_proj_b"))
        a = self.linear(x, name + "in_proj_a") + self.weights[name + "dt_bias"]
        g = -np.exp(self.weights[name + "A_log"]) * softplus(a)
        out, s.recurrent = gated_delta_rule(q, k, v, beta, g, s.recurrent)
        z = self.linear(x, name + "in_proj_z").reshape(num_tokens, num_v_heads, v_dim)
        out = rms_norm(out, self.weights[name + "norm.weight"], self.eps) * silu(z)
        return self.linear(out.reshape(num_tokens, -1), name + "out_proj")

    def mlp(self, x: Array, name: str) -> Array:
        gate, up = self.linear(x, name + "gate_proj"), self.linear(x, name + "up_proj")
        return self.linear(silu(gate) * up, name + "down_proj")

    def layer(
        self, x: Array, name: str, rotary: tuple[Array, Array], s: AttentionState | GdnState
    ) -> Array:
        normed = self.norm(x, name + "input_layernorm")
        if isinstance(s, AttentionState):
            x = x + self.attention(normed, name + "self_attn.", rotary, s)
        else:
            x = x + self.gated_delta_net(normed, name + "linear_attn.", s)
        return x + self.mlp(self.norm(x, name + "post_attention_layernorm"), name + "mlp.")

    def forward(self, embeddings: Array, positions: Array, state: SequenceState) -> Array:
        """Runs all layers and the final norm, and moves `state` on.

        Args:
            embeddings: [num_tokens, hidden_size]; image rows already in place.
            positions: [3, num_tokens], see `rotary_cos_sin`.
            state: of the sequence, changed in place.

        Returns:
            [num_tokens, hidden_size]; `state.hidden` holds what came before the final norm.
        """
        x = embeddings.astype(self.dtype)
        rotary = rotary_cos_sin(positions, self.rope, self.config["head_dim"])
        state.hidden = [x]
        for i, layer_state in enumerate(state.layers):
            x = self.layer(x, f"{self.prefix}layers.{i}.", rotary, layer_state)
            state.hidden.append(x)
        state.num_tokens += len(x)
        return self.norm(x, self.prefix + "norm")

    def logits(self, hidden: Array) -> Array:
        """Returns [num_tokens, vocab_size]; `hidden` comes from after the final norm."""
        return hidden @ self.lm_head.T

    def extend(self, ids: Sequence[int], state: SequenceState) -> Array:
        """Appends text tokens and returns their logits [num_tokens, vocab_size]."""
        index = np.arange(len(ids)) + state.num_tokens + state.rope_delta
        hidden = self.forward(self.embed_tokens[list(ids)], np.tile(index, (3, 1)), state)
        return self.logits(hidden)

    def generate(
        self, logits: Array, num_steps: int, state: SequenceState
    ) -> tuple[list[int], Array]:
        """Decodes greedily.

        Args:
            logits: [vocab_size], at the end of the prompt that `state` holds.
            num_steps: how many ids to return; the last of them is not fed back.
            state: of the sequence, changed in place.

        Returns:
            The ids and the logits each was taken from, [num_steps, vocab_size].
        """
        ids, rows = [], []
        for step in range(num_steps):
            rows.append(logits)
            ids.append(int(logits.argmax()))
            if step + 1 < num_steps:
                logits = self.extend(ids[-1:], state)[0]
        return ids, np.stack(rows)

    def mtp_logits(self, next_ids: Sequence[int], hidden: Array) -> Array:
        """Runs the MTP head over a text prompt from its start.

        Args:
            next_ids: for each position the id that follows it.
            hidden: [num_tokens, hidden_size], the main model's, from after the final norm.

        Returns:
            [num_tokens, vocab_size]; row i predicts the id after `next_ids[i]`.
        """
        embedded = self.norm(self.embed_tokens[list(next_ids)], "mtp.pre_fc_norm_embedding")
        normed = self.norm(hidden, "mtp.pre_fc_norm_hidden")
        x = self.linear(np.concatenate([embedded, normed], -1), "mtp.fc")
        positions = np.tile(np.arange(len(next_ids)), (3, 1))
        rotary = rotary_cos_sin(positions, self.rope, self.config["head_dim"])
        kv_shape = (0, self.config["num_key_value_heads"], self.config["head_dim"])
        empty = np.zeros(kv_shape, self.dtype)
        x = self.layer(x, "mtp.layers.0.", rotary, AttentionState(empty, empty))
        return self.logits(self.norm(x, "mtp.norm"))

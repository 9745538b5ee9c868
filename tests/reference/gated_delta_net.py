"""NumPy truth of the Gated DeltaNet ops, one function a form of the recurrence.

Shapes: q, k [num_tokens, num_key_heads, key_dim], not yet normalised; v [num_tokens,
num_value_heads, value_dim]; g (log alpha) and beta [num_tokens, num_value_heads]; a state
[num_value_heads, value_dim, key_dim]. Value head j reads key head j // (value heads / key heads).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

NORM_EPS = 1e-6


class Tokens(NamedTuple):
    q: Float
    k: Float
    v: Float
    g: Float
    beta: Float

    def at(self, part: slice) -> "Tokens":
        return Tokens(*(x[part] for x in self))


class Dims(NamedTuple):
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


def gates(b: Float, a: Float, a_log: Float, dt_bias: Float) -> tuple[Float, Float]:
    """The projections b and a of the tokens to g and beta."""
    x = a + dt_bias
    softplus = np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))
    return -np.exp(a_log) * softplus, 1.0 / (1.0 + np.exp(-b))


def tokens_from(qkv: Float, ba: Float, head_params: tuple[Float, Float], dims: Dims) -> Tokens:
    """Splits what the op is given: qkv and ba [num_tokens, at least the used width]."""
    keys, values = dims.num_key_heads * dims.key_dim, dims.num_value_heads * dims.value_dim
    q, k, v = np.split(qkv[:, : 2 * keys + values], [keys, 2 * keys], axis=1)
    heads = dims.num_value_heads
    g, beta = gates(ba[:, :heads], ba[:, heads : 2 * heads], *head_params)
    return Tokens(
        q.reshape(-1, dims.num_key_heads, dims.key_dim),
        k.reshape(-1, dims.num_key_heads, dims.key_dim),
        v.reshape(-1, heads, dims.value_dim),
        g,
        beta,
    )


def normalise(x: Float) -> Float:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)


def prepared(tokens: Tokens) -> tuple[Float, Float]:
    """q, normalised and scaled, and k, normalised, of every value head."""
    group = tokens.v.shape[1] // tokens.k.shape[1]
    q = normalise(tokens.q) * tokens.q.shape[-1] ** -0.5
    return np.repeat(q, group, axis=1), np.repeat(normalise(tokens.k), group, axis=1)


def recurrent(tokens: Tokens, state: Float) -> tuple[Float, Float]:
    """The definition, token by token: outputs, and the state after each token."""
    q, k = prepared(tokens)
    out, states = np.empty_like(tokens.v), []
    for t in range(len(q)):
        state = state * np.exp(tokens.g[t])[:, None, None]
        d = tokens.beta[t][:, None] * (tokens.v[t] - (state @ k[t][:, :, None])[..., 0])
        state = state + d[:, :, None] * k[t][:, None, :]
        out[t] = (state @ q[t][:, :, None])[..., 0]
        states.append(state)
    return out, np.array(states).reshape(-1, *state.shape)


def decay_matrix(sum_g: Float, *, strict: bool) -> Float:
    """exp(G_i - G_j) for j < i (j <= i), else 0: masked before exp, which could overflow."""
    keep = np.tri(len(sum_g), k=-1 if strict else 0, dtype=bool)
    return np.exp(np.where(keep, sum_g[:, None] - sum_g[None, :], -np.inf))


def window(tokens: Tokens, state: Float) -> tuple[Float, Float]:
    """All tokens at once behind `state`: outputs, and d [num_tokens, value heads, value_dim]."""
    q, k = prepared(tokens)
    out, d = np.empty_like(tokens.v), np.empty_like(tokens.v)
    for h in range(tokens.v.shape[1]):
        sum_g, beta = np.cumsum(tokens.g[:, h]), tokens.beta[:, h, None]
        from_start = np.exp(sum_g)[:, None]
        a = beta * decay_matrix(sum_g, strict=True) * (k[:, h] @ k[:, h].T)
        rest = beta * (tokens.v[:, h] - from_start * (k[:, h] @ state[h].T))
        d[:, h] = np.linalg.solve(np.eye(len(a)) + a, rest)
        scores = decay_matrix(sum_g, strict=False) * (q[:, h] @ k[:, h].T)
        out[:, h] = from_start * (q[:, h] @ state[h].T) + scores @ d[:, h]
    return out, d


def fold(state: Float, d: Float, k: Float, g: Float) -> Float:
    """The state behind the records d, k (normalised, per value head) and g, oldest first."""
    sum_g = np.cumsum(g, axis=0)
    weighted = d * np.exp(sum_g[-1:] - sum_g)[:, :, None]
    return np.exp(sum_g[-1])[:, None, None] * state + np.einsum("mhv,mhk->hvk", weighted, k)


def chunked(tokens: Tokens, state: Float, chunk: int = 64) -> tuple[Float, Float]:
    """Prefill: the window form chunk by chunk; outputs and the last state."""
    out = np.empty_like(tokens.v)
    for begin in range(0, len(out), chunk):
        part = tokens.at(slice(begin, begin + chunk))
        out[begin : begin + chunk], d = window(part, state)
        state = fold(state, d, prepared(part)[1], part.g)
    return out, state


class ReplayPool:
    """ReplaySSM: a checkpoint and a list of records per slot, folded by the flush rule."""

    def __init__(self, num_slots: int, dims: Dims, history_limit: int) -> None:
        self.history_limit = history_limit
        shape = (num_slots, dims.num_value_heads, dims.value_dim, dims.key_dim)
        self.checkpoint = np.zeros(shape)
        self.records: list[list[tuple[Float, Float, Float]]] = [[] for _ in range(num_slots)]
        self.proposed: list[list[tuple[Float, Float, Float]]] = [[] for _ in range(num_slots)]

    def reset(self, slot: int, state: Float) -> None:
        self.checkpoint[slot] = state
        self.records[slot], self.proposed[slot] = [], []

    def materialize(self, slot: int, num_records: int | None = None) -> Float:
        records = self.records[slot][:num_records]
        if not records:
            return self.checkpoint[slot].copy()
        return fold(self.checkpoint[slot], *(np.array(x) for x in zip(*records, strict=True)))

    def flushes(self, slot: int, row_len: int) -> bool:
        limit = self.history_limit or row_len
        return len(self.records[slot]) + row_len > limit

    def verify(self, slot: int, tokens: Tokens) -> Float:
        if self.flushes(slot, len(tokens.v)):
            self.reset(slot, self.materialize(slot))
        out, d = window(tokens, self.materialize(slot))
        self.proposed[slot] = list(zip(d, prepared(tokens)[1], tokens.g, strict=True))
        return out

    def commit(self, slot: int, num_accepted: int) -> None:
        self.records[slot] += self.proposed[slot][:num_accepted]

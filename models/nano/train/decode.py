"""Greedy reading of many pages at once, token by token: for scores, on any device.

The prompt goes through the same recurrent step as the text, so there is one path and nothing to
keep in agreement; `tests/models/nano/test_decode.py` holds it to transformers' `generate`.
"""

import torch
import torch.nn.functional as F  # noqa: N812 as everyone writes it
from torch import Tensor

from models.nano.tokenizer import FIRST_IMAGE_INDEX, IDS, NUM_PROMPT_IDS
from models.nano.train.forward import (
    EPS,
    HEAD_DIM,
    ROTARY,
    TEXT,
    TEXT_PREFIX,
    Forward,
    Tables,
    Weights,
    mlp,
    page_ids,
    part_of,
    rms_norm,
    rotate,
)

HEADS_K, HEADS_V = TEXT["linear_num_key_heads"], TEXT["linear_num_value_heads"]
DK, DV = TEXT["linear_key_head_dim"], TEXT["linear_value_head_dim"]
HEADS = TEXT["num_attention_heads"]
END_IDS = (IDS["<|im_end|>"], IDS["<|endoftext|>"])


class _LinearState:
    """A Gated DeltaNet layer with the state of each page."""

    def __init__(self, weights: Weights, count: int) -> None:
        like = weights["input_layernorm.weight"]
        channels = 2 * HEADS_K * DK + HEADS_V * DV
        self._w = weights
        self._past = like.new_zeros(count, 3, channels)
        self._state = like.new_zeros(count, HEADS_V, DK, DV)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        w = self._w
        hidden = rms_norm(x, w["input_layernorm.weight"])
        row = F.linear(hidden, w["linear_attn.in_proj_qkv.weight"])[:, None]
        window = torch.cat([self._past, row], 1)
        self._past = window[:, 1:]
        qkv = F.silu((window * w["linear_attn.conv1d.weight"][:, 0].T).sum(1))
        q, k, v = qkv.split([HEADS_K * DK, HEADS_K * DK, HEADS_V * DV], -1)
        q, k = (t.view(len(x), HEADS_K, DK) for t in (q, k))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * DK**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        q, k = (t.repeat_interleave(HEADS_V // HEADS_K, 1) for t in (q, k))
        v = v.view(len(x), HEADS_V, DV)
        a = F.linear(hidden, w["linear_attn.in_proj_a.weight"])
        beta = F.linear(hidden, w["linear_attn.in_proj_b.weight"]).sigmoid()
        g = -w["linear_attn.A_log"].exp() * F.softplus(a + w["linear_attn.dt_bias"])
        self._state = self._state * g.exp()[..., None, None]
        error = beta[..., None] * (v - (k[..., None, :] @ self._state)[..., 0, :])
        self._state = self._state + k[..., None] * error[..., None, :]
        out = (q[..., None, :] @ self._state)[..., 0, :]
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS)
        z = F.linear(hidden, w["linear_attn.in_proj_z.weight"]).view(out.shape)
        out = (out * w["linear_attn.norm.weight"] * F.silu(z)).flatten(1)
        x = x + F.linear(out, w["linear_attn.out_proj.weight"])
        return mlp(x, w, x.dtype)


class _FullState:
    """A full-attention layer with the keys and values of each page."""

    def __init__(self, weights: Weights, count: int, num_tokens: int) -> None:
        like = weights["input_layernorm.weight"]
        self._w = weights
        self._keys = like.new_zeros(count, num_tokens, HEAD_DIM)
        self._values = like.new_zeros(count, num_tokens, HEAD_DIM)
        self._length = 0

    def step(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        w = self._w
        hidden = rms_norm(x, w["input_layernorm.weight"])
        qg = F.linear(hidden, w["self_attn.q_proj.weight"]).view(len(x), HEADS, 2 * HEAD_DIM)
        q, gate = qg.chunk(2, -1)
        k = F.linear(hidden, w["self_attn.k_proj.weight"])
        q = rms_norm(q, w["self_attn.q_norm.weight"])
        k = rms_norm(k, w["self_attn.k_norm.weight"])
        q = torch.cat([rotate(q[..., :ROTARY], cos, sin), q[..., ROTARY:]], -1)
        k = torch.cat([rotate(k[..., :ROTARY], cos, sin), k[..., ROTARY:]], -1)
        self._keys[:, self._length] = k
        self._values[:, self._length] = F.linear(hidden, w["self_attn.v_proj.weight"])
        self._length += 1
        keys, values = self._keys[:, : self._length], self._values[:, : self._length]
        share = (q @ keys.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1)
        out = (share @ values) * gate.sigmoid()
        x = x + F.linear(out.flatten(1), w["self_attn.o_proj.weight"])
        return mlp(x, w, x.dtype)


@torch.no_grad()
def read_pages(
    weights: Weights, patches: Tensor, tables: Tables, max_new: int
) -> tuple[list[list[int]], list[bool]]:
    """Reads pages greedily, in fp32.

    Args:
        weights: The model's, fp32, with one key-value head.
        patches: [pages, patches, 768], as `Forward.vision` takes them.
        tables: Of the page shape, for at least the prompt and `max_new` tokens.
        max_new: Ids that a page may get.

    Returns:
        The ids of each page without the end, and whether it ended by itself.
    """
    count, num_image = patches.shape[0], tables.num_image_tokens
    _, image = Forward(torch.float32).vision(weights, patches, tables)
    w = part_of(weights, TEXT_PREFIX)
    num_tokens = NUM_PROMPT_IDS + num_image + max_new - 1  # the last id is not read again
    layers: list[_LinearState | _FullState] = []
    for index, kind in enumerate(TEXT["layer_types"]):
        layer = part_of(w, f"layers.{index}.")
        linear = kind == "linear_attention"
        layers.append(
            _LinearState(layer, count) if linear else _FullState(layer, count, num_tokens)
        )
    empty = torch.zeros(count, 0, dtype=torch.int64, device=patches.device)
    prompt = page_ids(empty, num_image, NUM_PROMPT_IDS + num_image)
    embedding = w["embed_tokens.weight"]
    rows = embedding[prompt]
    rows[:, FIRST_IMAGE_INDEX : FIRST_IMAGE_INDEX + num_image] = image
    ended = torch.zeros(count, dtype=torch.bool, device=patches.device)
    ids: list[Tensor] = []
    x = rows[:, 0]
    for place in range(num_tokens):
        cos, sin = tables.text_cos[place], tables.text_sin[place]
        for layer_state in layers:
            x = layer_state.step(x, cos, sin)
        if place + 1 < prompt.shape[1]:
            x = rows[:, place + 1]
            continue
        chosen = (rms_norm(x, w["norm.weight"]) @ embedding.T).argmax(-1)
        ids.append(torch.where(ended, END_IDS[0], chosen))
        ended = ended | (chosen == END_IDS[0]) | (chosen == END_IDS[1])
        if len(ids) % 32 == 0 and bool(ended.all()):
            break
        x = embedding[chosen]
    table = torch.stack(ids, 1).tolist()
    texts = []
    for row in table:
        end = next((i for i, token in enumerate(row) if token in END_IDS), len(row))
        texts.append(row[:end])
    return texts, ended.tolist()

"""The model as plain functions of its weights, for training: one graph serves all layers.

It computes what `Qwen3_5ForConditionalGeneration` computes for prompts of one picture, all pictures
of a batch alike in shape; `tests/models/nano/test_forward.py` holds it to that class. Weights are
fp32 under the names of the checkpoint; `dtype` is what matrix products run in, the residual stream
stays fp32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 as everyone writes it
from torch import Tensor

from models.nano.config import CONFIG, MERGE, PATCH
from models.nano.tokenizer import FIRST_IMAGE_INDEX, IDS, NUM_PROMPT_IDS, prompt_ids
from models.nano.train.delta import CHUNK, causal_conv, gated_delta

TEXT, VISION = CONFIG["text_config"], CONFIG["vision_config"]
TEXT_PREFIX, VISION_PREFIX = "model.language_model.", "model.visual."
EPS = TEXT["rms_norm_eps"]
HEAD_DIM = TEXT["head_dim"]
ROTARY = int(HEAD_DIM * TEXT["rope_parameters"]["partial_rotary_factor"])
GUIDED_LAYERS = tuple(
    i for i, kind in enumerate(TEXT["layer_types"]) if kind == "full_attention"
)  # the first half looks at the character just read, the second half at the next one

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Tables:
    """What depends on the page shape and the sequence length only.

    Attributes:
        num_image_tokens: Image tokens of a page.
        num_tokens: Length of the padded sequence, a multiple of the chunk.
        position_index: [4, patches], rows of the position table.
        position_weight: [4, patches, 1], their weights.
        vision_cos: [patches, vision head_dim]; `vision_sin` alike.
        vision_sin: See above.
        text_cos: [num_tokens, ROTARY]; `text_sin` alike.
        text_sin: See above.
    """

    num_image_tokens: int
    num_tokens: int
    position_index: Tensor
    position_weight: Tensor
    vision_cos: Tensor
    vision_sin: Tensor
    text_cos: Tensor
    text_sin: Tensor


def padded_length(num_image_tokens: int, max_text: int) -> int:
    """Returns the sequence length for a prompt and `max_text` ids behind it."""
    return -(-(NUM_PROMPT_IDS + num_image_tokens + max_text) // CHUNK) * CHUNK


def merge_order(rows: Tensor, grid: tuple[int, int]) -> Tensor:
    """Brings [..., grid height, grid width] into merge-block order, [..., patches]."""
    height, width = grid
    blocks = rows.reshape(*rows.shape[:-2], height // MERGE, MERGE, width // MERGE, MERGE)
    return blocks.transpose(-3, -2).flatten(-4)


def make_tables(height: int, width: int, num_tokens: int, device: torch.device) -> Tables:
    """Computes the tables of a page shape.

    Args:
        height: Of the page in pixels, a multiple of 32.
        width: Alike.
        num_tokens: Length of the padded sequence.
        device: Where they go.
    """
    grid = (height // PATCH, width // PATCH)
    ys, xs = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    ys, xs = merge_order(ys, grid), merge_order(xs, grid)
    side = math.isqrt(VISION["num_position_embeddings"])
    at_y = ys * ((side - 1) / max(grid[0] - 1, 1))
    at_x = xs * ((side - 1) / max(grid[1] - 1, 1))
    y0, x0 = at_y.floor().long(), at_x.floor().long()
    y1, x1 = (y0 + 1).clamp(max=side - 1), (x0 + 1).clamp(max=side - 1)
    dy, dx = at_y - y0, at_x - x0
    index = torch.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1])
    weight = torch.stack([(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx])

    head_dim = VISION["hidden_size"] // VISION["num_heads"]
    inv = 1.0 / 10000.0 ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    angle = torch.cat([ys[:, None] * inv, xs[:, None] * inv], -1).repeat(1, 2)

    num_image_tokens = grid[0] * grid[1] // MERGE**2
    merged = (grid[0] // MERGE, grid[1] // MERGE)
    positions = torch.arange(num_tokens).repeat(3, 1)
    first, end = FIRST_IMAGE_INDEX, FIRST_IMAGE_INDEX + num_image_tokens
    token = torch.arange(num_image_tokens)
    positions[:, first:end] = first
    positions[1, first:end] += token // merged[1]
    positions[2, first:end] += token % merged[1]
    positions[:, end:] += max(merged) - num_image_tokens
    rope = TEXT["rope_parameters"]
    frequency = 1.0 / rope["rope_theta"] ** (torch.arange(0, ROTARY, 2).float() / ROTARY)
    section = rope["mrope_section"]
    axis = torch.zeros(ROTARY // 2, dtype=torch.long)
    axis[1 : 3 * section[1] : 3] = 1
    axis[2 : 3 * section[2] : 3] = 2
    text_angle = (positions[axis].T.float() * frequency).repeat(1, 2)
    to = partial(torch.Tensor.to, device=device)
    return Tables(
        num_image_tokens, num_tokens, to(index), to(weight[..., None].float()), to(angle.cos()),
        to(angle.sin()), to(text_angle.cos()), to(text_angle.sin()),
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A matrix product in `dtype`."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm whose weight is stored zero-centred, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm in fp32."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves layout, over all of the last axis."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def vision_block(x: Tensor, w: Weights, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """One block of the vision encoder: [batch, patches, width] to the same."""
    batch, num_patches, _ = x.shape
    heads = VISION["num_heads"]
    hidden = layer_norm(x, w["norm1.weight"], w["norm1.bias"])
    qkv = linear(hidden, w["attn.qkv.weight"], dtype, w["attn.qkv.bias"])
    q, k, v = qkv.reshape(batch, num_patches, 3, heads, -1).permute(2, 0, 3, 1, 4)
    q, k = rotate(q.float(), cos, sin).to(dtype), rotate(k.float(), cos, sin).to(dtype)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    x = x + linear(mixed, w["attn.proj.weight"], dtype, w["attn.proj.bias"])
    hidden = layer_norm(x, w["norm2.weight"], w["norm2.bias"])
    hidden = linear(hidden, w["mlp.linear_fc1.weight"], dtype, w["mlp.linear_fc1.bias"])
    hidden = F.gelu(hidden, approximate="tanh")
    return x + linear(hidden, w["mlp.linear_fc2.weight"], dtype, w["mlp.linear_fc2.bias"])


def mlp(x: Tensor, w: Weights, dtype: torch.dtype) -> Tensor:
    """The gated MLP of a text layer, with its norm and residual."""
    hidden = rms_norm(x, w["post_attention_layernorm.weight"])
    gate = linear(hidden, w["mlp.gate_proj.weight"], dtype)
    up = linear(hidden, w["mlp.up_proj.weight"], dtype)
    return x + linear(F.silu(gate) * up, w["mlp.down_proj.weight"], dtype)


def linear_layer(x: Tensor, w: Weights, dtype: torch.dtype) -> Tensor:
    """A Gated DeltaNet layer: [batch, tokens, width] to the same."""
    heads_k, heads_v = TEXT["linear_num_key_heads"], TEXT["linear_num_value_heads"]
    dk, dv = TEXT["linear_key_head_dim"], TEXT["linear_value_head_dim"]
    batch, num_tokens, _ = x.shape
    hidden = rms_norm(x, w["input_layernorm.weight"])
    qkv = linear(hidden, w["linear_attn.in_proj_qkv.weight"], dtype)
    qkv = causal_conv(qkv.float(), w["linear_attn.conv1d.weight"])
    q, k, v = qkv.split([heads_k * dk, heads_k * dk, heads_v * dv], -1)
    q, k, v = (
        t.reshape(batch, num_tokens, -1, d).transpose(1, 2) for t, d in ((q, dk), (k, dk), (v, dv))
    )
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    q = q.repeat_interleave(heads_v // heads_k, 1)
    k = k.repeat_interleave(heads_v // heads_k, 1)
    a, b = (
        linear(hidden, w[f"linear_attn.in_proj_{name}.weight"], dtype)
        .float().transpose(1, 2).contiguous()
        for name in "ab"
    )  # fmt: skip
    rate, shift = w["linear_attn.A_log"].exp(), w["linear_attn.dt_bias"]
    g = -rate[:, None] * F.softplus(a + shift[:, None])
    out = gated_delta(q, k, v, g, b.sigmoid()).transpose(1, 2)
    z = linear(hidden, w["linear_attn.in_proj_z.weight"], dtype).float().reshape(out.shape)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS)
    out = out * w["linear_attn.norm.weight"] * F.silu(z)
    out = out.reshape(batch, num_tokens, -1)
    x = x + linear(out, w["linear_attn.out_proj.weight"], dtype)
    return mlp(x, w, dtype)


def full_layer(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor, target: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A full-attention layer, and how far head 0 is from looking where it should.

    Args:
        x: [batch, tokens, width].
        w: The layer's weights.
        cos: [tokens, ROTARY].
        sin: Alike.
        target: [batch, tokens] int64, the key that a query's head 0 should find, or -1.
        dtype: Of matrix products.

    Returns:
        The layer's output, and the mean of -log softmax over the queries with a target.
    """
    heads, kv_heads = TEXT["num_attention_heads"], TEXT["num_key_value_heads"]
    batch, num_tokens, _ = x.shape
    hidden = rms_norm(x, w["input_layernorm.weight"])
    qg = linear(hidden, w["self_attn.q_proj.weight"], dtype)
    q, gate = qg.reshape(batch, num_tokens, heads, 2 * HEAD_DIM).chunk(2, -1)
    k = linear(hidden, w["self_attn.k_proj.weight"], dtype).reshape(batch, num_tokens, kv_heads, -1)
    v = linear(hidden, w["self_attn.v_proj.weight"], dtype).reshape(batch, num_tokens, kv_heads, -1)
    q = rms_norm(q, w["self_attn.q_norm.weight"]).transpose(1, 2)
    k = rms_norm(k, w["self_attn.k_norm.weight"]).transpose(1, 2)
    q = torch.cat([rotate(q[..., :ROTARY], cos, sin), q[..., ROTARY:]], -1).to(dtype)
    k = torch.cat([rotate(k[..., :ROTARY], cos, sin), k[..., ROTARY:]], -1).to(dtype)
    v = v.transpose(1, 2)
    repeat = heads // kv_heads
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True
    )
    out = out.transpose(1, 2).reshape(batch, num_tokens, -1)
    out = out * gate.reshape(out.shape).sigmoid()
    x = x + linear(out, w["self_attn.o_proj.weight"], dtype)

    scores = (q[:, 0] @ k[:, 0].transpose(-1, -2)).float() * HEAD_DIM**-0.5
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device).triu(1)
    chosen = scores.gather(2, target.clamp(min=0)[..., None])[..., 0]
    missed = scores.masked_fill(future, -1e4).logsumexp(-1) - chosen
    valid = target >= 0
    guide = (missed * valid).sum() / valid.sum().clamp(min=1)
    return mlp(x, w, dtype), guide


def merger(x: Tensor, w: Weights, dtype: torch.dtype) -> Tensor:
    """Four patches to one image token."""
    x = layer_norm(x, w["norm.weight"], w["norm.bias"])
    x = x.reshape(x.shape[0], -1, x.shape[-1] * MERGE**2)
    x = F.gelu(linear(x, w["linear_fc1.weight"], dtype, w["linear_fc1.bias"]))
    return linear(x, w["linear_fc2.weight"], dtype, w["linear_fc2.bias"])


def compiled_if(compiled: bool, function: Callable[..., Any], *, dynamic: bool) -> Any:  # noqa: ANN401 as typed as the function
    """Returns the function, compiled or not: one graph a set of shapes, or one for all."""
    return torch.compile(function, dynamic=dynamic, fullgraph=True) if compiled else function


class Forward:
    """The forward pass; holds the compiled functions, not the weights."""

    def __init__(self, dtype: torch.dtype, *, compiled: bool = False) -> None:
        """Takes the dtype of matrix products, and whether functions are compiled."""
        self.dtype = dtype
        self._vision_block = compiled_if(compiled, vision_block, dynamic=True)
        self._merger = compiled_if(compiled, merger, dynamic=True)
        self._linear_layer = compiled_if(compiled, linear_layer, dynamic=False)
        self._full_layer = compiled_if(compiled, full_layer, dynamic=False)

    def vision(self, weights: Weights, patches: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """The vision encoder.

        Args:
            weights: All weights.
            patches: [batch, patches, 3 * 256], merge-block order, one frame, values in -1..1.
            tables: Of the page shape.

        Returns:
            [batch, patches, vision width] of the last block, and [batch, image tokens, width].
        """
        w = part_of(weights, VISION_PREFIX)
        kernel = w["patch_embed.proj.weight"].sum(2).flatten(1)
        x = linear(patches, kernel, self.dtype, w["patch_embed.proj.bias"]).float()
        x = x + (w["pos_embed.weight"][tables.position_index] * tables.position_weight).sum(0)
        for index in range(VISION["depth"]):
            block = part_of(w, f"blocks.{index}.")
            x = self._vision_block(x, block, tables.vision_cos, tables.vision_sin, self.dtype)
        return x, self._merger(x, part_of(w, "merger."), self.dtype)

    def text(
        self, weights: Weights, ids: Tensor, image: Tensor, tables: Tables, targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The language model.

        Args:
            weights: All weights.
            ids: [batch, tables.num_tokens] int64.
            image: [batch, image tokens, width].
            tables: Of the page shape.
            targets: [batch, tokens] of the current and of the next character, see `full_layer`.

        Returns:
            Logits, [batch, tokens, vocab] in `dtype`, and the guide loss of each guided layer.
        """
        w = part_of(weights, TEXT_PREFIX)
        x = w["embed_tokens.weight"][ids]
        first, end = FIRST_IMAGE_INDEX, FIRST_IMAGE_INDEX + tables.num_image_tokens
        x = torch.cat([x[:, :first], image.float(), x[:, end:]], 1)
        guides = []
        for index, kind in enumerate(TEXT["layer_types"]):
            layer = part_of(w, f"layers.{index}.")
            if kind == "linear_attention":
                x = self._linear_layer(x, layer, self.dtype)
                continue
            target = targets[2 * len(guides) // len(GUIDED_LAYERS)]
            x, guide = self._full_layer(
                x, layer, tables.text_cos, tables.text_sin, target, self.dtype
            )
            guides.append(guide)
        x = rms_norm(x, w["norm.weight"])
        return linear(x, w["embed_tokens.weight"], self.dtype), torch.stack(guides)


def part_of(weights: Weights, prefix: str) -> Weights:
    """Returns the weights under a prefix, without it."""
    start = len(prefix)
    return {name[start:]: value for name, value in weights.items() if name.startswith(prefix)}


def page_ids(texts: Tensor, num_image_tokens: int, num_tokens: int) -> Tensor:
    """Lays out the sequences of a batch.

    Args:
        texts: [batch, max text], the ids behind the prompt, padded with <|endoftext|>.
        num_image_tokens: Of the pages.
        num_tokens: Length of the padded sequences.

    Returns:
        [batch, num_tokens].
    """
    prompt = torch.tensor(prompt_ids(num_image_tokens), device=texts.device)
    ids = texts.new_full((texts.shape[0], num_tokens), IDS["<|endoftext|>"])
    ids[:, : prompt.numel()] = prompt
    ids[:, prompt.numel() : prompt.numel() + texts.shape[1]] = texts
    return ids

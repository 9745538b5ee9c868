"""Initial weights, and checkpoints that travel between runs."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.nano.config import CONFIG

MAX_SHARD_BYTES = 15_000_000
KEPT_IN_FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Stored as F32, as published checkpoints do; the values are BF16 values all the same."""
HEADS_FILE = "glyph_heads.safetensors"


def weight_shapes() -> dict[str, torch.Size]:
    """Returns name and shape of each weight; the tied output matrix has none of its own."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**CONFIG))
    return {
        name: value.shape for name, value in model.state_dict().items() if name != "lm_head.weight"
    }


def initial_weights(seed: int) -> dict[str, Tensor]:
    """Draws fresh weights, fp32, on the CPU.

    Matrices: std 0.7 / sqrt(fan in), and a quarter of it where they write to the residual stream.
    Decay rates of Gated DeltaNet: a state keeps about 0.94 a token in the median, so that the
    recurrence starts with a memory.
    """
    rng = torch.Generator().manual_seed(seed)
    residual = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "attn.proj.weight")
    weights = {}
    for name, shape in weight_shapes().items():
        value = torch.zeros(shape)
        if name.endswith("A_log"):
            value.uniform_(1.0, 8.0, generator=rng).log_()
        elif name.endswith("dt_bias"):
            low, high = math.log(0.002), math.log(0.1)
            dt = value.uniform_(low, high, generator=rng).exp_()
            value = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("conv1d.weight"):
            value.uniform_(-0.5, 0.5, generator=rng)
        elif name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            value.normal_(0.0, 0.04, generator=rng)
        elif name.endswith("patch_embed.proj.weight"):
            value.normal_(0.0, 0.4 / math.sqrt(shape[1:].numel()), generator=rng)
        elif value.dim() > 1:
            out = name.endswith(residual) or ("blocks" in name and name.endswith("fc2.weight"))
            std = 0.7 / math.sqrt(shape[1]) / (4.0 if out else 1.0)
            value.normal_(0.0, std, generator=rng)
        elif name.endswith("linear_attn.norm.weight") or is_layer_norm(name):
            value.fill_(1.0)
        weights[name] = value
    return weights


def is_layer_norm(name: str) -> bool:
    """Whether a weight is that of a LayerNorm, whose neutral value is 1."""
    return ".visual." in name and name.endswith(("norm1.weight", "norm2.weight", "norm.weight"))


def save_checkpoint(folder: Path, weights: dict[str, Tensor], heads: dict[str, Tensor]) -> None:
    """Writes the weights of a checkpoint, and the training heads beside them.

    Args:
        folder: Where; `config.write_config` adds the rest that transformers needs.
        weights: The model's, under their checkpoint names.
        heads: The glyph heads, which only training needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, value in weights.items():
        stored = value.detach().cpu().to(torch.bfloat16)
        stored = stored.float() if name.endswith(KEPT_IN_FP32) else stored
        num_bytes = stored.numel() * stored.element_size()
        if size + num_bytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = stored.contiguous()
        size += num_bytes
        total += num_bytes
    weight_map = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    stored = {name: value.detach().cpu().to(torch.bfloat16) for name, value in heads.items()}
    if stored:
        save_file(stored, folder / HEADS_FILE)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads what `save_checkpoint` wrote, as fp32: the weights and the training heads."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise FileNotFoundError(f"{folder}: expected model-*.safetensors, found none")
    heads = load_file(folder / HEADS_FILE) if (folder / HEADS_FILE).exists() else {}
    return {n: v.float() for n, v in weights.items()}, {n: v.float() for n, v in heads.items()}

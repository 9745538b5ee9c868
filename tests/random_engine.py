"""Engine directories with random weights: real shapes without a checkpoint, for tests and benches.

The files are what the executor reads; `runtime.engine_directory` would miss digests and tokenizer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from build_engine.model_config import read_model_config
from build_engine.program import build_program
from build_engine.safetensors_file import encode_header
from build_engine.weights import PackedTensor, bf16_from_f32, packed_tensors
from runtime.preprocessor import Preprocessor
from runtime.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHUNK = 1 << 24  # weights generated at a time

# One group of layers (three Gated DeltaNet, one attention) of the published 9B shape.
GROUP_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "tie_word_embeddings": False,
    "eos_token_id": 248044,
}


def vision_language(
    text: dict[str, Any], *, depth: int, hidden_size: int, num_heads: int, inner: int
) -> dict[str, Any]:
    """The config of `text` with a vision encoder before it."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {
            "depth": depth,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "intermediate_size": inner,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
        },
        "image_token_id": 1,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"],
    }


def preprocessor(max_pixels: int) -> Preprocessor:
    """That of the published checkpoints, for pictures of at most `max_pixels`."""
    return Preprocessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=4096,
        max_pixels=max_pixels,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        rescale_factor=1 / 255,
    )


def write_random_engine(
    path: Path, config: dict[str, Any], seed: int = 0, max_pixels: int = 16 << 20
) -> None:
    """Writes an engine directory for `config` (a checkpoint's config.json).

    `max_pixels` is for a config with vision: its largest picture.
    """
    rng = np.random.default_rng(seed)
    (path / "weights").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    model = read_model_config(path / "config.json")
    tensors = packed_tensors(model)
    with (path / "weights" / "model.safetensors").open("wb") as file:
        file.write(encode_header([(tensor.name, tensor.info) for tensor in tensors]))
        for tensor in tensors:
            for chunk in _values(rng, tensor):
                file.write(chunk.tobytes())
    (path / "program.json").write_text(json.dumps(build_program(model, preprocessor(max_pixels))))
    words = [b"%d " % token_id for token_id in range(model.vocab_size)]
    write_vocabulary(path / "vocab.bin", words, special_ids=(), unused_ids=())
    (path / "generation.json").write_text(json.dumps({"end_ids": [config["eos_token_id"]]}))
    manifest = {
        "engine_id": f"random-{seed}",
        "model": {"name": "random", "architecture": config["architectures"][0]},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def _spread(tensor: PackedTensor) -> tuple[float, float]:
    """Centre and half width of a tensor's uniform distribution; activations stay near 1."""
    name = tensor.name.rsplit(".", 1)[-1]
    if tensor.info.dtype == "BF16" and name != "embed_tokens":
        return 0.0, 2.2 / tensor.info.shape[1] ** 0.5
    if tensor.name.startswith("vision."):
        return (1.0, 0.3) if "norm" in name and not name.endswith("bias") else (0.0, 0.1)
    return {
        "embed_tokens": (0.0, 1.0),
        "a_log": (-1.5, 1.5),
        "dt_bias": (-1.0, 1.0),
        "conv": (0.0, 0.9),
        "out_norm": (1.0, 0.3),
        "q_norm": (0.8, 0.3),
        "k_norm": (0.8, 0.3),
    }.get(name, (0.0, 0.3))


def _values(rng: np.random.Generator, tensor: PackedTensor) -> Iterator[np.ndarray]:
    centre, width = _spread(tensor)
    left = int(np.prod(tensor.info.shape))
    # 256 levels are as good as a continuum here, and fast to draw by the billion.
    levels = (centre + width * np.linspace(-1, 1, 256)).astype(np.float32)
    table = bf16_from_f32(levels) if tensor.info.dtype == "BF16" else levels
    while left > 0:
        count = min(left, _CHUNK)
        yield table[np.frombuffer(rng.bytes(count), np.uint8)]
        left -= count

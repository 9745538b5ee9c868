"""The nano model's configuration files, in the form of the family.

python -m models.nano.config --out DIR
"""

import argparse
import json
from pathlib import Path
from typing import Any

from models.nano.tokenizer import IDS, MAX_LENGTH, VOCAB_SIZE, write_tokenizer

PATCH = 16
MERGE = 2
CELL = PATCH * MERGE
"""Pixels of an image token's side."""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IDS["<|im_end|>"],
        "pad_token_id": None,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 5,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 1024,
        "out_hidden_size": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

GENERATION_CONFIG = {
    "do_sample": False,
    "page_instruction": "",  # read by build_engine: no words beside the picture were trained
    "eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]],
    "pad_token_id": IDS["<|endoftext|>"],
}

PREPROCESSOR_CONFIG = {
    "size": {"shortest_edge": 24576, "longest_edge": 430080},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def write_config(folder: Path) -> None:
    """Writes every file of the checkpoint but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("preprocessor_config.json", PREPROCESSOR_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    write_tokenizer(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the configuration and tokenizer files.")
    parser.add_argument("--out", type=Path, required=True)
    write_config(parser.parse_args().out)

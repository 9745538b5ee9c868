"""The vision encoder's part of `program.json`: config, buffers, segments and stages.

A stage runs on tiles of rows, all its ops on one tile before the next; it begins when the stage
before it has done every row. So what a stage hands on lies in buffers as long as the picture, and
all others are as long as a tile.
"""

from collections.abc import Mapping
from typing import Any

from build_engine.model_config import Vision
from build_engine.preprocessor import pixel_levels
from build_engine.safetensors_file import TensorInfo
from runtime.preprocessor import Preprocessor
from runtime.program import PluginOp, VisionConfig

LAYER_NORM_EPS = 1e-6  # constants of the reference implementation, in no config
ROTARY_THETA = 10000.0

_Json = dict[str, Any]


def vision_config(vision: Vision, preprocessor: Preprocessor) -> _Json:
    """What the executor needs of the encoder's config; see `runtime.program.VisionConfig`."""
    return {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "num_heads": vision.num_heads,
        "intermediate_size": vision.intermediate_size,
        "patch_size": vision.patch_size,
        "num_frames": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "position_side": vision.position_side,
        "layer_norm_eps": LAYER_NORM_EPS,
        "rotary_theta": ROTARY_THETA,
        "image_token_id": vision.image_token_id,
        "min_pixels": preprocessor.min_pixels,
        "max_pixels": preprocessor.max_pixels,
        "pixel_levels": [[float(level) for level in row] for row in pixel_levels(preprocessor)],
    }


def vision_buffers(vision: Vision) -> list[_Json]:
    """Buffers of the stages."""
    width = vision.hidden_size
    shapes = [
        ("vision_hidden", "patches", width),
        ("vision_query", "patches", width),
        ("vision_pixels", "patch_tile", vision.patch_width),
        ("vision_normed", "patch_tile", width),
        ("vision_qkv", "patch_tile", 3 * width),
        ("vision_attended", "patch_tile", width),
        ("vision_delta", "patch_tile", width),
        ("vision_inner", "patch_tile", vision.intermediate_size),
        ("vision_merged", "image_token_tile", vision.merged_size),
        ("image_embeddings", "image_tokens", vision.out_hidden_size),
    ]
    return [
        {"name": name, "rows": rows, "width": columns, "dtype": "float32"}
        for name, rows, columns in shapes
    ]


def vision_segments(vision: Vision) -> list[_Json]:
    """Dense parts of the encoder."""
    width, inner, merged = vision.hidden_size, vision.intermediate_size, vision.merged_size
    shapes = {"vision.patch_embed": (vision.patch_width, width)}
    for index in range(vision.depth):
        block = f"vision.blocks.{index}."
        shapes |= {
            block + "qkv": (width, 3 * width),
            block + "proj": (width, width),
            block + "fc1": (width, inner),
            block + "fc2": (inner, width),
        }
    shapes |= {
        "vision.merger.fc1": (merged, merged),
        "vision.merger.fc2": (merged, vision.out_hidden_size),
    }
    return [
        {"name": name, "kind": "linear", "weight": name, "in_dim": rows, "out_dim": columns}
        for name, (rows, columns) in shapes.items()
    ]


def vision_stages(vision: Vision) -> list[list[_Json]]:
    """The stages: the patch embedding, then two for each block; the merger ends the last one."""
    stages = [
        [
            _plugin("patchify", {"out": "vision_pixels"}),
            _run("vision.patch_embed", "vision_pixels", "vision_hidden"),
            _plugin(
                "vision_position_embedding",
                {"x": "vision_hidden"},
                {"bias": "vision.patch_bias", "table": "vision.positions"},
            ),
        ]
    ]
    for index in range(vision.depth):
        block = f"vision.blocks.{index}."
        stages += [_projection_stage(block), _attention_stage(block)]
    stages[-1] += _merger_ops()
    return stages


def _projection_stage(block: str) -> list[_Json]:
    return [
        _layer_norm(block + "norm1"),
        _run(block + "qkv", "vision_normed", "vision_qkv"),
        _plugin(
            "vision_rotary",
            {"qkv": "vision_qkv", "out": "vision_query"},
            {"bias": block + "qkv_bias"},
        ),
    ]


def _attention_stage(block: str) -> list[_Json]:
    return [
        _plugin("vision_attention", {"q": "vision_query", "out": "vision_attended"}),
        _run(block + "proj", "vision_attended", "vision_delta"),
        _bias_residual(block + "proj_bias"),
        _layer_norm(block + "norm2"),
        _run(block + "fc1", "vision_normed", "vision_inner"),
        _bias("bias_gelu_tanh", "vision_inner", block + "fc1_bias"),
        _run(block + "fc2", "vision_inner", "vision_delta"),
        _bias_residual(block + "fc2_bias"),
    ]


def _merger_ops() -> list[_Json]:
    """The rows of a merge block lie side by side, so that its patches are one row to the merger."""
    return [
        _layer_norm("vision.merger.norm"),
        _run("vision.merger.fc1", "vision_normed", "vision_merged"),
        _bias("bias_gelu_erf", "vision_merged", "vision.merger.fc1_bias"),
        _run("vision.merger.fc2", "vision_merged", "image_embeddings"),
        _bias("bias", "image_embeddings", "vision.merger.fc2_bias"),
    ]


def _layer_norm(weight: str) -> _Json:
    return _plugin(
        "layer_norm",
        {"x": "vision_hidden", "out": "vision_normed"},
        {"weight": weight, "bias": weight + "_bias"},
    )


def _bias_residual(bias: str) -> _Json:
    buffers = {"y": "vision_delta", "residual": "vision_hidden"}
    return _plugin("bias_residual", buffers, {"bias": bias})


def _bias(plugin: str, buffer: str, bias: str) -> _Json:
    return _plugin(plugin, {"x": buffer}, {"bias": bias})


def _run(segment: str, x: str, out: str) -> _Json:
    return {"segment": segment, "buffers": {"x": x, "out": out}}


def _plugin(
    name: str, buffers: Mapping[str, str], weights: Mapping[str, str] | None = None
) -> _Json:
    return {"plugin": name, "buffers": dict(buffers), "weights": dict(weights or {}), "attrs": {}}


def vision_widths(op: PluginOp, config: VisionConfig, widths: Mapping[str, int]) -> dict[str, int]:
    """How wide a vision op needs each of its buffers."""
    hidden = config.hidden_size
    if op.plugin.startswith("bias") and op.plugin != "bias_residual":
        return {"x": widths.get(op.buffers["x"], hidden)}  # as wide as the bias, which is checked
    table: dict[str, dict[str, int]] = {
        "patchify": {"out": config.patch_width},
        "vision_position_embedding": {"x": hidden},
        "layer_norm": {"x": hidden, "out": hidden},
        "vision_rotary": {"qkv": 3 * hidden, "out": hidden},
        "vision_attention": {"q": hidden, "out": hidden},
        "bias_residual": {"y": hidden, "residual": hidden},
    }
    return table.get(op.plugin, {})


def vision_weights(
    op: PluginOp, config: VisionConfig, widths: Mapping[str, int]
) -> dict[str, TensorInfo]:
    """Dtype and shape of a vision op's weights."""
    hidden = config.hidden_size
    row = TensorInfo("F32", (hidden,))
    if op.plugin.startswith("bias") and op.plugin != "bias_residual":
        return {"bias": TensorInfo("F32", (widths.get(op.buffers["x"], hidden),))}
    table: dict[str, dict[str, TensorInfo]] = {
        "vision_position_embedding": {
            "bias": row,
            "table": TensorInfo("BF16", (config.position_side**2, hidden)),
        },
        "layer_norm": {"weight": row, "bias": row},
        "vision_rotary": {"bias": TensorInfo("F32", (3 * hidden,))},
        "bias_residual": {"bias": row},
    }
    return table.get(op.plugin, {})

"""Config -> `program.json`: the ordered segments and plugins of prefill, verify and commit."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from build_engine.model_config import LINEAR, ModelConfig, Rope, Yarn
from build_engine.safetensors_file import TensorInfo
from build_engine.vision_program import (
    vision_buffers,
    vision_config,
    vision_segments,
    vision_stages,
    vision_weights,
    vision_widths,
)
from runtime.preprocessor import Preprocessor
from runtime.program import PLUGINS, SCHEMA_VERSION, Op, PluginOp, Program, SegmentOp

VISION_WEIGHTS = "vision."  # how the names of the encoder's weights begin

Step = Literal["prefill", "verify"]
_Json = dict[str, Any]


def build_program(config: ModelConfig, preprocessor: Preprocessor | None = None) -> _Json:
    """The content of `program.json`.

    Args:
        config: The model.
        preprocessor: How pictures become patches; needed if the model has a vision encoder.

    Returns:
        A JSON object of the schema `runtime.program.Program`.
    """
    program: _Json = {
        "schema_version": SCHEMA_VERSION,
        "config": _program_config(config),
        "buffers": _buffers(config),
        "segments": _segments(config),
        "steps": {
            "prefill": _forward(config, "prefill"),
            "verify": _forward(config, "verify"),
            "commit": [_plugin("commit_round")],
        },
    }
    if config.vision is not None:
        if preprocessor is None:
            raise ValueError("a model with vision needs its preprocessor")
        program["config"]["vision"] = vision_config(config.vision, preprocessor)
        program["buffers"] += vision_buffers(config.vision)
        program["segments"] += vision_segments(config.vision)
        program["steps"]["vision"] = vision_stages(config.vision)
    return program


def _program_config(config: ModelConfig) -> _Json:
    yarn = config.rope.yarn
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": len(config.layer_types),
        "num_gdn_layers": config.num_gdn_layers,
        "num_attention_layers": config.num_attention_layers,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rotary_dim": config.rope.rotary_dim,
        "mrope_section": list(config.rope.mrope_section),
        "inv_freq": rotary_frequencies(config.rope),
        "attention_factor": yarn.attention_factor if yarn else 1.0,
        "num_key_heads": config.num_key_heads,
        "num_value_heads": config.num_value_heads,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "conv_kernel": config.conv_kernel,
        "context_len": config.context_len,
    }


def rotary_frequencies(rope: Rope) -> list[float]:
    """Angle per position of each of the `rotary_dim / 2` frequencies, in double precision."""
    half = rope.rotary_dim // 2
    plain = [rope.theta ** (-2 * j / rope.rotary_dim) for j in range(half)]
    if rope.yarn is None:
        return plain
    low, high = _yarn_range(rope, rope.yarn)
    result = []
    for j, frequency in enumerate(plain):
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        result.append(frequency / rope.yarn.factor * ramp + frequency * (1 - ramp))
    return result


def _yarn_range(rope: Rope, yarn: Yarn) -> tuple[float, float]:
    """Between which frequencies YaRN goes from unchanged to interpolated."""

    def frequency_index(rotations: float) -> float:
        return (
            rope.rotary_dim
            * math.log(yarn.original_context_len / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = frequency_index(yarn.beta_fast), frequency_index(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high if high > low else low + 0.001


def _buffers(config: ModelConfig) -> list[_Json]:
    hidden, inner = config.hidden_size, config.intermediate_size
    value_width = config.num_value_heads * config.value_dim
    query_width = config.num_heads * config.head_dim
    widths = {"hidden": hidden, "delta": hidden, "normed": hidden}
    if config.num_gdn_layers:
        widths |= {
            "qkvz": config.conv_channels + value_width,
            "ba": 2 * config.num_value_heads,
            "conv": config.conv_channels,
            "core": value_width,
        }
    if config.num_attention_layers:
        widths |= {
            "qkv": 2 * query_width + 2 * config.num_kv_heads * config.head_dim,
            "query": query_width,
            "attended": query_width,
        }
    widths |= {"gate_up": 2 * inner, "activated": inner}
    per_token = [_buffer(name, "tokens", width) for name, width in widths.items()]
    return [
        *per_token,
        _buffer("sampled", "logits", hidden),
        _buffer("logits", "logits", config.vocab_size),
    ]


def _buffer(name: str, rows: str, width: int) -> _Json:
    return {"name": name, "rows": rows, "width": width, "dtype": "float32"}


def _segments(config: ModelConfig) -> list[_Json]:
    hidden, inner = config.hidden_size, config.intermediate_size
    value_width = config.num_value_heads * config.value_dim
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    segments: list[_Json] = []
    for index, kind in enumerate(config.layer_types):
        layer = f"layers.{index}."
        if kind == LINEAR:
            segments += [
                _segment(layer + "in_proj_qkvz", hidden, config.conv_channels + value_width),
                _segment(layer + "in_proj_ba", hidden, 2 * config.num_value_heads),
                _segment(layer + "out_proj", value_width, hidden),
            ]
        else:
            segments += [
                _segment(layer + "qkv_proj", hidden, 2 * query_width + 2 * kv_width),
                _segment(layer + "o_proj", query_width, hidden),
            ]
        segments += [
            _segment(layer + "gate_up_proj", hidden, 2 * inner),
            _segment(layer + "down_proj", inner, hidden),
        ]
    head = _segment("lm_head", hidden, config.vocab_size)
    return [*segments, head | {"weight": "embed_tokens" if config.tied else "lm_head"}]


def _segment(name: str, in_dim: int, out_dim: int) -> _Json:
    return {"name": name, "kind": "linear", "weight": name, "in_dim": in_dim, "out_dim": out_dim}


def _forward(config: ModelConfig, step: Step) -> list[_Json]:
    ops = [_plugin("embedding", {"out": "hidden"}, {"table": "embed_tokens"})]
    if step == "prefill" and config.vision is not None:
        ops.append(_plugin("image_rows", {"x": "hidden"}))
    gdn_layer = kv_layer = 0
    for index, kind in enumerate(config.layer_types):
        layer = f"layers.{index}."
        ops.append(_norm(layer + "input_norm", adds_delta=index > 0))
        if kind == LINEAR:
            ops += _gdn_ops(config, step, layer, gdn_layer)
            gdn_layer += 1
        else:
            ops += _attention_ops(layer, kv_layer)
            kv_layer += 1
        ops += [
            _norm(layer + "post_norm", adds_delta=True),
            _run(layer + "gate_up_proj", "normed", "gate_up"),
            _plugin("silu_mul", {"gate_up": "gate_up", "out": "activated"}),
            _run(layer + "down_proj", "activated", "delta"),
        ]
    ops.append(_norm("norm", adds_delta=True))
    if step == "prefill":
        ops += [
            _plugin("gather_rows", {"x": "normed", "out": "sampled"}),
            _run("lm_head", "sampled", "logits"),
        ]
    else:
        ops.append(_run("lm_head", "normed", "logits"))
    return [*ops, _plugin("sample_accept", {"logits": "logits"})]


def _gdn_ops(config: ModelConfig, step: Step, layer: str, gdn_layer: int) -> list[_Json]:
    return [
        _run(layer + "in_proj_qkvz", "normed", "qkvz"),
        _run(layer + "in_proj_ba", "normed", "ba"),
        _plugin(
            "causal_conv",
            {"x": "qkvz", "out": "conv"},
            {"weight": layer + "conv"},
            {"gdn_layer": gdn_layer},
        ),
        _plugin(
            f"gated_delta_net_{step}",
            {"qkv": "conv", "ba": "ba", "out": "core"},
            {"a_log": layer + "a_log", "dt_bias": layer + "dt_bias"},
            {"gdn_layer": gdn_layer},
        ),
        _plugin(
            "gated_rms_norm",
            {"x": "core", "z": "qkvz", "out": "core"},
            {"weight": layer + "out_norm"},
            {"z_offset": config.conv_channels},
        ),
        _run(layer + "out_proj", "core", "delta"),
    ]


def _attention_ops(layer: str, kv_layer: int) -> list[_Json]:
    return [
        _run(layer + "qkv_proj", "normed", "qkv"),
        _plugin(
            "rotary_kv_write",
            {"qkv": "qkv", "out": "query"},
            {"q_norm": layer + "q_norm", "k_norm": layer + "k_norm"},
            {"kv_layer": kv_layer},
        ),
        _plugin(
            "gated_attention",
            {"q": "query", "qkv": "qkv", "out": "attended"},
            attrs={"kv_layer": kv_layer},
        ),
        _run(layer + "o_proj", "attended", "delta"),
    ]


def _norm(weight: str, *, adds_delta: bool) -> _Json:
    """RMSNorm of the residual stream, after the block output `delta` has been added to it."""
    buffers = {"x": "delta", "residual": "hidden"} if adds_delta else {"x": "hidden"}
    return _plugin(
        "rms_norm", {**buffers, "out": "normed"}, {"weight": weight}, {"unit_offset": True}
    )


def _run(segment: str, x: str, out: str) -> _Json:
    return {"segment": segment, "buffers": {"x": x, "out": out}}


def _plugin(
    name: str,
    buffers: Mapping[str, str] | None = None,
    weights: Mapping[str, str] | None = None,
    attrs: Mapping[str, bool | int] | None = None,
) -> _Json:
    return {
        "plugin": name,
        "buffers": dict(buffers or {}),
        "weights": dict(weights or {}),
        "attrs": dict(attrs or {}),
    }


def program_faults(program: Program, weights: Mapping[str, TensorInfo]) -> list[str]:
    """Checks a program against the weights of its engine.

    In prefill and in verify every weight of the text model must be used exactly once (a tied
    embedding table also by the head), every buffer written before it is read, every width and
    weight shape what the op computes, and the state of every layer touched in order. Likewise in
    the stages of vision, where a stage finds only what is as long as the picture.

    Args:
        program: The parsed `program.json`.
        weights: Name to dtype and shape.

    Returns:
        One sentence for each fault; empty for a sound program.
    """
    checker = _ProgramChecker(program, weights)
    for step in ("prefill", "verify", "commit"):
        checker.check_step(step, getattr(program.steps, step))
    checker.check_vision(program.steps.vision)
    return checker.faults


class _ProgramChecker:
    def __init__(self, program: Program, weights: Mapping[str, TensorInfo]) -> None:
        self.config = program.config
        self.weights = weights
        self.widths = {buffer.name: buffer.width for buffer in program.buffers}
        self.rows = {buffer.name: buffer.rows for buffer in program.buffers}
        self.segments = {segment.name: segment for segment in program.segments}
        self.faults: list[str] = []
        if len(self.widths) != len(program.buffers):
            self.faults.append("two buffers have the same name")
        if len(self.segments) != len(program.segments):
            self.faults.append("two segments have the same name")

    def check_step(self, step: str, ops: list[Op]) -> None:
        used, layers = self._check_ops(step, ops, set())
        if step != "commit":
            expected = [name for name in self.weights if not name.startswith(VISION_WEIGHTS)]
            self._check_weights(step, used, expected)
            self._check_layers(step, layers)

    def check_vision(self, stages: list[list[Op]]) -> None:
        used: list[str] = []
        whole: set[str] = set()  # written by earlier stages
        for stage in stages:
            written = set(whole)
            used += self._check_ops("vision", stage, written)[0]
            whole |= {name for name in written if self.rows.get(name) == "patches"}
        expected = [name for name in self.weights if name.startswith(VISION_WEIGHTS)]
        self._check_weights("vision", used, expected)

    def _check_ops(
        self, step: str, ops: list[Op], written: set[str]
    ) -> tuple[list[str], dict[str, list[int]]]:
        """Adds to `written` what the ops write; returns the weights and layers that they use."""
        used: list[str] = []
        layers: dict[str, list[int]] = {}
        for op in ops:
            reads, writes = _accesses(op)
            for name in reads:
                if name not in written:
                    self.faults.append(f"{step}: {_title(op)} reads {name} before it is written")
            for name in (*reads, *writes):
                if name not in self.widths:
                    self.faults.append(f"{step}: {_title(op)} uses the unknown buffer {name}")
            written |= set(writes)
            if isinstance(op, SegmentOp):
                used += self._check_segment(step, op)
            else:
                used += op.weights.values()
                self._check_plugin(step, op)
                for key in ("gdn_layer", "kv_layer"):
                    if key in op.attrs:
                        layers.setdefault(op.plugin, []).append(int(op.attrs[key]))
        return used, layers

    def _check_segment(self, step: str, op: SegmentOp) -> list[str]:
        segment = self.segments.get(op.segment)
        if segment is None:
            self.faults.append(f"{step}: unknown segment {op.segment}")
            return []
        x, out = op.buffers["x"], op.buffers["out"]
        vision = self.config.vision
        if vision and self.rows.get(x) == "patch_tile" and "token" in self.rows.get(out, ""):
            # The rows of a merge block, side by side, are one row of the merger.
            self._expect(step, op, x, segment.in_dim // vision.merge_size**2)
        else:
            self._expect(step, op, x, segment.in_dim)
        self._expect(step, op, op.buffers["out"], segment.out_dim)
        matrix = TensorInfo("BF16", (segment.out_dim, segment.in_dim))
        self._expect_weight(step, segment.weight, matrix)
        return [segment.weight]

    def _check_plugin(self, step: str, op: PluginOp) -> None:
        for key, width in self._buffer_widths(op).items():
            if key in op.buffers:
                exact = op.plugin != "causal_conv" or key != "x"
                self._expect(step, op, op.buffers[key], width, exact=exact)
        for key, info in self._weight_infos(op).items():
            self._expect_weight(step, op.weights[key], info)
        if op.plugin == "gated_rms_norm":
            config = self.config
            end = int(op.attrs["z_offset"]) + config.num_value_heads * config.value_dim
            self._expect(step, op, op.buffers["z"], end)

    def _buffer_widths(self, op: PluginOp) -> dict[str, int]:
        config = self.config
        hidden, vocab = config.hidden_size, config.vocab_size
        values = config.num_value_heads * config.value_dim
        channels = 2 * config.num_key_heads * config.key_dim + values
        queries = config.num_heads * config.head_dim
        qkv = 2 * queries + 2 * config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        recurrence = {"qkv": channels, "ba": 2 * config.num_value_heads, "out": values}
        table: dict[str, dict[str, int]] = {
            "embedding": {"out": hidden},
            "rms_norm": {"x": hidden, "residual": hidden, "out": hidden},
            "causal_conv": {"x": channels, "out": channels},
            "gated_delta_net_prefill": recurrence,
            "gated_delta_net_verify": recurrence,
            "gated_rms_norm": {"x": values, "out": values},
            "rotary_kv_write": {"qkv": qkv, "out": queries},
            "gated_attention": {"q": queries, "qkv": qkv, "out": queries},
            "silu_mul": {"gate_up": 2 * inner, "out": inner},
            "gather_rows": {"x": hidden, "out": hidden},
            "sample_accept": {"logits": vocab},
            "image_rows": {"x": hidden},
        }
        if op.plugin not in table and config.vision:
            return vision_widths(op, config.vision, self.widths)
        return table.get(op.plugin, {})

    def _weight_infos(self, op: PluginOp) -> dict[str, TensorInfo]:
        config = self.config
        values = config.num_value_heads * config.value_dim
        channels = 2 * config.num_key_heads * config.key_dim + values
        per_head = TensorInfo("F32", (config.num_value_heads,))
        recurrence = {"a_log": per_head, "dt_bias": per_head}
        head = TensorInfo("F32", (config.head_dim,))
        embedding = TensorInfo("BF16", (config.vocab_size, config.hidden_size))
        table: dict[str, dict[str, TensorInfo]] = {
            "embedding": {"table": embedding},
            "rms_norm": {"weight": TensorInfo("F32", (config.hidden_size,))},
            "causal_conv": {"weight": TensorInfo("F32", (channels, config.conv_kernel))},
            "gated_delta_net_prefill": recurrence,
            "gated_delta_net_verify": recurrence,
            "gated_rms_norm": {"weight": TensorInfo("F32", (config.value_dim,))},
            "rotary_kv_write": {"q_norm": head, "k_norm": head},
        }
        if op.plugin not in table and config.vision:
            return vision_weights(op, config.vision, self.widths)
        return table.get(op.plugin, {})

    def _check_weights(self, step: str, used: list[str], needed: list[str]) -> None:
        for name in sorted({*used, *needed}):
            tied = name == "embed_tokens" and "lm_head" not in self.weights
            expected = 2 if tied else 1
            if used.count(name) != expected:
                self.faults.append(
                    f"{step}: weight {name} is used {used.count(name)} times, not {expected}"
                )

    def _check_layers(self, step: str, layers: dict[str, list[int]]) -> None:
        recurrence = f"gated_delta_net_{step}"
        for plugin, count in (
            ("causal_conv", self.config.num_gdn_layers),
            (recurrence, self.config.num_gdn_layers),
            ("rotary_kv_write", self.config.num_attention_layers),
            ("gated_attention", self.config.num_attention_layers),
        ):
            found = layers.pop(plugin, [])
            if found != list(range(count)):
                self.faults.append(f"{step}: {plugin} runs layers {found}, not 0 to {count - 1}")
        for plugin in layers:
            self.faults.append(f"{step}: {plugin} belongs to another step")

    def _expect(self, step: str, op: Op, buffer: str, width: int, *, exact: bool = True) -> None:
        found = self.widths.get(buffer, width)
        if found < width or (exact and found != width):
            self.faults.append(f"{step}: {_title(op)} needs {buffer} {width} wide, not {found}")

    def _expect_weight(self, step: str, name: str, info: TensorInfo) -> None:
        found = self.weights.get(name)
        if found is not None and found != info:
            self.faults.append(f"{step}: weight {name} is {found}, not {info}")


def _accesses(op: Op) -> tuple[list[str], list[str]]:
    if isinstance(op, SegmentOp):
        return [op.buffers["x"]], [op.buffers["out"]]
    keys = PLUGINS[op.plugin]
    updates = [op.buffers[key] for key in keys.updates if key in op.buffers]
    reads = [op.buffers[key] for key in keys.reads] + updates
    return reads, [op.buffers[key] for key in keys.writes] + updates


def _title(op: Op) -> str:
    return op.segment if isinstance(op, SegmentOp) else op.plugin

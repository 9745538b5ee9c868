"""`config.json` of a qwen3_5 checkpoint, checked: what the runtime cannot compute is refused."""

import errno
import json
import math
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engine.errors import CheckpointError
from runtime.errors import refusal

LINEAR = "linear_attention"
FULL = "full_attention"

_MAX_INTEGER = 2**31 - 1  # the runtime counts tokens in int32
_MAX_LAYERS = 4096
_RGB_CHANNELS = 3
_VISION_ACT = "gelu_pytorch_tanh"
_MAX_VISION_HEAD_DIM = 128  # of the vision_attention op
_SHOWN_CHARS = 80  # of a value in a message
_TOP_TYPES = ("qwen3_5", "qwen3_5_text")
_TEXT_TYPES = ("qwen3_5_text", "qwen3_5")
_MOE_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
              "attention_factor", "mscale", "mscale_all_dim")  # fmt: skip
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_interleaved",
              "mrope_section")  # fmt: skip


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071), the keys as transformers names them."""

    factor: float
    original_context_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `rotary_dim` dims of a head, one axis of three for each frequency."""

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    yarn: Yarn | None


@dataclass(frozen=True)
class Vision:
    """Shapes of the vision encoder.

    Attributes:
        position_side: Rows and columns of the learned position table.
        image_token_id: The id that stands for one row of an encoded picture.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    position_side: int
    out_hidden_size: int
    image_token_id: int

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Values of one patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of one merge block, side by side."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True)
class ModelConfig:
    """A qwen3_5 model that the runtime can compute.

    Attributes:
        raw: `config.json` itself.
        layer_types: `linear_attention` or `full_attention` for each layer.
        tied: The output head is the embedding table.
        context_len: Positions the model may use, with YaRN if it is set.
        eos_ids: `eos_token_id` of the text part, then of the top level.
        num_mtp_layers: Decoder layers of the multi-token-prediction head.
    """

    raw: dict[str, Any]
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    rms_norm_eps: float
    tied: bool
    rope: Rope
    context_len: int
    eos_ids: tuple[int, ...]
    num_mtp_layers: int
    vision: Vision | None

    @property
    def conv_channels(self) -> int:
        """Channels of the GDN convolution: all of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_gdn_layers(self) -> int:
        """Layers with a Gated DeltaNet mixer."""
        return self.layer_types.count(LINEAR)

    @property
    def num_attention_layers(self) -> int:
        """Layers with full attention."""
        return self.layer_types.count(FULL)


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Reads a JSON object of the checkpoint.

    Args:
        path: The file.
        fix: The command to name when the file cannot be used.

    Returns:
        The object.

    Raises:
        CheckpointError: The file is not there, not readable or no JSON object.
    """
    try:
        check_readable(path)
        value = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates cannot be written again
    except FileNotFoundError as error:
        raise CheckpointError(refusal(path, "nothing", "this file", fix)) from error
    except OSError as error:
        found = str(error.strerror or error)
        raise CheckpointError(refusal(path, found, "a readable file", fix)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(refusal(path, f"no JSON ({error})", "valid JSON", fix)) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            refusal(path, f"JSON of type {type(value).__name__}", "an object", fix)
        )
    return value


def check_readable(path: Path) -> None:
    """Refuses what might never end when it is read.

    Raises:
        OSError: There is no such file, or it is a pipe, a socket or a device.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe, a socket or a device", str(path))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Fields:
    def __init__(self, values: Mapping[str, Any], where: str, path: Path) -> None:
        self.values = values
        self.where = where
        self.path = path

    def refuse(self, key: str, needed: str, fix: str | None = None) -> CheckpointError:
        found = json.dumps(self.values[key]) if key in self.values else "nothing"
        found = found if len(found) <= _SHOWN_CHARS else found[:_SHOWN_CHARS] + "..."
        return CheckpointError(
            refusal(
                self.path,
                f"{self.where}{key} = {found}",
                needed,
                fix or "use a qwen3_5 checkpoint that DeltaFlash supports",
            )
        )

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_INTEGER
    ) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.refuse(key, f"an integer of at least {minimum} and at most {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, "true or false")
        return value

    def section(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return _Fields(value, f"{self.where}{key}.", self.path)


def read_model_config(path: Path) -> ModelConfig:
    """Reads and checks `config.json`.

    Args:
        path: The file.

    Returns:
        The model.

    Raises:
        CheckpointError: Not a qwen3_5 model, incomplete, or with a feature that would be computed
            wrongly.
    """
    raw = read_json(path, "download the checkpoint again, config.json included")
    top = _Fields(raw, "", path)
    if raw.get("model_type") not in _TOP_TYPES:
        raise top.refuse("model_type", f"one of {', '.join(_TOP_TYPES)} (dense, not MoE)")
    text = top.section("text_config") if "text_config" in raw else top
    if text.values.get("model_type", "qwen3_5_text") not in _TEXT_TYPES:
        raise text.refuse("model_type", f"one of {', '.join(_TEXT_TYPES)} (dense, not MoE)")
    for fields in (top, text):
        _refuse_unsupported(fields)

    layer_types = _layer_types(text)
    vision = _vision(top) if raw.get("vision_config") is not None else None
    heads, kv_heads = text.integer("num_attention_heads"), text.integer("num_key_value_heads")
    if heads % kv_heads:
        raise text.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    key_heads = text.integer("linear_num_key_heads")
    value_heads = text.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise text.refuse("linear_num_value_heads", f"a multiple of {key_heads} key heads")
    head_dim = text.integer("head_dim")
    rope = _rope(text, head_dim, has_vision=vision is not None)
    hidden_size = text.integer("hidden_size")
    if vision is not None and vision.out_hidden_size != hidden_size:
        raise top.section("vision_config").refuse(
            "out_hidden_size", f"the text hidden_size {hidden_size}"
        )
    if vision is not None and vision.image_token_id >= text.integer("vocab_size"):
        raise top.refuse("image_token_id", f"an id below vocab_size = {text.values['vocab_size']}")
    architectures = raw.get("architectures")
    return ModelConfig(
        raw=raw,
        architecture=(
            architectures[0]
            if isinstance(architectures, list)
            and architectures
            and isinstance(architectures[0], str)
            else "Qwen3_5ForConditionalGeneration"
            if vision
            else "Qwen3_5ForCausalLM"
        ),
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=text.integer("intermediate_size"),
        layer_types=layer_types,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim"),
        rms_norm_eps=text.number("rms_norm_eps"),
        tied=_tied(top, text),
        rope=rope,
        context_len=_context_len(text, rope),
        eos_ids=_eos_ids(top, text),
        num_mtp_layers=text.integer("mtp_num_hidden_layers", 0, 0, _MAX_LAYERS),
        vision=vision,
    )


def _refuse_unsupported(fields: _Fields) -> None:
    values = fields.values
    for key in ("quantization_config", "compression_config"):
        if values.get(key) is not None:
            raise fields.refuse(
                key, "unquantised weights", "use the BF16 checkpoint this one was made from"
            )
    for key in _MOE_KEYS:
        if values.get(key):
            raise fields.refuse(key, "a dense model (no experts)")
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate", "true: attention outputs are always gated")
    if fields.flag("attention_bias", False):
        raise fields.refuse("attention_bias", "false: projections have no bias")
    if values.get("output_gate_type") not in (None, "swish", "silu"):
        raise fields.refuse("output_gate_type", "swish: the activation of the GDN output gate")
    if values.get("hidden_act") not in (None, "silu"):
        raise fields.refuse("hidden_act", "silu")
    if values.get("mamba_ssm_dtype") not in (None, "float32"):
        raise fields.refuse("mamba_ssm_dtype", "float32")
    if values.get("use_sliding_window"):
        raise fields.refuse("use_sliding_window", "false: attention sees the whole context")


def _layer_types(text: _Fields) -> tuple[str, ...]:
    num_layers = text.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    listed = text.values.get("layer_types")
    if listed is None:
        interval = text.integer("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    known = isinstance(listed, list) and all(kind in (LINEAR, FULL) for kind in listed)
    if not known or len(listed) != num_layers:
        raise text.refuse("layer_types", f"{num_layers} entries, each {LINEAR} or {FULL}")
    return tuple(listed)


def _vision(top: _Fields) -> Vision:
    fields = top.section("vision_config")
    if fields.values.get("hidden_act", _VISION_ACT) != _VISION_ACT:
        raise fields.refuse("hidden_act", _VISION_ACT)
    if fields.values.get("deepstack_visual_indexes"):
        raise fields.refuse("deepstack_visual_indexes", "an empty list: no deepstack")
    if fields.integer("in_channels") != _RGB_CHANNELS:
        raise fields.refuse("in_channels", f"{_RGB_CHANNELS}: pictures are RGB")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_heads")
    head_dim = hidden_size // num_heads
    if hidden_size % num_heads or head_dim % 4 or not head_dim <= _MAX_VISION_HEAD_DIM:
        raise fields.refuse(
            "num_heads",
            f"heads of a multiple of 4 and at most {_MAX_VISION_HEAD_DIM} values that divide "
            f"hidden_size = {hidden_size}",
        )
    num_positions = fields.integer("num_position_embeddings")
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise fields.refuse("num_position_embeddings", "a square number")
    return Vision(
        depth=fields.integer("depth", maximum=_MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.integer("intermediate_size"),
        in_channels=_RGB_CHANNELS,
        patch_size=fields.integer("patch_size"),
        temporal_patch_size=fields.integer("temporal_patch_size"),
        spatial_merge_size=fields.integer("spatial_merge_size"),
        position_side=math.isqrt(num_positions),
        out_hidden_size=fields.integer("out_hidden_size"),
        image_token_id=top.integer("image_token_id", minimum=0),
    )


def _tied(top: _Fields, text: _Fields) -> bool:
    both = [f.flag("tie_word_embeddings", False) for f in (top, text)
            if "tie_word_embeddings" in f.values]  # fmt: skip
    if len(set(both)) > 1:
        raise text.refuse("tie_word_embeddings", f"the top-level value, {str(both[0]).lower()}")
    return bool(both) and both[0]


def _eos_ids(top: _Fields, text: _Fields) -> tuple[int, ...]:
    ids: list[int] = []
    for fields in (text, top):
        value = fields.values.get("eos_token_id")
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if type(one) is not int or one < 0:
                raise fields.refuse("eos_token_id", "a token id, a list of them or null")
            ids.append(one)
    return tuple(dict.fromkeys(ids))


def _rope(text: _Fields, head_dim: int, *, has_vision: bool) -> Rope:
    fields = _rope_fields(text)
    kind = fields.values.get("rope_type", fields.values.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise fields.refuse("rope_type" if "rope_type" in fields.values else "type",
                            "default or yarn")  # fmt: skip
    rotary_dim = int(head_dim * fields.number("partial_rotary_factor"))
    if rotary_dim == 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.refuse("partial_rotary_factor", f"an even part of head_dim = {head_dim}")
    if not fields.flag("mrope_interleaved", True):
        raise fields.refuse("mrope_interleaved", "true: the axes of M-RoPE are interleaved")
    half = rotary_dim // 2
    section = fields.values.get("mrope_section")
    if section is None and not has_vision:
        section = [half, 0, 0]  # text only: the three positions are equal, any section is right
    valid = (
        isinstance(section, list)
        and len(section) == len(("time", "height", "width"))
        and all(type(count) is int and count >= 0 for count in section)
        and sum(section) == half
    )
    if not valid or section is None:
        raise fields.refuse("mrope_section", f"three counts that sum to {half}")
    return Rope(
        theta=fields.number("rope_theta"),
        rotary_dim=rotary_dim,
        mrope_section=(section[0], section[1], section[2]),
        yarn=_yarn(fields) if kind == "yarn" else None,
    )


def _rope_fields(text: _Fields) -> _Fields:
    """The rope keys: in `rope_parameters`, in the older `rope_scaling`, or in the config itself."""
    flat = {key: text.values[key] for key in _ROPE_KEYS if key in text.values and key != "type"}
    for name in ("rope_parameters", "rope_scaling"):
        if text.values.get(name) is not None:
            nested = text.section(name)
            return _Fields({**flat, **nested.values}, nested.where, text.path)
    return _Fields(flat, text.where, text.path)


def _yarn(fields: _Fields) -> Yarn:
    unknown = sorted(set(fields.values) - {*_ROPE_KEYS, *_YARN_KEYS})
    if unknown:
        raise fields.refuse(unknown[0], f"for yarn only the keys {', '.join(_YARN_KEYS)}")
    factor = fields.number("factor")
    if factor < 1:
        raise fields.refuse("factor", "at least 1")
    set_values = {key: value for key, value in fields.values.items() if value is not None}
    given = _Fields(set_values, fields.where, fields.path)
    if "attention_factor" in set_values:
        attention = given.number("attention_factor")
    elif "mscale" in set_values and "mscale_all_dim" in set_values:
        attention = _mscale(factor, given.number("mscale")) / _mscale(
            factor, given.number("mscale_all_dim")
        )
    else:
        attention = _mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        original_context_len=given.integer("original_max_position_embeddings"),
        beta_fast=given.number("beta_fast", 32.0),
        beta_slow=given.number("beta_slow", 1.0),
        truncate=given.flag("truncate", True),
        attention_factor=attention,
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _context_len(text: _Fields, rope: Rope) -> int:
    """`max_position_embeddings`; YaRN extends it if the checkpoint has not done so itself."""
    listed = text.integer("max_position_embeddings")
    if rope.yarn is None:
        return listed
    length = rope.yarn.original_context_len * rope.yarn.factor
    if length > _MAX_INTEGER:
        raise text.refuse("max_position_embeddings", f"a context of at most {_MAX_INTEGER} tokens")
    extended = int(length)
    return extended if listed <= rope.yarn.original_context_len else min(listed, extended)

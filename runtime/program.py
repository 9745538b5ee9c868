"""The schema of `program.json`: the ordered segments and plugins of every step."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class VisionConfig(_Schema):
    """The numbers the executor needs of the vision encoder; areas are in pixels.

    Attributes:
        num_frames: Frames of a patch, all of which show the one picture.
        merge_size: Rows and columns of patches that become one token.
        position_side: Rows and columns of the learned position table.
        image_token_id: The id of a prompt that one row of a picture replaces.
        max_pixels: The largest resized picture.
        pixel_levels: `[3, 256]`, what each byte of each channel becomes.
    """

    depth: Size
    hidden_size: Size
    num_heads: Size
    intermediate_size: Size
    patch_size: Size
    num_frames: Size
    merge_size: Size
    position_side: Size
    layer_norm_eps: Annotated[float, Field(gt=0)]
    rotary_theta: Annotated[float, Field(gt=0)]
    image_token_id: Count
    min_pixels: Size
    max_pixels: Size
    pixel_levels: Annotated[
        list[Annotated[list[float], Field(min_length=256, max_length=256)]],
        Field(min_length=3, max_length=3),
    ]

    @property
    def patch_width(self) -> int:
        """Values of one patch: channels, frames, rows, columns."""
        return 3 * self.num_frames * self.patch_size**2

    @model_validator(mode="after")
    def _sizes_are_consistent(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError("hidden_size is no multiple of num_heads")
        if self.max_pixels < (self.patch_size * self.merge_size) ** 2:
            raise ValueError("max_pixels holds no token")
        return self


class ProgramConfig(_Schema):
    """The numbers the executor needs of the model; lengths are in tokens, widths in elements."""

    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_gdn_layers: Count
    num_attention_layers: Count
    intermediate_size: Size
    rms_norm_eps: Annotated[float, Field(gt=0)]
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    rotary_dim: Size
    mrope_section: Annotated[list[Count], Field(min_length=3, max_length=3)]
    inv_freq: list[float]
    attention_factor: Annotated[float, Field(gt=0)]
    num_key_heads: Size
    num_value_heads: Size
    key_dim: Size
    value_dim: Size
    conv_kernel: Size
    context_len: Size
    vision: VisionConfig | None = None

    @model_validator(mode="after")
    def _rotary_is_consistent(self) -> Self:
        half = self.rotary_dim // 2
        if self.rotary_dim % 2 or len(self.inv_freq) != half or sum(self.mrope_section) != half:
            raise ValueError("rotary_dim, inv_freq and mrope_section disagree")
        if self.num_gdn_layers + self.num_attention_layers != self.num_layers:
            raise ValueError("num_gdn_layers and num_attention_layers do not sum to num_layers")
        if self.vision is not None and self.vision.image_token_id >= self.vocab_size:
            raise ValueError("image_token_id is no id below vocab_size")
        return self


class Buffer(_Schema):
    """An activation `[rows, width]`, shared by all layers of a step.

    `rows` is `tokens` for one row a packed token, `logits` for one row a sampled position; in the
    vision step `patches` and `image_tokens` for all rows of a picture, `patch_tile` and
    `image_token_tile` for those of the tile at hand.
    """

    name: str
    rows: Literal["tokens", "logits", "patches", "patch_tile", "image_tokens", "image_token_tile"]
    width: Size
    dtype: Literal["float32"]


class Segment(_Schema):
    """A dense part of the model: `out = x @ weight.T`."""

    name: str
    kind: Literal["linear"]
    weight: str
    in_dim: Size
    out_dim: Size


class SegmentOp(_Schema):
    """Runs a segment on two buffers, `x` and `out`."""

    segment: str
    buffers: dict[Literal["x", "out"], str]

    @model_validator(mode="after")
    def _buffers_are_complete(self) -> Self:
        if set(self.buffers) != {"x", "out"}:
            raise ValueError(f"segment {self.segment} needs the buffers x and out")
        return self


class PluginKeys(BaseModel):
    """Which keys an op of a plugin has, and how it uses its buffers."""

    model_config = ConfigDict(frozen=True)

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()  # optional; read, then written
    weights: tuple[str, ...] = ()
    attrs: tuple[str, ...] = ()


_RECURRENCE = PluginKeys(
    reads=("qkv", "ba"), writes=("out",), weights=("a_log", "dt_bias"), attrs=("gdn_layer",)
)

PLUGINS: dict[str, PluginKeys] = {
    "embedding": PluginKeys(writes=("out",), weights=("table",)),
    "rms_norm": PluginKeys(
        reads=("x",),
        writes=("out",),
        updates=("residual",),
        weights=("weight",),
        attrs=("unit_offset",),
    ),
    "causal_conv": PluginKeys(
        reads=("x",), writes=("out",), weights=("weight",), attrs=("gdn_layer",)
    ),
    "gated_delta_net_prefill": _RECURRENCE,
    "gated_delta_net_verify": _RECURRENCE,
    "gated_rms_norm": PluginKeys(
        reads=("x", "z"), writes=("out",), weights=("weight",), attrs=("z_offset",)
    ),
    "rotary_kv_write": PluginKeys(
        reads=("qkv",), writes=("out",), weights=("q_norm", "k_norm"), attrs=("kv_layer",)
    ),
    "gated_attention": PluginKeys(reads=("q", "qkv"), writes=("out",), attrs=("kv_layer",)),
    "silu_mul": PluginKeys(reads=("gate_up",), writes=("out",)),
    "gather_rows": PluginKeys(reads=("x",), writes=("out",)),
    "sample_accept": PluginKeys(reads=("logits",)),
    "commit_round": PluginKeys(),
    "image_rows": PluginKeys(updates=("x",)),
    "patchify": PluginKeys(writes=("out",)),
    "vision_position_embedding": PluginKeys(updates=("x",), weights=("bias", "table")),
    "layer_norm": PluginKeys(reads=("x",), writes=("out",), weights=("weight", "bias")),
    "vision_rotary": PluginKeys(reads=("qkv",), writes=("out",), weights=("bias",)),
    "vision_attention": PluginKeys(reads=("q",), writes=("out",)),
    "bias_residual": PluginKeys(reads=("y",), updates=("residual",), weights=("bias",)),
    **dict.fromkeys(
        ("bias", "bias_gelu_tanh", "bias_gelu_erf"), PluginKeys(updates=("x",), weights=("bias",))
    ),
}


class PluginOp(_Schema):
    """Runs a plugin; its keys are those of `PLUGINS`."""

    plugin: str
    buffers: dict[str, str] = {}
    weights: dict[str, str] = {}
    attrs: dict[str, bool | int] = {}

    @model_validator(mode="after")
    def _keys_are_known(self) -> Self:
        keys = PLUGINS.get(self.plugin)
        if keys is None:
            raise ValueError(f"unknown plugin {self.plugin}")
        required = {*keys.reads, *keys.writes}
        if not required <= set(self.buffers) <= required | set(keys.updates):
            raise ValueError(f"plugin {self.plugin} has the buffers {sorted(self.buffers)}")
        if set(self.weights) != set(keys.weights):
            raise ValueError(f"plugin {self.plugin} has the weights {sorted(self.weights)}")
        if set(self.attrs) != set(keys.attrs):
            raise ValueError(f"plugin {self.plugin} has the attrs {sorted(self.attrs)}")
        return self


Op = SegmentOp | PluginOp


class Steps(_Schema):
    """The ops of each step, in the order in which they run.

    `vision` is a list of stages. A stage runs on tiles of rows, and begins when the one before has
    done all rows of the picture; a model without vision has none.
    """

    prefill: list[Op]
    verify: list[Op]
    commit: list[Op]
    vision: list[list[Op]] = []


class Program(_Schema):
    """All of `program.json`."""

    schema_version: Literal[1]
    config: ProgramConfig
    buffers: list[Buffer]
    segments: list[Segment]
    steps: Steps

    @model_validator(mode="after")
    def _vision_is_whole(self) -> Self:
        if (self.config.vision is None) != (not self.steps.vision):
            raise ValueError("config.vision and steps.vision go together")
        return self

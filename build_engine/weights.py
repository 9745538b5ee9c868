"""Checkpoint tensors -> `weights/model.safetensors` in the layout that the runtime maps.

Matrices are BF16, vectors F32. Projections that read the same input are stacked by rows into one
matrix. F32 tensors come first, so that every tensor starts at a multiple of its item size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from build_engine.checkpoint import Checkpoint
from build_engine.errors import CheckpointError
from build_engine.model_config import LINEAR, ModelConfig, Vision
from build_engine.safetensors_file import Bytes, TensorInfo, encode_header
from runtime.errors import refusal

_CHUNK_BYTES = 8 << 20  # a multiple of every item size
_BF16_EXPONENT = np.uint16(0x7F80)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of the engine.

    Attributes:
        name: Its name in the engine.
        info: dtype and shape.
        sources: Checkpoint tensors, by name without prefix, whose rows follow one another.
    """

    name: str
    info: TensorInfo
    sources: tuple[str, ...]


def packed_tensors(config: ModelConfig) -> list[PackedTensor]:
    """Every tensor of the engine, in file order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors = [
        _matrix("embed_tokens", config.vocab_size, hidden, "embed_tokens.weight"),
        _vector("norm", hidden, "norm.weight"),
    ]
    if not config.tied:
        tensors.append(_matrix("lm_head", config.vocab_size, hidden, "lm_head.weight"))
    for index, kind in enumerate(config.layer_types):
        layer = f"layers.{index}."
        mixer = _gdn_tensors if kind == LINEAR else _attention_tensors
        tensors += mixer(config, layer)
        gate, up = layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"
        tensors += [
            _vector(layer + "input_norm", hidden, layer + "input_layernorm.weight"),
            _vector(layer + "post_norm", hidden, layer + "post_attention_layernorm.weight"),
            _matrix(layer + "gate_up_proj", 2 * inner, hidden, gate, up),
            _matrix(layer + "down_proj", hidden, inner, layer + "mlp.down_proj.weight"),
        ]
    if config.vision is not None:
        tensors += _vision_tensors(config.vision)
    return sorted(tensors, key=lambda tensor: (tensor.info.dtype != "F32", tensor.name))


def _gdn_tensors(config: ModelConfig, layer: str) -> list[PackedTensor]:
    hidden, channels, heads = config.hidden_size, config.conv_channels, config.num_value_heads
    width, mixer = heads * config.value_dim, layer + "linear_attn."
    qkv, z = mixer + "in_proj_qkv.weight", mixer + "in_proj_z.weight"
    b, a = mixer + "in_proj_b.weight", mixer + "in_proj_a.weight"
    conv = TensorInfo("F32", (channels, config.conv_kernel))
    return [
        _matrix(layer + "in_proj_qkvz", channels + width, hidden, qkv, z),
        _matrix(layer + "in_proj_ba", 2 * heads, hidden, b, a),
        PackedTensor(layer + "conv", conv, (mixer + "conv1d.weight",)),
        _vector(layer + "a_log", heads, mixer + "A_log"),
        _vector(layer + "dt_bias", heads, mixer + "dt_bias"),
        _vector(layer + "out_norm", config.value_dim, mixer + "norm.weight"),
        _matrix(layer + "out_proj", hidden, width, mixer + "out_proj.weight"),
    ]


def _attention_tensors(config: ModelConfig, layer: str) -> list[PackedTensor]:
    hidden, dim, mixer = config.hidden_size, config.head_dim, layer + "self_attn."
    qkv = [mixer + f"{part}_proj.weight" for part in "qkv"]
    rows = 2 * config.num_heads * dim + 2 * config.num_kv_heads * dim
    return [
        _matrix(layer + "qkv_proj", rows, hidden, *qkv),
        _vector(layer + "q_norm", dim, mixer + "q_norm.weight"),
        _vector(layer + "k_norm", dim, mixer + "k_norm.weight"),
        _matrix(layer + "o_proj", hidden, config.num_heads * dim, mixer + "o_proj.weight"),
    ]


def _vision_tensors(vision: Vision) -> list[PackedTensor]:
    width, inner, merged = vision.hidden_size, vision.intermediate_size, vision.merged_size
    kernel = _matrix(
        "vision.patch_embed", width, vision.patch_width, "visual.patch_embed.proj.weight"
    )
    table = _matrix("vision.positions", vision.position_side**2, width, "visual.pos_embed.weight")
    tensors = [kernel, _vector("vision.patch_bias", width, "visual.patch_embed.proj.bias"), table]
    for index in range(vision.depth):
        block, source = f"vision.blocks.{index}.", f"visual.blocks.{index}."
        tensors += [
            *_affine(block + "norm1", width, source + "norm1"),
            *_dense(block + "qkv", 3 * width, width, source + "attn.qkv"),
            *_dense(block + "proj", width, width, source + "attn.proj"),
            *_affine(block + "norm2", width, source + "norm2"),
            *_dense(block + "fc1", inner, width, source + "mlp.linear_fc1"),
            *_dense(block + "fc2", width, inner, source + "mlp.linear_fc2"),
        ]
    return [
        *tensors,
        *_affine("vision.merger.norm", width, "visual.merger.norm"),
        *_dense("vision.merger.fc1", merged, merged, "visual.merger.linear_fc1"),
        *_dense("vision.merger.fc2", vision.out_hidden_size, merged, "visual.merger.linear_fc2"),
    ]


def _dense(name: str, rows: int, columns: int, source: str) -> list[PackedTensor]:
    return [
        _matrix(name, rows, columns, source + ".weight"),
        _vector(name + "_bias", rows, source + ".bias"),
    ]


def _affine(name: str, dim: int, source: str) -> list[PackedTensor]:
    return [
        _vector(name, dim, source + ".weight"),
        _vector(name + "_bias", dim, source + ".bias"),
    ]


def _matrix(name: str, rows: int, columns: int, *sources: str) -> PackedTensor:
    return PackedTensor(name, TensorInfo("BF16", (rows, columns)), sources)


def _vector(name: str, dim: int, source: str) -> PackedTensor:
    return PackedTensor(name, TensorInfo("F32", (dim,)), (source,))


def weights_bytes(tensors: list[PackedTensor]) -> int:
    """Length of the weights file."""
    return len(_header(tensors)) + sum(tensor.info.num_bytes for tensor in tensors)


def converted_sources(checkpoint: Checkpoint, tensors: list[PackedTensor]) -> dict[str, int]:
    """How many checkpoint matrices of each dtype are rounded to BF16."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        for source in tensor.sources if tensor.info.dtype == "BF16" else ():
            dtype = checkpoint.info(source).dtype
            if dtype != "BF16":
                counts[dtype] = counts.get(dtype, 0) + 1
    return counts


def weights_chunks(checkpoint: Checkpoint, tensors: list[PackedTensor]) -> Iterator[Bytes]:
    """The bytes of the weights file, in order, in pieces of at most 16 MiB after the header.

    Args:
        checkpoint: Where the tensors come from.
        tensors: What `packed_tensors` returned for its config.

    Yields:
        One-dimensional arrays of bytes.

    Raises:
        CheckpointError: A weight is NaN, infinite or beyond the range of BF16.
    """
    yield np.frombuffer(_header(tensors), np.uint8)
    for tensor in tensors:
        for source in tensor.sources:
            convert = _CONVERSIONS[checkpoint.info(source).dtype, tensor.info.dtype]
            data = checkpoint.data(source)
            for start in range(0, data.size, _CHUNK_BYTES):
                yield _converted(checkpoint, source, convert, data[start : start + _CHUNK_BYTES])


def _header(tensors: list[PackedTensor]) -> bytes:
    return encode_header([(tensor.name, tensor.info) for tensor in tensors])


def _converted(checkpoint: Checkpoint, source: str, convert: "_Conversion", chunk: Bytes) -> Bytes:
    try:
        return convert(chunk)
    except _UnfitValueError as error:
        raise CheckpointError(
            refusal(
                checkpoint.stored_in(source),
                f"{error} in {checkpoint.names[source]}",
                "finite weights within the range of BF16",
                "download the checkpoint again; if it is the original, it cannot be used",
            )
        ) from error


class _UnfitValueError(ValueError):
    pass


_Conversion = Callable[[Bytes], Bytes]
_Float32s = npt.NDArray[np.float32]


def bf16_from_f32(values: _Float32s) -> npt.NDArray[np.uint16]:
    """Rounds finite float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def _bf16_to_bf16(chunk: Bytes) -> Bytes:
    if ((chunk.view("<u2") & _BF16_EXPONENT) == _BF16_EXPONENT).any():
        raise _UnfitValueError("NaN or infinity")
    return chunk


def _bf16_to_f32(chunk: Bytes) -> Bytes:
    bits = _bf16_to_bf16(chunk).view("<u2").astype("<u4") << np.uint32(16)
    return bits.view(np.uint8)


def _to_f32(dtype: str) -> _Conversion:
    def convert(chunk: Bytes) -> Bytes:
        values = chunk.view(dtype).astype("<f4")
        if not np.isfinite(values).all():
            raise _UnfitValueError("NaN or infinity")
        return values.view(np.uint8)

    return convert


def _to_bf16(dtype: str) -> _Conversion:
    widen = _to_f32(dtype)

    def convert(chunk: Bytes) -> Bytes:
        rounded = bf16_from_f32(widen(chunk).view(np.float32))
        if ((rounded & _BF16_EXPONENT) == _BF16_EXPONENT).any():
            raise _UnfitValueError("a value too large for BF16")
        return rounded.view(np.uint8)

    return convert


_CONVERSIONS: dict[tuple[str, str], _Conversion] = {
    ("BF16", "BF16"): _bf16_to_bf16,
    ("F16", "BF16"): _to_bf16("<f2"),
    ("F32", "BF16"): _to_bf16("<f4"),
    ("BF16", "F32"): _bf16_to_f32,
    ("F16", "F32"): _to_f32("<f2"),
    ("F32", "F32"): _to_f32("<f4"),
}

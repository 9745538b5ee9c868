"""A Hugging Face checkpoint of the qwen3_5 family: every tensor checked against the config."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from build_engine.errors import CheckpointError
from build_engine.model_config import LINEAR, ModelConfig, Vision, read_json, read_model_config
from build_engine.safetensors_file import Bytes, SafetensorsFile, TensorInfo
from runtime.errors import refusal

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32")

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
VISION_PREFIX = "model.visual."
MTP_PREFIX = "mtp."
_TEXT_PREFIXES = ("model.language_model.", "model.")
_DOWNLOAD = "download the checkpoint again"
_SHOWN = 8  # names in a message

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors are exactly those its config asks for.

    Attributes:
        path: The directory.
        config: The model; without `vision` where the encoder's weights are not there.
        files: The weight files by name.
        names: Tensors of the engine: the name without prefix (`layers.0.mlp.up_proj.weight`,
            `lm_head.weight`, `visual.merger.norm.bias`) to the name in the checkpoint.
        dropped: Group to prefix and tensors that the engine leaves out.
        notes: What a reader of the build log should know.
    """

    path: Path
    config: ModelConfig
    files: Mapping[str, SafetensorsFile]
    names: Mapping[str, str]
    dropped: Mapping[str, tuple[str, tuple[TensorInfo, ...]]]
    notes: tuple[str, ...]
    _owners: Mapping[str, SafetensorsFile]

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor, by its name without prefix."""
        stored = self.names[name]
        return self._owners[stored].tensors[stored]

    def data(self, name: str) -> Bytes:
        """The bytes of a tensor, by its name without prefix; mapped, not copied."""
        stored = self.names[name]
        return self._owners[stored].data(stored)

    def stored_in(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._owners[self.names[name]].path


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint and checks dtype and shape of every tensor.

    Args:
        path: A directory with `config.json` and one or more safetensors files.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: One line that names what is wrong with it.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(
            refusal(
                error.filename or path,
                str(error.strerror or error),
                "files that this user can read",
                f"ls -la {shlex.quote(str(path))}",
            )
        ) from error


def _open(path: Path) -> Checkpoint:
    if not path.is_dir():
        kind = "a file" if path.exists() else "nothing"
        raise CheckpointError(
            refusal(path, kind, "a checkpoint directory", "pass the directory of config.json")
        )
    config = read_model_config(path / "config.json")
    if (path / "hf_quant_config.json").exists():
        raise CheckpointError(
            refusal(
                path,
                "a quantised checkpoint (hf_quant_config.json)",
                "unquantised weights",
                "use the BF16 checkpoint this one was made from",
            )
        )
    files = _open_files(path)
    owners = {name: file for file in files.values() for name in file.tensors}
    found = {name: file.tensors[name] for name, file in owners.items()}

    prefix = next(p for p in _TEXT_PREFIXES if p == _TEXT_PREFIXES[-1] or _any_starts(found, p))
    names = {
        name: name if name == "lm_head.weight" else prefix + name for name in text_shapes(config)
    }
    expected = {names[name]: shape for name, shape in text_shapes(config).items()}
    # A group is there as a whole or not at all.
    if config.vision is not None and not _any_starts(found, VISION_PREFIX):
        config = replace(config, vision=None)
    if config.vision is not None:
        visual = vision_shapes(config.vision)
        expected |= {VISION_PREFIX + name: shape for name, shape in visual.items()}
        names |= {"visual." + name: VISION_PREFIX + name for name in visual}
    dropped: dict[str, tuple[str, tuple[TensorInfo, ...]]] = {}
    mtp = tuple(info for name, info in found.items() if name.startswith(MTP_PREFIX))
    if mtp:
        expected |= mtp_shapes(config)
        dropped["mtp"] = (MTP_PREFIX, mtp)

    notes: list[str] = []
    if config.tied and "lm_head.weight" in found:
        _check_tied(path, owners, names["embed_tokens.weight"])
        notes.append("lm_head.weight equals the tied embedding table and was left out")
        del found["lm_head.weight"]
    _check_tensors(path, expected, found)
    return Checkpoint(path, config, files, names, dropped, tuple(notes), owners)


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    index, single = path / INDEX, path / SINGLE
    if index.exists() and single.exists():
        raise CheckpointError(
            refusal(path, f"both {SINGLE} and {INDEX}", "one of them", "remove the stale one")
        )
    if single.exists():
        return {SINGLE: SafetensorsFile(single)}
    if not index.exists():
        raise _refuse_no_weights(path)

    weight_map = read_json(index, _DOWNLOAD).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(refusal(index, "no weight_map", "tensor to file", _DOWNLOAD))
    shards = set(weight_map.values())
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or shard in (".", ".."):
            raise CheckpointError(
                refusal(
                    index, f"the file {json.dumps(shard)}", "names in this directory", _DOWNLOAD
                )
            )
        if not shard.endswith(".safetensors"):
            raise CheckpointError(
                refusal(index, f"the file {shard}", "safetensors files only", _DOWNLOAD)
            )
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        raise CheckpointError(
            refusal(
                path,
                f"{listed(missing)} missing",
                f"all {len(shards)} files of {INDEX}",
                _DOWNLOAD,
            )
        )
    files = {shard: SafetensorsFile(path / shard) for shard in sorted(shards)}
    actual = [(name, shard) for shard, file in files.items() for name in file.tensors]
    faults = [f"{name} in {shard}" for name, shard in actual if weight_map.get(name) != shard]
    faults += [
        f"{name} not in {shard}"
        for name, shard in weight_map.items()
        if name not in files[shard].tensors
    ]
    if faults:
        raise CheckpointError(
            refusal(index, listed(faults), "an index that matches the files", _DOWNLOAD)
        )
    return files


def _refuse_no_weights(path: Path) -> CheckpointError:
    pickles = [file.name for file in path.iterdir() if file.suffix in _PICKLES]
    if pickles:
        return CheckpointError(
            refusal(
                path,
                f"pickled weights ({listed(pickles)})",
                f"{SINGLE} or {INDEX}; pickle files can run code and are never opened",
                "save it with transformers: model.save_pretrained(DIR, safe_serialization=True)",
            )
        )
    others = [file.name for file in path.iterdir() if file.suffix == ".safetensors"]
    found = f"{listed(others)} without an index" if others else "no weights"
    return CheckpointError(refusal(path, found, f"{SINGLE} or {INDEX}", _DOWNLOAD))


def text_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name, without prefix, and shape of every tensor of the text model."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index, kind in enumerate(config.layer_types):
        mixer = _gdn_shapes(config) if kind == LINEAR else _attention_shapes(config)
        layer = mixer | _mlp_shapes(config)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _gdn_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, channels, heads = config.hidden_size, config.conv_channels, config.num_value_heads
    width = heads * config.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (width, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, config.conv_kernel),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (config.value_dim,),
        "linear_attn.out_proj.weight": (hidden, width),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": (2 * width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, width),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }


def _mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def mtp_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Full name and shape of every tensor of the multi-token-prediction head."""
    if config.num_mtp_layers == 0:
        return {}
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    }
    layer = _attention_shapes(config) | _mlp_shapes(config)
    for index in range(config.num_mtp_layers):
        shapes |= {f"mtp.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def vision_shapes(vision: Vision) -> dict[str, Shape]:
    """Name, without prefix, and shape of every tensor of the vision encoder."""
    width, inner = vision.hidden_size, vision.intermediate_size
    merged = vision.merged_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    weights: dict[str, Shape] = {
        "patch_embed.proj": (width, *patch),
        "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision.out_hidden_size, merged),
    }
    for index in range(vision.depth):
        block = f"blocks.{index}."
        weights |= {
            block + "norm1": (width,),
            block + "norm2": (width,),
            block + "attn.qkv": (3 * width, width),
            block + "attn.proj": (width, width),
            block + "mlp.linear_fc1": (inner, width),
            block + "mlp.linear_fc2": (width, inner),
        }
    shapes: dict[str, Shape] = {"pos_embed.weight": (vision.position_side**2, width)}
    for name, shape in weights.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _check_tied(path: Path, owners: Mapping[str, SafetensorsFile], embedding: str) -> None:
    head, table = owners["lm_head.weight"], owners.get(embedding)
    if table is None:
        return  # reported as missing
    same_info = head.tensors["lm_head.weight"] == table.tensors[embedding]
    if not same_info or not (head.data("lm_head.weight") == table.data(embedding)).all():
        raise CheckpointError(
            refusal(
                path,
                f"tie_word_embeddings true and an lm_head.weight that differs from {embedding}",
                "a tied head that equals the embedding table",
                "set tie_word_embeddings to false in config.json if the head was trained apart",
            )
        )


def _check_tensors(
    path: Path, expected: Mapping[str, Shape], found: Mapping[str, TensorInfo]
) -> None:
    missing = sorted(set(expected) - set(found))
    leftover = sorted(set(found) - set(expected))
    wrong = [
        f"{name} is {found[name]}, needs {' or '.join(FLOATS)} {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and (found[name].shape != shape or found[name].dtype not in FLOATS)
    ]
    faults = [
        f"{len(names)} {kind} ({listed(names)})"
        for kind, names in (("missing", missing), ("unknown", leftover), ("unfit", wrong))
        if names
    ]
    if faults:
        raise CheckpointError(
            refusal(
                path,
                f"tensors that do not match config.json: {'; '.join(faults)}",
                f"exactly the {len(expected)} tensors of the model",
                "download config.json and the weights again, from one revision",
            )
        )


def _any_starts(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def listed(names: Iterable[str]) -> str:
    """Joins names for a message; a long list is cut and counted."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more

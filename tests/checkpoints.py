"""Copies of the tiny checkpoints for tests to take apart, and the engines made from them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from data.hash_weights import is_stored_as_f32, make_weight

from build_engine.checkpoint import text_shapes, vision_shapes
from build_engine.model_config import read_model_config
from build_engine.pack import PackedEngine, PackOptions, pack
from build_engine.weights import bf16_from_f32
from runtime.engine_directory import engine_id, hash_file

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_qwen3_5"  # vision-language layout
RATIO3 = DATA / "tiny_ratio3"  # text-only layout, tied embeddings
CREATED = "2026-01-02T03:04:05+00:00"

Tensor = tuple[str, list[int], bytes]
"""dtype as safetensors spells it, shape, data."""


def copy_checkpoint(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        if not file.name.startswith("expected"):
            shutil.copyfile(file, target / file.name)
    return target


def pictures_checkpoint(target: Path) -> Path:
    """The model that `data.record_pictures` recorded; its weights are a formula."""
    copy_checkpoint(TINY, target)
    shutil.copyfile(DATA / "pictures" / "config.json", target / "config.json")
    config = read_model_config(target / "config.json")
    assert config.vision is not None
    text = {
        name if name == "lm_head.weight" else "model.language_model." + name: shape
        for name, shape in text_shapes(config).items()
    }
    vision = {"model.visual." + name: shape for name, shape in vision_shapes(config.vision).items()}
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted((text | vision).items()):
        values = make_weight(name, shape)
        if is_stored_as_f32(name):
            tensors[name] = ("F32", list(shape), values.tobytes())
        else:
            tensors[name] = ("BF16", list(shape), bf16_from_f32(values).tobytes())
    write_tensors(target / "model.safetensors", tensors)
    return target


def pack_into(checkpoint: Path, out: Path, *, force: bool = False) -> PackedEngine:
    return pack(checkpoint, out, PackOptions(CREATED, name="tiny", force=force))


def read_tensors(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            data = raw[start + first : start + last]
            tensors[name] = (entry["dtype"], entry["shape"], data)
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def edit_tensors(checkpoint: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = read_tensors(checkpoint / "model.safetensors")
    edit(tensors)
    write_tensors(checkpoint / "model.safetensors", tensors)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_bytes())
    edit(value)
    path.write_text(json.dumps(value))


def seal(engine: Path, edit: Callable[[dict[str, Any]], object] = lambda raw: None) -> None:
    """Edits the manifest and gives it the digests that its files and content now have."""
    raw = json.loads((engine / "manifest.json").read_bytes())
    for name in raw["files"]:
        if (engine / name).is_file():
            num_bytes = (engine / name).stat().st_size
            raw["files"][name] = {"sha256": hash_file(engine / name), "bytes": num_bytes}
    edit(raw)
    raw["engine_id"] = engine_id(raw)
    (engine / "manifest.json").write_text(json.dumps(raw))


def shard(checkpoint: Path, num_shards: int = 3) -> None:
    """Spreads model.safetensors over several files with an index."""
    single = checkpoint / "model.safetensors"
    tensors = read_tensors(single)
    single.unlink()
    weight_map = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[index::num_shards])
        write_tensors(checkpoint / file, part)
        weight_map |= dict.fromkeys(part, file)
    index_file = checkpoint / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def floats(tensor: Tensor) -> np.ndarray:
    """The values of a tensor, widened to float32."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")
    return values.reshape(shape)


def assert_one_line(message: str, *parts: str) -> None:
    """A refusal says in one line what was found, what is needed and what fixes it."""
    assert message.isprintable(), message
    assert "found " in message, message
    assert "; needed " in message, message
    assert "; fix: " in message, message
    assert not message.endswith("fix: "), message
    for part in parts:
        assert part in message, (part, message)

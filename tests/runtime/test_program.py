"""A program or a weight that does not fit the engine is refused at load, whoever sealed it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, edit_tensors

from runtime import EngineError, Executor, ExecutorConfig

Json = dict[str, Any]
HUGE = 2**62


@pytest.fixture
def engine(engine_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine_dir, tmp_path / "engine"))


def refusal_of(engine: Path) -> str:
    with pytest.raises(EngineError) as caught:
        Executor(engine, ExecutorConfig(num_threads=1))
    return str(caught.value)


@pytest.mark.parametrize("value", [0, -1, HUGE, 2**64, 1.5, "7", None])
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "conv_kernel",
        "num_key_heads",
        "num_value_heads",
        "key_dim",
        "value_dim",
        "num_gdn_layers",
        "context_len",
    ],
)
def test_sizes_have_limits(engine: Path, name: str, value: object) -> None:
    edit_json(engine / "program.json", lambda raw: raw["config"].update({name: value}))
    assert "program.json: " in refusal_of(engine)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"num_heads": 3}, "num_heads is 3, expected a multiple of 2"),
        ({"num_value_heads": 3}, "num_value_heads is 3"),
        ({"head_dim": 36}, "head_dim is 36"),
        ({"rotary_dim": 128}, "rotary_dim is 128, expected at most head_dim"),
        ({"mrope_section": [9, -2, 1]}, "mrope_section is -2"),
        ({"mrope_section": [8, 8, 8]}, "sum of mrope_section is 24"),
        ({"inv_freq": [1e39] * 8}, "inv_freq is inf"),
        ({"rms_norm_eps": 1e39}, "rms_norm_eps is inf"),
        ({"context_len": 1}, "context_len is 1"),
    ],
)
def test_sizes_fit_each_other(engine: Path, config: Json, part: str) -> None:
    edit_json(engine / "program.json", lambda raw: raw["config"].update(config))
    assert part in refusal_of(engine)


def test_buffers_are_as_wide_as_their_ops_need(engine: Path) -> None:
    program = json.loads((engine / "program.json").read_text())
    for buffer in program["buffers"]:
        for width in (buffer["width"] - 1, 2 * buffer["width"], HUGE):
            changed = [b | {"width": width} if b is buffer else b for b in program["buffers"]]
            (engine / "program.json").write_text(json.dumps(program | {"buffers": changed}))
            refusal_of(engine)


def test_rows_of_tokens_and_of_logits_are_not_mixed(engine: Path) -> None:
    program = json.loads((engine / "program.json").read_text())
    for buffer in program["buffers"]:
        rows = "tokens" if buffer["rows"] == "logits" else "logits"
        changed = [b | {"rows": rows} if b is buffer else b for b in program["buffers"]]
        (engine / "program.json").write_text(json.dumps(program | {"buffers": changed}))
        assert "rows of" in refusal_of(engine)


def swap(steps: Json) -> None:
    steps["prefill"], steps["verify"] = steps["verify"], steps["prefill"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda steps: steps["verify"].pop(),  # nothing is sampled: the answer would never end
        lambda steps: steps["verify"].append(steps["verify"][-1]),
        lambda steps: steps["prefill"].clear(),
        lambda steps: steps["verify"].append(steps["commit"][0]),
        lambda steps: steps["commit"].append(steps["commit"][0]),
        lambda steps: steps["commit"].clear(),
        lambda steps: steps["prefill"].extend(list(steps["prefill"])),
        swap,
    ],
)
def test_each_step_runs_each_layer_and_samples_once(
    engine: Path, edit: Callable[[Json], object]
) -> None:
    edit_json(engine / "program.json", lambda raw: edit(raw["steps"]))
    refusal_of(engine)


@pytest.mark.parametrize("kind", ["buffers", "segments"])
def test_names_are_given_once(engine: Path, kind: str) -> None:
    edit_json(engine / "program.json", lambda raw: raw[kind].append(dict(raw[kind][0])))
    assert f"two {kind} have the name" in refusal_of(engine)


def test_an_op_of_deep_json_is_refused(engine: Path) -> None:
    program = json.loads((engine / "program.json").read_text())
    program["steps"]["commit"] = ["deep"]
    deep = '{"x": ' + "[" * 500_000 + "]" * 500_000 + "}"
    (engine / "program.json").write_text(json.dumps(program).replace('"deep"', deep))
    assert "must name one segment or one plugin" in refusal_of(engine)


@pytest.mark.parametrize("shape", [[2**32, 2**32], [-1, -64], [HUGE, 4]])
def test_a_weight_is_as_long_as_its_shape(engine: Path, shape: list[int]) -> None:
    weights = engine / "weights"
    (weights / "model.safetensors").rename(weights.parent / "model.safetensors")
    size = 2 * math.prod(shape) % 2**64
    data = b"\0" * size if size < 2**20 else b""
    edit_tensors(engine, lambda tensors: tensors.update({"embed_tokens": ("BF16", shape, data)}))
    (weights.parent / "model.safetensors").rename(weights / "model.safetensors")
    assert "tensor embed_tokens does not fit its data range" in refusal_of(engine)


def test_a_header_that_is_not_utf8_is_refused(engine: Path) -> None:
    path = engine / "weights" / "model.safetensors"
    path.write_bytes((200).to_bytes(8, "little") + b"\xff\0" * 100)
    assert "broken safetensors header" in refusal_of(engine)

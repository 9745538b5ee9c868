"""Programs fit their weights, and computing what they say gives the recorded logits."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import RATIO3, TINY, floats, pack_into, read_tensors
from reference.qwen3_5 import (
    causal_attention,
    causal_conv,
    gated_delta_rule,
    l2_norm,
    load_safetensors,
    rms_norm,
    rotate,
    sigmoid,
    silu,
    softplus,
)

from build_engine.model_config import ModelConfig, read_model_config
from build_engine.preprocessor import PREPROCESSOR_CONFIG, read_preprocessor
from build_engine.program import build_program, program_faults, rotary_frequencies
from build_engine.weights import packed_tensors
from runtime.program import Program

Json = dict[str, Any]
Array = np.ndarray


def infos(source: Path) -> dict[str, Any]:
    return {t.name: t.info for t in packed_tensors(read_model_config(source / "config.json"))}


def parse(program: Json) -> Program:
    return Program.model_validate_json(json.dumps(program))


def tiny_program() -> Json:
    config = read_model_config(TINY / "config.json")
    assert config.vision is not None
    path = TINY / PREPROCESSOR_CONFIG
    return build_program(
        config, read_preprocessor(path, json.loads(path.read_bytes()), config.vision)
    )


@pytest.fixture
def program() -> Json:
    return tiny_program()


def test_program_fits_its_weights(program: Json) -> None:
    assert program_faults(parse(program), infos(TINY)) == []
    text = build_program(read_model_config(RATIO3 / "config.json"))
    assert program_faults(parse(text), infos(RATIO3)) == []


def test_the_shape_of_the_tiny_program(program: Json) -> None:
    config = program["config"]
    assert config["num_gdn_layers"] == 2
    assert config["num_attention_layers"] == 1
    assert config["mrope_section"] == [3, 3, 2]
    assert config["inv_freq"] == [10000000 ** (-2 * j / 16) for j in range(8)]
    assert config["attention_factor"] == 1.0
    text = [b for b in program["buffers"] if b["rows"] in ("tokens", "logits")]
    assert {b["name"]: b["width"] for b in text} == {
        "hidden": 64, "delta": 64, "normed": 64, "qkvz": 384, "ba": 8, "conv": 256, "core": 128,
        "qkv": 768, "query": 256, "attended": 256, "gate_up": 256, "activated": 128,
        "sampled": 64, "logits": 512,
    }  # fmt: skip
    prefill, verify = program["steps"]["prefill"], program["steps"]["verify"]
    assert prefill[1] == {
        "plugin": "image_rows", "buffers": {"x": "hidden"}, "weights": {}, "attrs": {},
    }  # fmt: skip
    assert prefill[2] == {
        "plugin": "rms_norm",
        "buffers": {"x": "hidden", "out": "normed"},
        "weights": {"weight": "layers.0.input_norm"},
        "attrs": {"unit_offset": True},
    }
    assert prefill[3] == {
        "segment": "layers.0.in_proj_qkvz",
        "buffers": {"x": "normed", "out": "qkvz"},
    }
    assert verify[0] == prefill[0]
    assert [op.get("plugin") for op in prefill[-3:]] == ["gather_rows", None, "sample_accept"]
    assert verify[-2] == {"segment": "lm_head", "buffers": {"x": "normed", "out": "logits"}}
    assert [op["plugin"] for op in program["steps"]["commit"]] == ["commit_round"]


def test_a_tied_head_reads_the_embedding_table() -> None:
    program = build_program(read_model_config(RATIO3 / "config.json"))
    assert program["segments"][-1] == {
        "name": "lm_head", "kind": "linear", "weight": "embed_tokens", "in_dim": 96, "out_dim": 512,
    }  # fmt: skip
    assert "lm_head" not in infos(RATIO3)


def ops(program: Json, step: str, name: str) -> list[Json]:
    return [op for op in program["steps"][step] if name in (op.get("plugin"), op.get("segment"))]


def test_the_vision_step_of_the_tiny_program(program: Json) -> None:
    stages = program["steps"]["vision"]
    assert len(stages) == 1 + 2 * 2
    assert stages[0][0]["plugin"] == "patchify"
    assert [stage[-1].get("plugin") for stage in stages] == [
        "vision_position_embedding", "vision_rotary", "bias_residual", "vision_rotary", "bias",
    ]  # fmt: skip
    rows = {b["name"]: b["rows"] for b in program["buffers"]}
    assert rows["vision_hidden"] == "patches"
    assert rows["vision_inner"] == "patch_tile"
    vision = program["config"]["vision"]
    assert (vision["image_token_id"], vision["max_pixels"]) == (500, 65536)
    levels = np.array(vision["pixel_levels"], np.float32)
    rescaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    expected = (rescaled - np.float32(0.5)) / np.float32(0.5)
    np.testing.assert_array_equal(levels, np.tile(expected, (3, 1)))


def test_a_model_without_vision_has_no_vision_step() -> None:
    program = build_program(read_model_config(RATIO3 / "config.json"))
    assert "vision" not in program["config"]
    assert "vision" not in program["steps"]
    assert ops(program, "prefill", "image_rows") == []


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (
            lambda stages: stages[2].pop(3),
            "vision: vision.blocks.0.fc1 reads vision_normed before it is written",
        ),
        (
            lambda stages: stages[1][2]["buffers"].update(out="vision_delta"),
            "vision: vision_attention reads vision_query before it is written",
        ),
        (
            lambda stages: stages[0].pop(),
            "vision: weight vision.patch_bias is used 0 times, not 1",
        ),
        (
            lambda stages: stages[4][-4]["buffers"].update(x="vision_inner"),
            "vision: vision.merger.fc1 needs vision_inner 64 wide, not 96",
        ),
        (
            lambda stages: stages[1][2]["weights"].update(bias="vision.blocks.0.fc2_bias"),
            "vision: weight vision.blocks.0.fc2_bias is F32 [64], not F32 [192]",
        ),
    ],
)
def test_faults_of_the_vision_step_are_found(
    program: Json, edit: Callable[[list[list[Json]]], object], fault: str
) -> None:
    edit(program["steps"]["vision"])
    assert fault in program_faults(parse(program), infos(TINY))


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (
            lambda p: p["steps"]["prefill"].pop(3),
            "prefill: causal_conv reads qkvz before it is written",
        ),
        (
            lambda p: p["steps"]["verify"].pop(1),
            "verify: weight layers.0.input_norm is used 0 times, not 1",
        ),
        (
            lambda p: ops(p, "prefill", "rms_norm")[1]["weights"].update(weight="norm"),
            "prefill: weight norm is used 2 times, not 1",
        ),
        (
            lambda p: ops(p, "verify", "lm_head")[0]["buffers"].update(x="core"),
            "verify: lm_head needs core 64 wide, not 128",
        ),
        (
            lambda p: ops(p, "prefill", "gated_rms_norm")[0]["attrs"].update(z_offset=255),
            "prefill: gated_rms_norm needs qkvz 383 wide, not 384",
        ),
        (
            lambda p: ops(p, "prefill", "causal_conv")[1]["attrs"].update(gdn_layer=0),
            "prefill: causal_conv runs layers [0, 0], not 0 to 1",
        ),
        (
            lambda p: ops(p, "verify", "gated_delta_net_verify")[0].update(
                plugin="gated_delta_net_prefill"
            ),
            "verify: gated_delta_net_prefill belongs to another step",
        ),
        (
            lambda p: ops(p, "verify", "silu_mul")[0]["buffers"].update(out="nowhere"),
            "verify: silu_mul uses the unknown buffer nowhere",
        ),
        (
            lambda p: ops(p, "verify", "lm_head")[0].update(segment="head"),
            "verify: unknown segment head",
        ),
        (
            lambda p: p["segments"][0].update(in_dim=65),
            "prefill: layers.0.in_proj_qkvz needs normed 65 wide, not 64",
        ),
        (
            lambda p: p["segments"][0].update(out_dim=383),
            "prefill: weight layers.0.in_proj_qkvz is BF16 [384, 64], not BF16 [383, 64]",
        ),
        (lambda p: p["buffers"].append(p["buffers"][0]), "two buffers have the same name"),
        (lambda p: p["segments"].append(p["segments"][0]), "two segments have the same name"),
    ],
)
def test_faults_are_found(program: Json, edit: Callable[[Json], object], fault: str) -> None:
    edit(program)
    assert fault in program_faults(parse(program), infos(TINY))


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.update(schema_version=2),
        lambda p: p.pop("steps"),
        lambda p: p["config"].update(hidden_size=0),
        lambda p: p["config"].update(inv_freq=[1.0]),
        lambda p: p["config"].update(num_layers=4),
        lambda p: p["steps"]["commit"].append({"plugin": "unknown"}),
        lambda p: p["steps"]["verify"][0]["buffers"].clear(),
        lambda p: p["steps"]["verify"][0]["weights"].clear(),
        lambda p: p["steps"]["verify"][1]["attrs"].clear(),
        lambda p: p["steps"]["verify"][2]["buffers"].pop("out"),
        lambda p: p["steps"]["verify"][0].update(extra=1),
    ],
)
def test_schema(program: Json, edit: Callable[[Json], object]) -> None:
    parse(copy.deepcopy(program))
    edit(program)
    with pytest.raises(ValueError, match="Program"):
        parse(program)


def with_rope(tmp_path: Path, context_len: int = 262144, **values: object) -> ModelConfig:
    """A config with the rotary numbers of the published models."""
    raw = json.loads((TINY / "config.json").read_bytes())
    text = raw["text_config"]
    text |= {"head_dim": 256, "max_position_embeddings": context_len}
    text["rope_parameters"] |= {"mrope_section": [11, 11, 10], **values}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_model_config(tmp_path / "config.json")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def test_yarn_of_the_published_models(tmp_path: Path) -> None:
    config = with_rope(tmp_path, **YARN)
    got = np.array(rotary_frequencies(config.rope))
    plain = 1e7 ** (-np.arange(0, 64, 2) / 64)
    ramp = np.clip((np.arange(32) - 14) / (22 - 14), 0, 1)
    np.testing.assert_allclose(got, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-14)
    numbers = build_program(replace(config, vision=None))["config"]
    assert numbers["attention_factor"] == pytest.approx(1.138629, abs=5e-7)
    assert numbers["context_len"] == 1048576


def test_other_keys_of_yarn(tmp_path: Path) -> None:
    assert with_rope(tmp_path, 1010000, **YARN).context_len == 1010000
    assert with_rope(tmp_path, 2000000, **YARN).context_len == 1048576
    assert with_rope(tmp_path, 1010000).context_len == 1010000
    given = with_rope(tmp_path, **YARN, attention_factor=1.5, beta_fast=None)
    assert given.rope.yarn.attention_factor == 1.5
    both = with_rope(tmp_path, **YARN, mscale=1.0, mscale_all_dim=1.0)
    assert both.rope.yarn.attention_factor == 1.0
    exact = rotary_frequencies(with_rope(tmp_path, **YARN, truncate=False).rope)
    low, high = (64 * np.log(262144 / (n * 2 * np.pi)) / (2 * np.log(1e7)) for n in (32, 1))
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    plain = 1e7 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(exact, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-14)


def test_text_only_without_sections_rotates_by_time(tmp_path: Path) -> None:
    raw = json.loads((RATIO3 / "config.json").read_bytes())
    del raw["rope_parameters"]["mrope_section"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path / "config.json").rope.mrope_section == (8, 0, 0)


class Interpreter:
    """Runs the prefill step of one sequence in NumPy, from the files of an engine directory."""

    def __init__(self, engine: Path) -> None:
        program = json.loads((engine / "program.json").read_bytes())
        self.config = program["config"]
        self.segments = {s["name"]: s for s in program["segments"]}
        self.ops = program["steps"]["prefill"]
        tensors = read_tensors(engine / "weights/model.safetensors")
        self.weights = {name: floats(tensor) for name, tensor in tensors.items()}
        self.kv: dict[int, tuple[Array, Array]] = {}

    def logits(self, ids: list[int]) -> Array:
        self.ids = ids
        self.buffers: dict[str, Array] = {}
        for op in self.ops:
            inputs = {key: self.buffers.get(name) for key, name in op["buffers"].items()}
            if "segment" in op:
                weight = self.weights[self.segments[op["segment"]]["weight"]]
                out = inputs["x"] @ weight.T
            else:
                weights = {key: self.weights[name] for key, name in op["weights"].items()}
                out = getattr(self, op["plugin"])(op, **inputs | weights | op["attrs"])
            if "out" in op["buffers"]:
                self.buffers[op["buffers"]["out"]] = out
        return self.buffers["logits"]

    def embedding(self, op: Json, table: Array, **_: object) -> Array:
        return table[self.ids]

    def image_rows(self, op: Json, x: Array, **_: object) -> None:
        assert x is not None  # a prompt of text leaves its embeddings as they are

    def rms_norm(
        self,
        op: Json,
        x: Array,
        weight: Array,
        residual: Array | None = None,
        *,
        unit_offset: bool,
        **_: object,
    ) -> Array:
        if residual is not None:
            x = self.buffers[op["buffers"]["residual"]] = residual + x
        scale = 1 + weight if unit_offset else weight
        return rms_norm(x, scale, self.config["rms_norm_eps"])

    def causal_conv(self, op: Json, x: Array, weight: Array, **_: object) -> Array:
        channels, kernel = weight.shape
        return causal_conv(x[:, :channels], weight, np.zeros((kernel - 1, channels)))[0]

    def gated_delta_net_prefill(
        self, op: Json, qkv: Array, ba: Array, a_log: Array, dt_bias: Array, **_: object
    ) -> Array:
        c, n = self.config, len(qkv)
        keys = c["num_key_heads"] * c["key_dim"]
        q, k, v = np.split(qkv, [keys, 2 * keys], 1)
        q = l2_norm(q.reshape(n, -1, c["key_dim"])) * c["key_dim"] ** -0.5
        k = l2_norm(k.reshape(n, -1, c["key_dim"]))
        b, a = np.split(ba, 2, 1)
        state = np.zeros((c["num_value_heads"], c["key_dim"], c["value_dim"]))
        decay = -np.exp(a_log) * softplus(a + dt_bias)
        v = v.reshape(n, -1, c["value_dim"])
        return gated_delta_rule(q, k, v, sigmoid(b), decay, state)[0].reshape(n, -1)

    def gated_rms_norm(
        self, op: Json, x: Array, z: Array, weight: Array, z_offset: int, **_: object
    ) -> Array:
        gate = z[:, z_offset:][:, : x.shape[1]]
        heads = x.reshape(len(x), -1, len(weight))
        normed = rms_norm(heads, weight, self.config["rms_norm_eps"])
        return normed.reshape(x.shape) * silu(gate)

    def rotary_kv_write(
        self, op: Json, qkv: Array, q_norm: Array, k_norm: Array, kv_layer: int, **_: object
    ) -> Array:
        c, n, dim = self.config, len(qkv), self.config["head_dim"]
        q_width, k_width = 2 * c["num_heads"] * dim, c["num_kv_heads"] * dim
        q, k, v = np.split(qkv, [q_width, q_width + k_width], 1)
        angles = np.arange(n)[:, None] * np.array(c["inv_freq"])
        cos, sin = (f(angles) * c["attention_factor"] for f in (np.cos, np.sin))
        q = q.reshape(n, -1, 2 * dim)[..., :dim]
        q = rotate(rms_norm(q, 1 + q_norm, c["rms_norm_eps"]), cos, sin)
        k = rotate(rms_norm(k.reshape(n, -1, dim), 1 + k_norm, c["rms_norm_eps"]), cos, sin)
        self.kv[kv_layer] = (k, v.reshape(n, -1, dim))
        return q.reshape(n, -1)

    def gated_attention(self, op: Json, q: Array, qkv: Array, kv_layer: int, **_: object) -> Array:
        n, dim, heads = len(q), self.config["head_dim"], self.config["num_heads"]
        gate = qkv[:, : 2 * heads * dim].reshape(n, heads, 2 * dim)[..., dim:]
        out = causal_attention(q.reshape(n, heads, dim), *self.kv[kv_layer]) * sigmoid(gate)
        return out.reshape(n, -1)

    def silu_mul(self, op: Json, gate_up: Array, **_: object) -> Array:
        gate, up = np.split(gate_up, 2, 1)
        return silu(gate) * up

    def gather_rows(self, op: Json, x: Array, **_: object) -> Array:
        return x

    def sample_accept(self, op: Json, **_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("source", "case"),
    [(TINY, "text"), (TINY, "long"), (RATIO3, "text"), (RATIO3, "long")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_engine_computes_the_recorded_logits(source: Path, case: str, tmp_path: Path) -> None:
    pack_into(source, tmp_path / "engine")
    ids = json.loads((source / "expected.json").read_bytes())["cases"][case]["input_ids"]
    recorded = load_safetensors(source / "expected_tensors.safetensors")[f"{case}.logits"]
    got = Interpreter(tmp_path / "engine").logits(ids)
    # Both sides round at 2^-24 in every step; tests/models gives the same bound for float32.
    np.testing.assert_allclose(got[-len(recorded) :], recorded, rtol=0, atol=4e-4)

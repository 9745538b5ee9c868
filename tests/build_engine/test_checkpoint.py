"""Checkpoints that do not match their config are refused; what is dropped is known."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    RATIO3,
    TINY,
    Tensor,
    assert_one_line,
    copy_checkpoint,
    edit_json,
    edit_tensors,
    floats,
    pack_into,
    read_tensors,
    shard,
    write_tensors,
)

from build_engine.checkpoint import open_checkpoint
from build_engine.errors import CheckpointError
from build_engine.model_config import read_model_config
from build_engine.safetensors_file import ITEM_BYTES
from build_engine.tokenizer import read_text_files
from build_engine.weights import bf16_from_f32, packed_tensors, weights_chunks

LONG = "model.language_model."
UP = LONG + "layers.0.mlp.up_proj.weight"
NORM = LONG + "layers.1.input_layernorm.weight"

Tensors = dict[str, Tensor]
Json = dict[str, Any]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return copy_checkpoint(TINY, tmp_path / "tiny")


def refusal_of(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(checkpoint)
    return str(caught.value)


def read_weights(checkpoint: Path) -> bytes:
    loaded = open_checkpoint(checkpoint)
    chunks = weights_chunks(loaded, packed_tensors(loaded.config))
    return b"".join(chunk.tobytes() for chunk in chunks)


def zeros(dtype: str, *shape: int) -> Tensor:
    return dtype, list(shape), bytes(int(np.prod(shape)) * ITEM_BYTES[dtype])


def test_groups_that_the_engine_leaves_out(tiny: Path) -> None:
    dropped = open_checkpoint(tiny).dropped
    assert {group: (prefix, len(infos)) for group, (prefix, infos) in dropped.items()} == {
        "mtp": ("mtp.", 15),
    }
    assert open_checkpoint(RATIO3).dropped == {}


def test_a_group_may_be_absent_as_a_whole(tiny: Path) -> None:
    def remove(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(("model.visual.", "mtp."))]:
            del tensors[name]

    assert open_checkpoint(tiny).config.vision is not None
    edit_tensors(tiny, remove)
    assert open_checkpoint(tiny).dropped == {}
    assert open_checkpoint(tiny).config.vision is None


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (drop(UP), ("1 missing", UP)),
        (drop("lm_head.weight"), ("1 missing", "lm_head.weight")),
        (drop("mtp.fc.weight"), ("1 missing", "mtp.fc.weight")),
        (drop("model.visual.pos_embed.weight"), ("1 missing", "model.visual.pos_embed.weight")),
        (put("extra.weight", zeros("BF16", 4)), ("1 unknown", "extra.weight")),
        (put("mtp.extra", zeros("BF16", 4)), ("1 unknown", "mtp.extra")),
        (put("model.norm.weight", zeros("BF16", 64)), ("1 unknown", "model.norm.weight")),
        (put(UP, zeros("BF16", 64, 128)), (f"{UP} is BF16 [64, 128]", "[128, 64]")),
        (put(UP, zeros("F8_E4M3", 128, 64)), (f"{UP} is F8_E4M3 [128, 64]",)),
        (put(NORM, zeros("F64", 64)), (f"{NORM} is F64 [64]", "BF16 or F16 or F32")),
        (put("mtp.fc.weight", zeros("I16", 64, 128)), ("mtp.fc.weight is I16",)),
        (put(NORM, ("F32", [64], np.full(64, np.nan, "<f4").tobytes())), ("NaN", NORM)),
        (put(NORM, ("F16", [64], np.full(64, np.inf, "<f2").tobytes())), ("infinity", NORM)),
        (put(UP, ("BF16", [128, 64], b"\x80\x7f" * 8192)), ("infinity", UP)),
        (
            put(UP, ("F32", [128, 64], np.full(8192, 3.4e38, "<f4").tobytes())),
            ("too large for BF16", UP),
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tiny: Path, edit: Callable[[Tensors], object], parts: tuple[str, ...]
) -> None:
    edit_tensors(tiny, edit)
    assert_one_line(refusal_of(tiny), *parts)


def test_a_long_list_of_faults_is_cut(tiny: Path) -> None:
    edit_json(tiny / "config.json", lambda c: c["text_config"].update(intermediate_size=160))
    message = refusal_of(tiny)
    assert_one_line(message, "12 unfit", "and 4 more", "[160, 64]")


def test_every_kind_of_fault_is_named_at_once(tiny: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["stray"] = tensors.pop(UP)
        tensors[NORM] = zeros("BF16", 63)

    edit_tensors(tiny, edit)
    assert_one_line(refusal_of(tiny), f"1 missing ({UP})", "1 unknown (stray)", "1 unfit")


@pytest.mark.parametrize("source", [TINY, RATIO3], ids=["tiny", "ratio3"])
def test_shards_give_the_same_weights(source: Path, tmp_path: Path) -> None:
    sharded = copy_checkpoint(source, tmp_path / "sharded")
    shard(sharded)
    assert len(open_checkpoint(sharded).files) == 3
    assert read_weights(sharded) == read_weights(source)


def edit_index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def run(checkpoint: Path) -> None:
        index = checkpoint / "model.safetensors.index.json"
        edit_json(index, lambda value: edit(value["weight_map"]))

    return run


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            lambda path: (path / "model-00002-of-00003.safetensors").unlink(),
            ("model-00002-of-00003.safetensors missing", "all 3 files"),
        ),
        (edit_index(lambda m: m.pop(UP)), (f"{UP} in model-",)),
        (
            edit_index(lambda m: m.update(ghost="model-00001-of-00003.safetensors")),
            ("ghost not in",),
        ),
        (edit_index(lambda m: m.update({UP: "../x.safetensors"})), ("../x.safetensors",)),
        (edit_index(lambda m: m.update({UP: "pytorch_model.bin"})), ("safetensors files only",)),
        (edit_index(lambda m: m.clear()), ("no weight_map",)),
        (
            lambda path: write_tensors(path / "model.safetensors", {}),
            ("both model.safetensors and model.safetensors.index.json",),
        ),
    ],
)
def test_damaged_index(tiny: Path, edit: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    shard(tiny)
    edit(tiny)
    assert_one_line(refusal_of(tiny), *parts)


def test_pickled_weights_are_never_opened(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    assert_one_line(
        refusal_of(tiny), "pytorch_model.bin", "never opened", "safe_serialization=True"
    )


def rewrite_header(edit: Callable[[Json], object]) -> Callable[[bytes], bytes]:
    def run(raw: bytes) -> bytes:
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + raw[start:]

    return run


def with_duplicate(raw: bytes) -> bytes:
    start = 8 + int.from_bytes(raw[:8], "little")
    entry = json.dumps(json.loads(raw[8:start])[UP])
    text = f'{{"{UP}": {entry}, '.encode() + raw[9:start]
    return len(text).to_bytes(8, "little") + text + raw[start:]


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda raw: b"", "an empty file"),
        (lambda raw: raw[:7], "a file of 7 bytes"),
        (lambda raw: raw[:100], "in a file of 100 bytes"),
        (lambda raw: raw[:-1], "bytes of data where the header lists"),
        (lambda raw: raw + b"x", "bytes of data where the header lists"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (lambda raw: b"PK\x03\x04" * 20, "not safetensors"),
        (lambda raw: raw[:8] + b"!" + raw[9:], "a header that is not JSON"),
        (with_duplicate, "a name occurs twice"),
        (rewrite_header(lambda h: h[UP].update(dtype="F4")), "unknown dtype F4"),
        (rewrite_header(lambda h: h[UP].update(shape=[1])), "for BF16 [1]"),
        (rewrite_header(lambda h: h[UP].update(shape=[-1, -8192])), "a damaged header at"),
        (rewrite_header(lambda h: h[UP].pop("data_offsets")), "a damaged header at"),
        (rewrite_header(lambda h: h[UP].update(data_offsets=[2, 16386])), "is next"),
    ],
)
def test_damaged_safetensors(tiny: Path, damage: Callable[[bytes], bytes], part: str) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert_one_line(refusal_of(tiny), part)


def text_config(**values: object) -> Callable[[Json], object]:
    return lambda config: config["text_config"].update(values)


def vision_config(**values: object) -> Callable[[Json], object]:
    return lambda config: config["vision_config"].update(values)


def rope(**values: object) -> Callable[[Json], object]:
    return lambda config: config["text_config"]["rope_parameters"].update(values)


YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda c: c.update(model_type="qwen3_5_moe"), ('model_type = "qwen3_5_moe"', "not MoE")),
        (lambda c: c.update(model_type="llama"), ('model_type = "llama"',)),
        (text_config(model_type="qwen3_next"), ('text_config.model_type = "qwen3_next"',)),
        (text_config(num_experts=256), ("text_config.num_experts = 256", "dense")),
        (text_config(attn_output_gate=False), ("attn_output_gate = false",)),
        (text_config(attention_bias=True), ("attention_bias = true",)),
        (text_config(hidden_act="gelu"), ('hidden_act = "gelu"', "silu")),
        (text_config(output_gate_type="sigmoid"), ('output_gate_type = "sigmoid"', "swish")),
        (text_config(mamba_ssm_dtype="bfloat16"), ("mamba_ssm_dtype", "float32")),
        (text_config(use_sliding_window=True), ("use_sliding_window",)),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), ("unquantised",)),
        (text_config(layer_types=["linear_attention"]), ("layer_types", "3 entries")),
        (text_config(layer_types=["mamba"] * 3), ("layer_types", "full_attention")),
        (text_config(num_key_value_heads=3), ("num_key_value_heads = 3", "divisor")),
        (text_config(linear_num_value_heads=3), ("linear_num_value_heads = 3", "multiple of 2")),
        (text_config(vocab_size=None), ("vocab_size = null",)),
        (text_config(hidden_size="64"), ('hidden_size = "64"', "integer")),
        (text_config(rms_norm_eps=0), ("rms_norm_eps = 0",)),
        (text_config(tie_word_embeddings=True), ("tie_word_embeddings = true",)),
        (text_config(eos_token_id=-1), ("eos_token_id = -1",)),
        (lambda c: c["text_config"].pop("head_dim"), ("head_dim = nothing",)),
        (lambda c: c["vision_config"].update(out_hidden_size=65), ("out_hidden_size = 65",)),
        (lambda c: c["vision_config"].pop("depth"), ("vision_config.depth",)),
        (vision_config(num_heads=5), ("vision_config.num_heads = 5", "hidden_size = 64")),
        (vision_config(hidden_act="gelu"), ('vision_config.hidden_act = "gelu"',)),
        (vision_config(in_channels=4), ("vision_config.in_channels = 4", "RGB")),
        (vision_config(deepstack_visual_indexes=[1]), ("deepstack_visual_indexes",)),
        (vision_config(num_position_embeddings=35), ("num_position_embeddings", "square")),
        (lambda c: c.update(image_token_id=512), ("image_token_id = 512", "below vocab_size")),
        (rope(rope_type="longrope"), ('rope_parameters.rope_type = "longrope"', "yarn")),
        (rope(mrope_interleaved=False), ("mrope_interleaved = false",)),
        (rope(mrope_section=[3, 3, 3]), ("mrope_section", "sum to 8")),
        (rope(mrope_section=None), ("mrope_section",)),
        (rope(partial_rotary_factor=0.28), ("partial_rotary_factor = 0.28", "an even part of")),
        (rope(partial_rotary_factor=2), ("partial_rotary_factor = 2",)),
        (lambda c: c["text_config"]["rope_parameters"].pop("rope_theta"), ("rope_theta",)),
        (rope(rope_type="yarn"), ("factor = nothing",)),
        (rope(**(YARN | {"factor": 0.5})), ("factor = 0.5", "at least 1")),
        (rope(rope_type="yarn", factor=4), ("original_max_position_embeddings",)),
        (rope(**YARN, temperature=2), ("temperature = 2", "only the keys")),
        (rope(**(YARN | {"factor": 1e308})), ("max_position_embeddings", "at most 2147483647")),
        (rope(**(YARN | {"factor": 10**400})), ("factor = 1000",)),
        (text_config(max_position_embeddings=2**64), ("max_position_embeddings = 1844",)),
        (text_config(num_hidden_layers=2**31 - 1, layer_types=None), ("at most 4096",)),
        (lambda c: c["vision_config"].update(depth=2**62), ("vision_config.depth", "4096")),
    ],
)
def test_models_that_would_be_computed_wrongly(
    tiny: Path, edit: Callable[[Json], object], parts: tuple[str, ...]
) -> None:
    edit_json(tiny / "config.json", edit)
    assert_one_line(refusal_of(tiny), *parts)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"{", "no JSON"), (b"[1]", "JSON of type list"), (b'{"a": NaN}', "NaN"), (b"\xff", "no JSON"),
     (b'{"model_type": "\\ud800"}', "no JSON")],
)  # fmt: skip
def test_broken_config(tiny: Path, content: bytes, part: str) -> None:
    (tiny / "config.json").write_bytes(content)
    assert_one_line(refusal_of(tiny), part, "config.json")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_pipes_are_not_read(tiny: Path, tmp_path: Path, file: str) -> None:
    (tiny / file).unlink()
    os.mkfifo(tiny / file)
    with pytest.raises(CheckpointError) as caught:
        pack_into(tiny, tmp_path / "out")
    assert_one_line(str(caught.value), "a pipe, a socket or a device", file)


def test_what_is_not_a_checkpoint(tmp_path: Path, tiny: Path) -> None:
    assert_one_line(refusal_of(tmp_path / "none"), "found nothing")
    assert_one_line(refusal_of(tiny / "config.json"), "found a file")
    (tiny / "hf_quant_config.json").write_text("{}")
    assert_one_line(refusal_of(tiny), "hf_quant_config.json", "BF16")
    (tiny / "hf_quant_config.json").unlink()
    (tiny / "model.safetensors").unlink()
    assert_one_line(refusal_of(tiny), "no weights")
    (tiny / "config.json").unlink()
    assert_one_line(refusal_of(tiny), "config.json: found nothing")


def test_other_spellings_of_the_config(tmp_path: Path) -> None:
    reference = read_model_config(RATIO3 / "config.json")
    raw = json.loads((RATIO3 / "config.json").read_bytes())
    nested = raw.pop("rope_parameters")
    file = tmp_path / "config.json"
    for changed in (raw | nested, raw | {"rope_scaling": nested}):
        file.write_text(json.dumps(changed))
        assert read_model_config(file).rope == reference.rope
    raw = json.loads((TINY / "config.json").read_bytes())
    del raw["text_config"]["layer_types"]
    file.write_text(json.dumps(raw))
    layer_types = read_model_config(file).layer_types
    assert layer_types == ("linear_attention", "linear_attention", "full_attention")


def test_a_tied_head_may_be_stored_if_it_is_the_table(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(RATIO3, tmp_path / "tied")
    edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "left out" in open_checkpoint(checkpoint).notes[0]

    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])

    edit_tensors(checkpoint, change)
    assert_one_line(refusal_of(checkpoint), "differs from model.embed_tokens.weight")


def vision_layout(depth: int, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's part; no matrix is fused, and the patch kernel keeps both frames."""
    kernel = stored["visual.patch_embed.proj.weight"]
    want = {
        "vision.patch_embed": kernel.reshape(len(kernel), -1),
        "vision.patch_bias": stored["visual.patch_embed.proj.bias"],
        "vision.positions": stored["visual.pos_embed.weight"],
    }
    names = {"merger.norm": "merger.norm", "merger.fc1": "merger.linear_fc1",
             "merger.fc2": "merger.linear_fc2"}  # fmt: skip
    for index in range(depth):
        names |= {
            f"blocks.{index}.{ours}": f"blocks.{index}.{theirs}"
            for ours, theirs in (
                ("norm1", "norm1"), ("qkv", "attn.qkv"), ("proj", "attn.proj"), ("norm2", "norm2"),
                ("fc1", "mlp.linear_fc1"), ("fc2", "mlp.linear_fc2"),
            )
        }  # fmt: skip
    for ours, theirs in names.items():
        want[f"vision.{ours}"] = stored[f"visual.{theirs}.weight"]
        want[f"vision.{ours}_bias"] = stored[f"visual.{theirs}.bias"]
    return want


@pytest.mark.parametrize("source", [TINY, RATIO3], ids=["tiny", "ratio3"])
def test_packed_weights_hold_the_checkpoint(source: Path, tmp_path: Path) -> None:
    """The fused layout, spelled out here once more from the names of the checkpoint."""
    pack_into(source, tmp_path / "out")
    packed = read_tensors(tmp_path / "out/weights/model.safetensors")
    stored = {
        re.sub(r"^model\.(language_model\.)?", "", name): floats(tensor)
        for name, tensor in read_tensors(source / "model.safetensors").items()
    }
    config = read_model_config(source / "config.json")
    want = {"embed_tokens": stored["embed_tokens.weight"], "norm": stored["norm.weight"]}
    if not config.tied:
        want["lm_head"] = stored["lm_head.weight"]
    for index, kind in enumerate(config.layer_types):
        layer = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in stored.items()
            if name.startswith(f"layers.{index}.")
        }
        mixed = {
            "input_norm": layer["input_layernorm.weight"],
            "post_norm": layer["post_attention_layernorm.weight"],
            "gate_up_proj": np.vstack([layer[f"mlp.{p}_proj.weight"] for p in ("gate", "up")]),
            "down_proj": layer["mlp.down_proj.weight"],
        }
        if kind == "linear_attention":
            gdn = {k.removeprefix("linear_attn."): v for k, v in layer.items()}
            mixed |= {
                "in_proj_qkvz": np.vstack([gdn["in_proj_qkv.weight"], gdn["in_proj_z.weight"]]),
                "in_proj_ba": np.vstack([gdn["in_proj_b.weight"], gdn["in_proj_a.weight"]]),
                "conv": gdn["conv1d.weight"][:, 0],
                "a_log": gdn["A_log"],
                "dt_bias": gdn["dt_bias"],
                "out_norm": gdn["norm.weight"],
                "out_proj": gdn["out_proj.weight"],
            }
        else:
            mixed |= {
                "qkv_proj": np.vstack([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]),
                "q_norm": layer["self_attn.q_norm.weight"],
                "k_norm": layer["self_attn.k_norm.weight"],
                "o_proj": layer["self_attn.o_proj.weight"],
            }
        want |= {f"layers.{index}.{name}": value for name, value in mixed.items()}
    if config.vision is not None:
        want |= vision_layout(config.vision.depth, stored)
    assert set(packed) == set(want)
    for name, value in want.items():
        matrix = value.ndim == 2 and not name.endswith(".conv")
        assert packed[name][0] == ("BF16" if matrix else "F32"), name
        np.testing.assert_array_equal(floats(packed[name]), value, err_msg=name)


def test_the_safetensors_library_reads_the_weights(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    pack_into(TINY, tmp_path / "out")
    raw = (tmp_path / "out/weights/model.safetensors").read_bytes()
    ours = read_tensors(tmp_path / "out/weights/model.safetensors")
    theirs = dict(safetensors.deserialize(raw))
    assert set(theirs) == set(ours)
    assert all(bytes(theirs[name]["data"]) == ours[name][2] for name in ours)
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 64 == 0


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_wider_matrices_are_rounded_and_reported(tiny: Path, tmp_path: Path, dtype: str) -> None:
    values = (
        np.random.default_rng(5).normal(size=(128, 64)).astype("<f4" if dtype == "F32" else "<f2")
    )
    edit_tensors(tiny, put(UP, (dtype, [128, 64], values.tobytes())))
    engine = pack_into(tiny, tmp_path / "out")
    assert engine.notes == (f"1 {dtype} matrices were rounded to BF16 (to nearest, ties to even)",)
    packed = read_tensors(tmp_path / "out/weights/model.safetensors")
    got = floats(packed["layers.0.gate_up_proj"])[128:].astype(np.float64)
    exact = values.astype(np.float64)
    assert np.all(np.abs(got - exact) <= np.abs(exact) * 2.0**-8)


def test_rounding_is_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0, 1])
    rounded = bf16_from_f32(bits.astype(np.uint32).view(np.float32))
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80, 0, 0]
    assert rounded.tolist() == want


def set_eos(token: object) -> Callable[[Json], object]:
    return lambda tokenizer_config: tokenizer_config.update({"eos_token": token})


class TestTextFiles:
    def refusal_of(self, checkpoint: Path) -> str:
        config = read_model_config(checkpoint / "config.json")
        with pytest.raises(CheckpointError) as caught:
            read_text_files(checkpoint, config)
        return str(caught.value)

    def generation(self, checkpoint: Path) -> Json:
        config = read_model_config(checkpoint / "config.json")
        return read_text_files(checkpoint, config).generation

    def test_end_ids_are_the_union(self, tiny: Path) -> None:
        assert self.generation(tiny)["end_ids"] == [504]
        assert self.generation(RATIO3)["end_ids"] == [507, 504]
        # as the published models have it: generation config, tokenizer and config disagree
        edit_json(tiny / "generation_config.json", lambda g: g.update(eos_token_id=[507, 504]))
        edit_json(tiny / "tokenizer_config.json", set_eos("<|im_end|>"))
        assert self.generation(tiny)["end_ids"] == [507, 504]
        (tiny / "generation_config.json").unlink()
        assert self.generation(tiny)["end_ids"] == [507, 504]
        edit_json(tiny / "tokenizer_config.json", set_eos({"content": "<|pad|>"}))
        assert self.generation(tiny)["end_ids"] == [505, 504]

    def test_page_instruction(self, tiny: Path) -> None:
        assert self.generation(tiny)["page_instruction"] is None
        edit_json(tiny / "generation_config.json", lambda g: g.update(page_instruction=""))
        assert self.generation(tiny)["page_instruction"] == ""

    def test_sampling_defaults(self, tiny: Path) -> None:
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        assert self.generation(tiny)["sampling"] == greedy
        sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
        edit_json(tiny / "generation_config.json", lambda g: g.update(sampled))
        sampling = self.generation(tiny)["sampling"]
        assert sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}

    @pytest.mark.parametrize(
        ("file", "edit", "part"),
        [
            ("generation_config.json", lambda g: g.update(eos_token_id=512), "the end id 512"),
            ("generation_config.json", lambda g: g.update(eos_token_id=["x"]), 'the end id "x"'),
            ("generation_config.json", lambda g: g.update(eos_token_id=[[]]), "the end id []"),
            ("tokenizer_config.json", set_eos([]), "the eos_token []"),
            (
                "generation_config.json",
                lambda g: g.update(eos_token_id=list(range(9))),
                "10 end ids",
            ),
            (
                "generation_config.json",
                lambda g: g.update(do_sample=True, top_p=1.5),
                "top_p = 1.5",
            ),
            (
                "generation_config.json",
                lambda g: g.update(page_instruction=["Read it."]),
                'page_instruction = ["Read it."]',
            ),
            ("tokenizer_config.json", set_eos("<none>"), '"<none>"'),
            ("tokenizer.json", lambda t: t["model"].update(type="Other"), "does not load"),
            ("tokenizer.json", lambda t: t.update(decoder={"type": "Fuse"}), "ByteLevel"),
            ("config.json", text_config(vocab_size=501), "do not fit 501 rows"),
            ("preprocessor_config.json", lambda p: p.pop("patch_size"), "no patch_size"),
            ("preprocessor_config.json", lambda p: p.pop("size"), "no size"),
            ("preprocessor_config.json", lambda p: p.update(patch_size=14), "patch_size = 14"),
            ("preprocessor_config.json", lambda p: p.update(do_resize=False), "do_resize = False"),
            ("preprocessor_config.json", lambda p: p.update(resample=2), "resample = 2"),
            ("preprocessor_config.json", lambda p: p.update(image_std=[0, 1, 1]), "image_std"),
            ("preprocessor_config.json", lambda p: p.update(max_pixels=1), "sizes"),
        ],
    )
    def test_files_that_do_not_fit(
        self, tiny: Path, file: str, edit: Callable[[Json], object], part: str
    ) -> None:
        edit_json(tiny / file, edit)
        assert_one_line(self.refusal_of(tiny), part)

    @pytest.mark.parametrize("file", ["tokenizer.json", "preprocessor_config.json"])
    def test_missing_files(self, tiny: Path, file: str) -> None:
        (tiny / file).unlink()
        assert_one_line(self.refusal_of(tiny), f"{file}: found nothing", "download")

    def test_where_the_chat_template_comes_from(self, tiny: Path) -> None:
        def template() -> str | None:
            config = read_model_config(tiny / "config.json")
            return read_text_files(tiny, config).chat_template

        original = (tiny / "chat_template.jinja").read_text()
        config_file = tiny / "tokenizer_config.json"
        edit_json(config_file, lambda t: t.update(chat_template="from the config"))
        assert template() == original
        (tiny / "chat_template.jinja").unlink()
        assert template() == "from the config"
        named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
        edit_json(config_file, lambda t: t.update(chat_template=named))
        assert template() == "d"
        edit_json(config_file, lambda t: t.pop("chat_template"))
        assert template() is None
        (tiny / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match="not UTF-8"):
            template()

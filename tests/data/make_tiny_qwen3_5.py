"""Makes the tiny qwen3_5 checkpoints of this folder and records what transformers computes.

    PYTHONPATH=tests python -m data.make_tiny_qwen3_5 tiny_qwen3_5 [--out DIR]
    PYTHONPATH=tests python -m data.make_tiny_qwen3_5 tiny_ratio3 [--out DIR] [--search]

Needs transformers 5.14.1, torch 2.13.0 and Pillow 13.0.0, but only when run; `hash_weights` says
what the weights are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from data.hash_weights import is_stored_as_f32, make_weight

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

log = logging.getLogger("make_tiny_qwen3_5")

JsonDict = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

IMAGE, VIDEO, VISION_START, VISION_END = 500, 501, 502, 503
EOS, PAD, IM_END = 504, 505, 507
NUM_PROMPT_IDS = 490  # prompts take their ids from here; 500 and up are special
LONG_PROMPT, KEPT_ROWS = 128, 40  # of a prompt this long, only the last rows of logits are kept

# 2 GDN layers and 1 attention layer, a vision tower, an MTP head; untied embeddings; HV / HK = 2.
TINY_QWEN3_5: JsonDict = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "full_attention_interval": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 36,
        "out_hidden_size": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}

# A text-only export: flat config, short tensor names, tied embeddings; HV / HK = 3, DK != DV, a
# layer order that no full_attention_interval gives, other head counts and share of rotary dims.
TINY_RATIO3: JsonDict = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "dtype": "bfloat16",
}

PREPROCESSOR: JsonDict = {
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def quadratic_ids(num_ids: int, *coefficients: int) -> list[int]:
    a, b, c = coefficients
    return [(a * i * i + b * i + c) % NUM_PROMPT_IDS for i in range(num_ids)]


def image_ids(num_merged: int) -> list[int]:
    return [VISION_START, *[IMAGE] * num_merged, VISION_END]


@dataclass(frozen=True)
class Case:
    """One prompt, and its images as (width, height, number) of `make_image`."""

    ids: list[int]
    images: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Fixture:
    """What one checkpoint folder holds, besides its weights."""

    config: JsonDict
    generation_config: JsonDict
    preprocessor_config: JsonDict | None
    cases: dict[str, Case]
    num_steps: int
    hidden_cases: tuple[str, ...]  # their hidden states are recorded too


# The last id of each prompt is chosen so that no greedy step is a near tie (`min_top1_gap`).
FIXTURES = {
    "tiny_qwen3_5": Fixture(
        config=TINY_QWEN3_5,
        generation_config={"eos_token_id": [EOS], "pad_token_id": PAD},
        preprocessor_config=PREPROCESSOR,
        cases={
            "text": Case([1, 17, 23, 301, 44, 129, 7, 411, 88, 256, 104]),
            "long": Case(quadratic_ids(150, 37, 11, 29)),  # crosses two borders of 64-token chunks
            "image": Case([5, 9, *image_ids(15), 33, 77, 206], ((160, 96, 0),)),
            "two_images": Case(
                [5, *image_ids(15), 33, 8, *image_ids(8), 77, 60, 114],
                ((160, 96, 0), (64, 128, 1)),
            ),
        },
        num_steps=16,
        hidden_cases=("text", "image"),
    ),
    "tiny_ratio3": Fixture(
        config=TINY_RATIO3,
        generation_config={"eos_token_id": [IM_END, EOS], "pad_token_id": PAD},
        preprocessor_config=None,
        cases={
            "text": Case([*quadratic_ids(10, 31, 7, 3), 373]),
            "medium": Case([*quadratic_ids(69, 29, 13, 17), 285]),  # crosses one chunk border
            "long": Case([*quadratic_ids(149, 37, 11, 29), 174]),
        },
        num_steps=24,
        hidden_cases=("text",),
    ),
}


# ---- weights -------------------------------------------------------------------------------------


def mtp_shapes(text: JsonDict) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP head, which the transformers classes do not have."""
    if not text["mtp_num_hidden_layers"]:
        return {}
    hidden, inner, head_dim = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    q_rows = text["num_attention_heads"] * head_dim
    kv_rows = text["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (2 * q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    head = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
    }
    head |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    return {f"mtp.{name}.weight": shape for name, shape in head.items()}


def make_weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    import torch

    weights = {}
    for name in sorted(shapes):
        dtype = torch.float32 if is_stored_as_f32(name) else torch.bfloat16
        weights[name] = torch.from_numpy(make_weight(name, shapes[name])).to(dtype).contiguous()
    return weights


# ---- inputs --------------------------------------------------------------------------------------


def make_image(width: int, height: int, number: int) -> NDArray[np.uint8]:
    """Returns an RGB image [height, width, 3] that is a formula of its coordinates."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    red = (3 * x + 5 * y + 40 * number) % 256
    green = ((7 * x) ^ (11 * y + 13 * number)) & 255
    blue = (x * y + 31 * number) % 256
    return np.stack([red, green, blue], -1).astype(np.uint8)


def preprocess(*images: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pixel_values [num_patches, 1536] and grid_thw [num_images, 3]."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {k: v for k, v in PREPROCESSOR.items() if not k.endswith(("class", "type"))}
    processor = Qwen2VLImageProcessorPil(**settings)
    out = processor(images=[make_image(*image) for image in images], return_tensors="pt")
    return out["pixel_values"].float(), out["image_grid_thw"]


# ---- recording -----------------------------------------------------------------------------------


def checksums(values: torch.Tensor) -> JsonDict:
    """Returns sums that one wrong, swapped or missing element changes."""
    import torch

    v = values.detach().double().flatten()
    ramp = (torch.arange(v.numel()) % 17 - 8).double()
    top = torch.topk(v, 5)
    return {
        "n": v.numel(),
        "sum": float(v.sum()),
        "abs_sum": float(v.abs().sum()),
        "l2": float(v.norm()),
        "weighted": float((v * ramp).sum()),
        "first4": [float(x) for x in v[:4]],
        "top5_ids": top.indices.tolist(),
        "top5": [float(x) for x in top.values],
    }


def without_top_ids(sums: JsonDict) -> JsonDict:
    return {k: v for k, v in sums.items() if k != "top5_ids"}


def top1_gap(scores: torch.Tensor) -> list[float]:
    top = scores.float().topk(2, dim=-1).values
    return (top[..., 0] - top[..., 1]).tolist()


class Recorder:
    """A checkpoint folder opened with transformers, in one dtype."""

    def __init__(self, fixture: Fixture, folder: Path, dtype: torch.dtype) -> None:
        self.num_steps = fixture.num_steps
        self.model = model_class(fixture.config).from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        self.model.eval()

    def image_inputs(self, case: Case, ids: torch.Tensor) -> JsonDict:
        if not case.images:
            return {}
        pixels, grid = preprocess(*case.images)
        kinds = (ids == IMAGE).int()
        return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}

    def forget_rope_delta(self) -> None:
        """Undoes an image request: transformers 5.14.1 would apply its delta to the next one."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None

    def forward(self, case: Case, ids: Sequence[int], **options: bool) -> Any:  # noqa: ANN401
        import torch

        self.forget_rope_delta()
        x = torch.tensor([ids])
        mask, images = torch.ones_like(x), self.image_inputs(case, x)
        return self.model(input_ids=x, attention_mask=mask, use_cache=False, **images, **options)

    def generate(self, case: Case) -> tuple[list[int], torch.Tensor]:
        """Returns the greedy ids and their logits [num_steps, vocab]; row 0 ends the prompt."""
        ids, scores = self.generate_batch([case.ids], case)
        return ids[0].tolist(), scores[:, 0].contiguous()

    def generate_batch(
        self, prompts: list[list[int]], case: Case
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        self.forget_rope_delta()
        x = torch.tensor(prompts)
        out = self.model.generate(
            input_ids=x,
            attention_mask=torch.ones_like(x),
            do_sample=False,
            max_new_tokens=self.num_steps,
            eos_token_id=None,
            pad_token_id=PAD,
            use_cache=True,
            output_scores=True,
            return_dict_in_generate=True,
            **self.image_inputs(case, x),
        )
        return out.sequences[:, x.shape[1] :], torch.stack([s.float() for s in out.scores])

    def generate_without_cache(self, case: Case) -> list[int]:
        ids = list(case.ids)
        for _ in range(self.num_steps):
            ids.append(int(self.forward(case, ids).logits[0, -1].argmax()))
        return ids[len(case.ids) :]

    def record(self, case: Case) -> tuple[JsonDict, torch.Tensor, Any]:
        """Returns the entry for expected.json, the decode logits, and the prompt's forward pass."""
        prompt = self.forward(case, case.ids, output_hidden_states=True)
        greedy, scores = self.generate(case)
        gaps = top1_gap(scores)
        entry = {
            "decode_logits": checksums(scores),
            "greedy": greedy,
            "greedy_no_cache": self.generate_without_cache(case),
            "min_top1_gap": min(gaps),
            "gaps": [round(gap, 5) for gap in gaps],
            "last_logits": checksums(prompt.logits[0, -1]),
            "all_logits": checksums(prompt.logits[0]),
        }
        return entry, scores, prompt


def model_class(config: JsonDict) -> Any:  # noqa: ANN401
    import transformers

    return getattr(transformers, config["architectures"][0])


def write_json(path: Path, value: JsonDict, indent: int = 2) -> None:
    path.write_text(json.dumps(value, indent=indent))


def write_checkpoint(fixture: Fixture, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import save_file

    cls = model_class(fixture.config)
    model = cls(cls.config_class(**json.loads(json.dumps(fixture.config))))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if fixture.config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    shapes |= mtp_shapes(fixture.config.get("text_config", fixture.config))
    weights = make_weights(shapes)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", fixture.config)
    write_json(folder / "generation_config.json", fixture.generation_config)
    if fixture.preprocessor_config:
        write_json(folder / "preprocessor_config.json", fixture.preprocessor_config)
    return weights


def record_image_inputs(recorder: Recorder, case: Case) -> JsonDict:
    import torch

    ids = torch.tensor([case.ids])
    inputs = recorder.image_inputs(case, ids)
    grid = inputs["image_grid_thw"]
    positions, delta = recorder.model.model.get_rope_index(
        ids, inputs["mm_token_type_ids"], image_grid_thw=grid
    )
    return {
        "image_grid_thw": grid.tolist(),
        "rope_delta": int(delta[0, 0]),
        "position_ids_thw": positions[:, 0].tolist(),
    }


def record_vision(recorder: Recorder, case: Case) -> tuple[JsonDict, dict[str, torch.Tensor]]:
    import torch

    pixels, grid = preprocess(*case.images)
    vision = recorder.model.model.visual(pixels, grid_thw=grid, output_hidden_states=True)
    entry = {
        "pixel_values": {"shape": list(pixels.shape), **without_top_ids(checksums(pixels))},
        "vision_merged": checksums(vision.pooler_output),
    }
    tensors = {
        "pixel_values.bf16": pixels.to(torch.bfloat16).contiguous(),
        "vision.last_hidden": vision.last_hidden_state.float().contiguous(),
        "vision.merged": vision.pooler_output.float().contiguous(),
    }
    return entry, tensors


def record_mtp(
    recorder: Recorder, weights: dict[str, torch.Tensor], prompt_ids: list[int]
) -> JsonDict:
    """Runs the MTP head on transformers' decoder layer; transformers itself drops `mtp.*`."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    config = recorder.model.config.text_config
    prefix = "mtp.layers.0."
    attention_index = config.layer_types.index("full_attention")
    layer = Qwen3_5DecoderLayer(config, layer_idx=attention_index).float().eval()
    layer.load_state_dict(
        {k.removeprefix(prefix): v.float() for k, v in weights.items() if k.startswith(prefix)}
    )

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        module.weight.copy_(weights[f"mtp.{name}.weight"].float())
        return module(x)

    language_model, lm_head = recorder.model.model.language_model, recorder.model.lm_head
    recorder.forget_rope_delta()
    ids = torch.tensor([prompt_ids])
    hidden = language_model(
        input_ids=ids, use_cache=False
    ).last_hidden_state  # after the final norm
    first_token = int(lm_head(hidden)[0, -1].argmax())
    next_ids = torch.tensor([[*prompt_ids[1:], first_token]])  # position i is given token i + 1
    embedded = norm("pre_fc_norm_embedding", language_model.embed_tokens(next_ids))
    x = torch.cat([embedded, norm("pre_fc_norm_hidden", hidden)], -1)
    x = x @ weights["mtp.fc.weight"].float().T
    num_tokens = x.shape[1]
    positions = torch.arange(num_tokens).view(1, 1, -1).expand(3, 1, -1)
    mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
    rotary = language_model.rotary_emb(x, positions)
    x = layer(x, position_embeddings=rotary, attention_mask=mask)
    logits = lm_head(norm("norm", x))[0, -1]
    return {
        "first_token": first_token,
        "draft_token": int(logits.argmax()),
        "last_logits": checksums(logits),
    }


def record_resize() -> JsonDict:
    """Runs the preprocessing alone, with a real bicubic resize (150 x 97 to 160 x 96)."""
    pixels, grid = preprocess((150, 97, 2))
    sums = without_top_ids(checksums(pixels))
    return {"input_wh": [150, 97], "grid": grid.tolist(), "pixel_values": sums}


def record(fixture: Fixture, folder: Path) -> None:
    """Writes the checkpoint, then what the published way of loading it computes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    weights = write_checkpoint(fixture, folder)
    checkpoint = (folder / "model.safetensors").read_bytes()
    expected: JsonDict = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "sha256": hashlib.sha256(checkpoint).hexdigest(),
        "bytes": len(checkpoint),
        "cases": {},
    }
    log.info("%d tensors, %d bytes, sha256 %s", len(weights), len(checkpoint), expected["sha256"])
    f32 = Recorder(fixture, folder, torch.float32)
    bf16 = Recorder(fixture, folder, torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, case in fixture.cases.items():
        entry: JsonDict = {"input_ids": case.ids}
        if case.images:
            entry |= record_image_inputs(f32, case)
        entry["fp32"], scores, prompt = f32.record(case)
        first_row = -KEPT_ROWS if len(case.ids) >= LONG_PROMPT else 0
        tensors[f"{name}.logits"] = prompt.logits[0, first_row:].float().contiguous()
        tensors[f"{name}.decode_logits"] = scores
        if name in fixture.hidden_cases:
            for i, hidden in enumerate(prompt.hidden_states):
                tensors[f"{name}.hidden.{i}"] = hidden[0].float().contiguous()
            if case.images:
                sums, vision = record_vision(f32, case)
                entry |= sums
                tensors |= {f"{name}.{k}": v for k, v in vision.items()}
        entry["bf16"], _, _ = bf16.record(case)
        expected["cases"][name] = entry
        log.info(
            "%s: %d ids, smallest gap %.3f, same without cache %s, same in bf16 %s",
            name,
            len(case.ids),
            entry["fp32"]["min_top1_gap"],
            entry["fp32"]["greedy"] == entry["fp32"]["greedy_no_cache"],
            entry["fp32"]["greedy"] == entry["bf16"]["greedy"],
        )
    if fixture.preprocessor_config:
        expected["resize_case"] = record_resize()
    if any(name.startswith("mtp.") for name in weights):
        expected["mtp"] = record_mtp(f32, weights, fixture.cases["text"].ids)
    write_json(folder / "expected.json", expected, indent=1)
    save_file(tensors, folder / "expected_tensors.safetensors")


def search(fixture: Fixture, folder: Path) -> None:
    """Logs, for each text prompt, the last ids whose greedy steps are farthest from a tie."""
    import torch

    write_checkpoint(fixture, folder)
    f32 = Recorder(fixture, folder, torch.float32)
    bf16 = Recorder(fixture, folder, torch.bfloat16)
    for name, case in fixture.cases.items():
        found = []
        for start in range(0, NUM_PROMPT_IDS, 49):
            prompts = [[*case.ids[:-1], last] for last in range(start, start + 49)]
            ids, scores = f32.generate_batch(prompts, case)
            smallest = np.array(top1_gap(scores)).min(0)
            special = (ids >= IMAGE).any(1).tolist()
            found += [(smallest[i], start + i) for i in range(49) if not special[i]]
        for gap, last in sorted(found, reverse=True)[:8]:
            with_last = Case([*case.ids[:-1], last])
            agree = f32.generate(with_last)[0] == bf16.generate(with_last)[0]
            log.info("%s: last id %d, smallest gap %.4f, same in bf16 %s", name, last, gap, agree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixture", choices=sorted(FIXTURES))
    parser.add_argument("--out", type=Path, help="folder to write, this folder's by default")
    parser.add_argument("--search", action="store_true", help="look for prompts, record nothing")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["HF_HUB_OFFLINE"] = "1"

    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    folder = args.out or Path(__file__).parent / args.fixture
    folder.mkdir(parents=True, exist_ok=True)
    (search if args.search else record)(FIXTURES[args.fixture], folder)


if __name__ == "__main__":
    main()

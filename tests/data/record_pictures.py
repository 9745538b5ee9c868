"""Records what transformers makes of pictures of several shapes, with a model of its own.

    PYTHONPATH=tests python -m data.record_pictures

Writes `pictures/config.json` and `pictures/expected.safetensors`, all of it F32. The weights are
those of `hash_weights`, so nobody keeps them: `pictures_checkpoint` of the tests makes them again.
Needs what `make_tiny_qwen3_5` needs.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.make_tiny_qwen3_5 import (
    FIXTURES,
    PREPROCESSOR,
    TINY_QWEN3_5,
    Case,
    Fixture,
    Recorder,
    image_ids,
    preprocess,
    write_checkpoint,
)

FOLDER = Path(__file__).parent / "pictures"
NUM_STEPS = 6

# Heads of 72 as in the largest published encoders, another table and depth than the tiny model's.
CONFIG: dict[str, Any] = copy.deepcopy(TINY_QWEN3_5)
CONFIG["vision_config"] |= {
    "depth": 3,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 272,
    "num_position_embeddings": 64,
}
CONFIG["text_config"] |= {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 0,
}


@dataclass(frozen=True)
class Shape:
    """A picture as (width, height, number) of `make_image`."""

    width: int
    height: int
    number: int

    @property
    def as_image(self) -> tuple[int, int, int]:
        return self.width, self.height, self.number

    @property
    def num_tokens(self) -> int:
        return (self.width // 32) * (self.height // 32)


# Sizes that need no resampling: between 4,096 and 65,536 pixels.
PICTURES = {
    "square": (Shape(96, 96, 2),),
    "wide": (Shape(512, 32, 3),),
    "tall": (Shape(32, 512, 4),),
    "large": (Shape(256, 192, 5),),
    "three": (Shape(64, 96, 6), Shape(256, 64, 7), Shape(64, 64, 8)),
}


def prompt(shapes: tuple[Shape, ...]) -> list[int]:
    ids = [11, 42]
    for shape in shapes:
        ids += [*image_ids(shape.num_tokens), 30 + shape.number, 77]
    return [*ids, 205]


def main() -> None:
    """Records every case in fp32."""
    import torch
    from safetensors.torch import save_file

    fixture = Fixture(
        config=CONFIG,
        generation_config=FIXTURES["tiny_qwen3_5"].generation_config,
        preprocessor_config=PREPROCESSOR,
        cases={
            name: Case(prompt(shapes), tuple(shape.as_image for shape in shapes))
            for name, shapes in PICTURES.items()
        },
        num_steps=NUM_STEPS,
        hidden_cases=(),
    )
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        write_checkpoint(fixture, Path(folder))
        recorder = Recorder(fixture, Path(folder), torch.float32)
        for name, case in fixture.cases.items():
            ids = torch.tensor([case.ids])
            pixels, grid = preprocess(*case.images)
            merged = recorder.model.model.visual(pixels, grid_thw=grid).pooler_output
            kinds = (ids == CONFIG["image_token_id"]).int()
            positions, delta = recorder.model.model.get_rope_index(
                ids, image_grid_thw=grid, mm_token_type_ids=kinds
            )
            greedy, scores = recorder.generate(case)
            tensors |= {
                f"{name}.merged": merged.contiguous(),
                f"{name}.positions": positions[:, 0].float().contiguous(),
                f"{name}.rope_delta": delta.flatten().float().contiguous(),
                f"{name}.logits": recorder.forward(case, case.ids).logits[0, -4:].contiguous(),
                f"{name}.greedy": torch.tensor(greedy).float(),
                f"{name}.decode_logits": scores,
            }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file(tensors, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()

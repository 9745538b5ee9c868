"""Records the text logits of a checkpoint with transformers in float64.

    PYTHONPATH=tests python -m data.record_float64 tiny_ratio3

Along the greedy ids of expected.json, so it needs that file; writes expected_float64.safetensors,
values rounded to float32: CASE.logits of every prompt row and CASE.decode_logits. transformers
keeps parts of the Gated DeltaNet in float32 whatever it is loaded as; the rest is double.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def record(folder: Path) -> None:
    """Writes `folder`/expected_float64.safetensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3_5ForCausalLM

    cases = json.loads((folder / "expected.json").read_text())["cases"]
    model = Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tensors = {}
    for case, expected in cases.items():
        prompt, greedy = expected["input_ids"], expected["fp32"]["greedy"]
        with torch.no_grad():
            ids = torch.tensor([prompt + greedy[:-1]])
            logits = model(input_ids=ids, use_cache=False).logits[0]
        if logits[len(prompt) - 1 :].argmax(-1).tolist() != greedy:
            raise ValueError(f"{case}: the float64 run does not choose the recorded ids")
        tensors[f"{case}.logits"] = logits[: len(prompt)].float().contiguous()
        tensors[f"{case}.decode_logits"] = logits[len(prompt) - 1 :].float().contiguous()
    save_file(tensors, folder / "expected_float64.safetensors")


def main() -> None:
    """Runs `record` on the named folder beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder of tests/data")
    record(Path(__file__).parent / parser.parse_args().checkpoint)


if __name__ == "__main__":
    main()

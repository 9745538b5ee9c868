"""CPU decode of a random 13 M model: tokens/s, and transformers' beside it where it is installed.

    PYTHONPATH=tests python tests/bench/bench_decode.py

Both run the same weights' shape, 16-token prompts, greedy, no end id, in the same process.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from executor_client import run
from random_engine import GROUP_9B, write_random_engine

from runtime import Executor, ExecutorConfig, Request

SMALL: dict[str, Any] = {
    **GROUP_9B,
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "rope_parameters": {**GROUP_9B["rope_parameters"], "mrope_section": [3, 3, 2]},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}
BATCHES = (1, 8)
REPEATS = 3


def ours(engine: Path, num_threads: int, batch: int, num_tokens: int = 300) -> float:
    """Tokens/s of the executor, best of REPEATS."""
    executor = Executor(engine, ExecutorConfig(max_batch_size=batch, num_threads=num_threads))
    best = 0.0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run(
            executor,
            *[Request([row + 1] * 16, num_tokens, ignore_end_ids=True) for row in range(batch)],
        )
        best = max(best, batch * num_tokens / (time.perf_counter() - begin))
    executor.shutdown()
    return best


def theirs(dtype: str, num_threads: int, batch: int, num_tokens: int = 60) -> float:
    """Tokens/s of transformers' generate with cache, best of REPEATS."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.set_num_threads(num_threads)
    config = json.loads(json.dumps(SMALL))
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).to(getattr(torch, dtype)).eval()
    prompt = torch.randint(10, 8000, (batch, 16))
    best = 0.0
    with torch.no_grad():
        for _ in range(REPEATS):
            begin = time.perf_counter()
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            best = max(best, batch * num_tokens / (time.perf_counter() - begin))
    return best


def main() -> None:
    """Prints the table."""
    print("| who | threads | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |")
    print("|---|--:|" + "--:|" * len(BATCHES))
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        write_random_engine(engine, SMALL)
        for threads in (1, 2):
            cells = " | ".join(f"{ours(engine, threads, batch):.0f}" for batch in BATCHES)
            print(f"| deltaflash | {threads} | {cells} |", flush=True)
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no peer was measured")
        return
    for dtype in ("float32", "bfloat16"):
        for threads in (1, 2):
            cells = " | ".join(f"{theirs(dtype, threads, batch):.0f}" for batch in BATCHES)
            print(f"| transformers {dtype} | {threads} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""Vision encoder on the CPU: milliseconds a page and op, and transformers' beside it if installed.

    PYTHONPATH=tests python tests/bench/bench_vision.py [HEIGHT WIDTH]

A random encoder of width 192 and depth 6 (3 heads, MLP 768, 256 out) reads one page. Ours is the
executor, from its first tile to its last, and the chain of ops by itself; transformers' is the
model class with sdpa on the chain's weights. All are in this process; the outputs of chain and
transformers are compared before their times are taken.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from executor_client import run as run_requests
from random_engine import GROUP_9B, vision_language, write_random_engine
from reference.bfloat16 import from_bits, to_bits
from vision_ops import PREFIX, VisionChain

from runtime import Executor, ExecutorConfig, Image, Request

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL: dict[str, Any] = {
    "depth": 6,
    "hidden_size": 192,
    "num_heads": 3,
    "intermediate_size": 768,
    "out_hidden_size": 256,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
LEVELS = np.tile((np.arange(256, dtype=np.float32) / 127.5 - 1).astype(np.float32), (3, 1))
SECONDS = 3.0  # how long each is repeated


def make_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights of SMALL, each a bfloat16 number, by their names in a checkpoint."""
    c = SMALL
    width, merged, inner = c["hidden_size"], 4 * c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (width, 3, 2, 16, 16),
        "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (c["out_hidden_size"], merged),
    }
    for layer in range(c["depth"]):
        shapes |= {
            f"blocks.{layer}.norm1": (width,),
            f"blocks.{layer}.norm2": (width,),
            f"blocks.{layer}.attn.qkv": (3 * width, width),
            f"blocks.{layer}.attn.proj": (width, width),
            f"blocks.{layer}.mlp.linear_fc1": (inner, width),
            f"blocks.{layer}.mlp.linear_fc2": (width, inner),
        }
    weights = {"pos_embed.weight": rng.normal(size=(c["num_position_embeddings"], width))}
    for name, shape in shapes.items():
        scale = np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 1.0
        weights[f"{name}.weight"] = scale * rng.normal(size=shape)
        weights[f"{name}.bias"] = 0.1 * rng.normal(size=shape[0])
    return {PREFIX + name: from_bits(to_bits(value)) for name, value in weights.items()}


def best_ms(run: Callable[[], object]) -> float:
    """The quickest of the runs that fit SECONDS, after one that warms up."""
    run()
    best, end = np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


class Peer:
    """transformers' encoder with sdpa."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        import torch
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        self.torch = torch
        config = Qwen3_5VisionConfig(**SMALL, attn_implementation="sdpa")
        self.model = Qwen3_5VisionModel._from_config(config, attn_implementation="sdpa").eval()
        state = {k.removeprefix(PREFIX): torch.from_numpy(v.copy()) for k, v in weights.items()}
        self.model.load_state_dict(state)

    def run(
        self, patches: np.ndarray, grid: tuple[int, int], dtype: str, num_threads: int
    ) -> Callable[[], np.ndarray]:
        """A function that runs one page and returns the merged rows."""
        torch = self.torch
        model = self.model.to(getattr(torch, dtype))
        pixels = torch.from_numpy(patches).to(getattr(torch, dtype))
        grid_thw = torch.tensor([[1, *grid]])

        def forward() -> np.ndarray:
            torch.set_num_threads(num_threads)
            with torch.no_grad():
                out = model(pixels, grid_thw=grid_thw)
            return out.pooler_output.float().numpy()

        return forward


def executor_ms(pixels: np.ndarray, num_threads: int, num_pages: int = 30) -> float:
    """The quickest page of an executor with this encoder before a small text model."""
    text = {**GROUP_9B, "vocab_size": 512, "hidden_size": SMALL["out_hidden_size"]}
    text |= {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = vision_language(text, depth=6, hidden_size=192, num_heads=3, inner=768)
    best = np.inf
    with tempfile.TemporaryDirectory() as folder:
        write_random_engine(Path(folder) / "engine", config, max_pixels=1 << 20)
        executor = Executor(Path(folder) / "engine", ExecutorConfig(num_threads=num_threads))
        placeholders = [executor.engine.image_token_id] * (
            pixels.shape[0] * pixels.shape[1] // 1024
        )
        for _ in range(num_pages):
            request = Request([5, *placeholders, 6], 1, images=[Image(pixels)])
            (answer,) = run_requests(executor, request)
            best = min(best, answer.stats.vision_end_ns - answer.stats.vision_start_ns)
        executor.shutdown()
    return best / 1e6


def print_ops(chains: dict[int, VisionChain], pixels: np.ndarray, runs: int = 20) -> None:
    """Mean milliseconds a page of each op."""
    print("\n| op, ms a page | " + " | ".join(f"{n} threads" for n in chains) + " |")
    print("|---|" + "--:|" * len(chains))
    for chain in chains.values():
        chain.seconds.clear()
        for _ in range(runs):
            chain.forward(pixels, LEVELS)
    first = next(iter(chains.values()))
    for op in sorted(first.seconds, key=lambda op: -first.seconds[op]):
        cells = " | ".join(f"{1e3 * chain.seconds[op] / runs:.2f}" for chain in chains.values())
        print(f"| {op} | {cells} |")


def main() -> None:
    """Prints the tables."""
    height, width = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (640, 512)
    rng = np.random.default_rng(0)
    weights = make_weights(rng)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    grid = (height // 16, width // 16)
    # First, while no other library has threads in this process.
    executors = {n: executor_ms(pixels, n) for n in (1, 2)}
    chains = {n: VisionChain(SMALL, weights, n) for n in (1, 2)}
    runs = {
        f"deltaflash ops, {n} threads": lambda chain=chain: chain.forward(pixels, LEVELS)
        for n, chain in chains.items()
    }
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no peer was measured")
    else:
        from reference.patchify import patchify

        peer = Peer(weights)
        patches = patchify(pixels, LEVELS, 16, 2, 2)
        want = peer.run(patches, grid, "float32", 2)()
        error = np.abs(chains[2].forward(pixels, LEVELS)[1] - want).max()
        print(
            f"largest difference from transformers in float32: {error:.1e} (rms {want.std():.2f})"
        )
        if not error < 1e-3:
            raise SystemExit("the outputs differ")
    print(f"\n{height} x {width} pixels, {grid[0] * grid[1]} patches\n")
    print("| who | ms a page |\n|---|--:|")
    for n, ms in executors.items():
        print(f"| deltaflash executor, {n} threads | {ms:.1f} |")
    for name, run in runs.items():
        print(f"| {name} | {best_ms(run):.1f} |", flush=True)
    if importlib.util.find_spec("transformers") is not None:
        for dtype in ("float32", "bfloat16"):
            for n in (1, 2):
                ms = best_ms(peer.run(patches, grid, dtype, n))
                print(f"| transformers sdpa {dtype}, {n} threads | {ms:.1f} |", flush=True)
    print_ops(chains, pixels)


if __name__ == "__main__":
    main()

"""What one captured round costs the host: launches, synchronisation, the gap between rounds.

    PYTHONPATH=tests python tests/bench/bench_round.py [--batch 1 8 32]

Runs a random engine of the 9B shape on the CUDA backend with scripted drafts, under the CUPTI
tracer of torch.profiler, and prints one table. Needs a GPU and torch; says so and ends where they
are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import tempfile
from pathlib import Path

from executor_client import run
from random_engine import GROUP_9B, write_random_engine

from runtime import Executor, ExecutorConfig, Request

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
GRAPHS = ("cudaGraphLaunch",)
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def measure(engine: Path, batch: int, draft: int, num_tokens: int) -> dict[str, float]:
    """Counts and times of the steady decode rounds of one batch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    executor = Executor(
        engine,
        ExecutorConfig(
            device="cuda",
            max_batch_size=batch,
            max_num_tokens=max(512, batch * (draft + 1) + 64),
            max_kv_tokens=batch * 1024,
            max_draft_tokens=draft,
            max_scripted_tokens=1024,
            max_rounds_in_flight=2,
        ),
    )
    hooks = {"forced_tokens": list(range(1, num_tokens + 1)), "draft_script": [draft // 2]}
    requests = [
        Request([row + 1] * 8, num_tokens, ignore_end_ids=True, **(hooks if draft else {}))
        for row in range(batch)
    ]
    run(executor, *requests)  # captures the graphs
    executor.get_latest_iteration_stats()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run(executor, *requests)
        torch.cuda.synchronize()
    rounds = [e for e in executor.get_latest_iteration_stats() if e.num_context_tokens == 0]
    executor.shutdown()
    events = list(trace.events())
    runtime = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    device = sorted(
        (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda e: e.time_range.start,
    )
    graphs = sorted(e.time_range.start for e in runtime if e.name in GRAPHS)
    begin, end = graphs[len(graphs) // 2], graphs[-2]  # every prompt is long prefilled
    inside = [e for e in runtime if begin <= e.time_range.start < end]
    num_rounds = sum(begin <= start < end for start in graphs)

    def per_round(names: tuple[str, ...]) -> float:
        return sum(e.name in names for e in inside) / num_rounds

    kernels = [e for e in device if begin <= e.time_range.start < end]
    gaps = [
        later.time_range.start - earlier.time_range.end
        for earlier, later in itertools.pairwise(kernels)
        if "round_metadata" in later.name
    ]
    return {
        "rounds": len(rounds),
        "kernels launched": per_round(LAUNCHES),
        "graphs launched": per_round(GRAPHS),
        "copies": sum(e.name.startswith("cudaMemcpy") for e in inside) / num_rounds,
        "event waits": per_round(SYNCS),
        "kernels run": len(kernels) / num_rounds,
        "round us": (end - begin) / num_rounds,
        "gap us": statistics.median(gaps) if gaps else float("nan"),
    }


def can_run() -> bool:
    """Whether torch is there and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--vocab", type=int, default=32768)
    args = parser.parse_args()
    if not can_run():
        print("bench_round: needs a GPU and torch; nothing was measured")
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        write_random_engine(engine, {**GROUP_9B, "vocab_size": args.vocab, "eos_token_id": 0})
        device = torch.cuda.get_device_name()
        print(f"{device}, 4 layers of the 9B shape, vocab {args.vocab}; a round:")
        header = None
        for batch in args.batch:
            for draft in (0, 7):
                row = measure(engine, batch, draft, args.tokens)
                if header is None:
                    header = list(row)
                    print("| batch | T | " + " | ".join(header) + " |")
                    print("|--:|--:|" + "--:|" * len(header))
                cells = " | ".join(f"{row[name]:.1f}" for name in header)
                print(f"| {batch} | {draft + 1} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

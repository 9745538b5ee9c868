"""A short part of a session on the CUDA backend for compute-sanitizer, one part a process.

compute-sanitizer --tool TOOL python tests/contract/sanitizer_session.py CHECKPOINT PROVIDER PART

Together the parts of tools/device_check.sh run every op, drafts, cancels and slot reuse. They are
short because racecheck keeps a record of every access in host memory. PROVIDER "cpu" runs a part on
the CPU backend.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import executor_client
from conftest import DATA
from executor_client import Collector, run

from build_engine.pack import PackOptions, pack
from runtime import Executor, ExecutorConfig, OutputConfig, Request, SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 8
RECORDS = OutputConfig(token_records=True, top_logprobs=5)


def greedy() -> list[Request]:
    """Prompts of one chunk and of several pages, one token a round; one with records."""
    return [
        Request([1], NUM_TOKENS, ignore_end_ids=True),
        Request([2] * 70, NUM_TOKENS, ignore_end_ids=True, output=RECORDS),
        Request([3] * 12, NUM_TOKENS, ignore_end_ids=True),
    ]


def sampled() -> list[Request]:
    """Filters alone, and all rules for logits."""
    plain = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, seed=1)
    ruled = SamplingConfig(
        temperature=1.2,
        min_p=0.01,
        seed=2,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={7: 1.0, 300: -2.0},
    )
    return [
        Request([4] * 23, NUM_TOKENS, ignore_end_ids=True, sampling=plain),
        Request([5] * 34, NUM_TOKENS, min_tokens=NUM_TOKENS, sampling=ruled, output=RECORDS),
        Request([6], NUM_TOKENS, ignore_end_ids=True, sampling=plain),
    ]


def drafted() -> list[Request]:
    """Blocks of every template: some right, none, all, one."""
    script = {"forced_tokens": list(range(30)), "draft_script": [3, 0, 15, 1]}
    sampling = SamplingConfig(temperature=0.8, top_k=20, seed=3)
    return [
        Request([7], 20, ignore_end_ids=True, output=RECORDS, **script),
        Request([8] * 45, 20, ignore_end_ids=True, sampling=sampling, **script),
        Request([9] * 3, 4, ignore_end_ids=True),
    ]


PARTS: dict[str, Callable[[], list[Request]]] = {
    "greedy": greedy,
    "sampled": sampled,
    "drafted": drafted,
}


def run_part(checkpoint: str, provider: str, part: str, engine: Path) -> None:
    """Runs one part; the sanitizer judges.

    Args:
        checkpoint: A folder of tests/data.
        provider: Of segments on CUDA, or "cpu".
        part: A key of PARTS.
        engine: Where the engine directory is packed to.
    """
    pack(DATA / checkpoint, engine, PackOptions(created="2026-01-01T00:00:00Z"))
    device = {"device": "cpu"} if provider == "cpu" else {"device": "cuda", "provider": provider}
    executor = Executor(
        engine,
        ExecutorConfig(
            max_batch_size=3,
            max_kv_tokens=3 * 160,
            kv_page_size=16,
            max_draft_tokens=15,
            max_scripted_tokens=64,
            max_rounds_in_flight=2,
            **device,
        ),
    )
    collector = Collector(executor)
    requests = PARTS[part]()
    ids = [collector.submit(request) for request in requests]
    waiting = collector.submit(Request([10] * 5, 40, ignore_end_ids=True))
    executor.cancel_request(waiting)
    collector.finish()
    for request_id, request in zip(ids, requests, strict=True):
        result = collector.results[request_id]
        assert len(result.token_ids) == request.max_tokens
        assert len(result.records) == (request.max_tokens if request.output.token_records else 0)
    (again,) = run(executor, Request([3, 4], 3, ignore_end_ids=True))
    assert len(again.token_ids) == 3
    executor.shutdown()


def main() -> None:
    """Runs the part that the arguments name."""
    faulthandler.enable()  # says where, should the process die
    executor_client.TIMEOUT_S = 900.0  # racecheck is two orders of magnitude slower
    checkpoint, provider, part = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        run_part(checkpoint, provider, part, Path(folder) / "engine")
    print(checkpoint, provider, part, "done")


if __name__ == "__main__":
    main()

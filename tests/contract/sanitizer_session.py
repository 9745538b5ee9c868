"""A short session on the CUDA backend for compute-sanitizer: every op, drafts, cancels, slot reuse.

compute-sanitizer --tool memcheck python tests/contract/sanitizer_session.py [PROVIDER...]
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from pathlib import Path

import executor_client
from conftest import DATA
from executor_client import Collector, run

from build_engine.pack import PackOptions, pack
from runtime import Executor, ExecutorConfig, Request, SamplingConfig


def main() -> None:
    """Runs the session; the sanitizer judges."""
    faulthandler.enable()  # says where, should the process die
    executor_client.TIMEOUT_S = 900.0  # racecheck is two orders of magnitude slower
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny_qwen3_5", "tiny_ratio3"):
            engine = Path(folder) / name
            pack(DATA / name, engine, PackOptions(created="2026-01-01T00:00:00Z"))
            for provider in sys.argv[1:] or ("exact", "cublaslt"):
                executor = Executor(
                    engine,
                    ExecutorConfig(
                        device="cuda",
                        provider=provider,
                        max_batch_size=5,
                        max_kv_tokens=5 * 256,
                        kv_page_size=16,
                        max_draft_tokens=15,
                        max_scripted_tokens=64,
                        max_rounds_in_flight=2,
                    ),
                )
                script = {"forced_tokens": list(range(30)), "draft_script": [3, 0, 15, 1]}
                collector = Collector(executor)
                ids = [
                    collector.submit(
                        Request(
                            [1 + index] * (1 + 11 * index),
                            12,
                            ignore_end_ids=True,
                            sampling=SamplingConfig(
                                temperature=0.8 * (index % 2), top_k=20, top_p=0.9, seed=index
                            ),
                            **(script if index % 3 == 0 else {}),
                        )
                    )
                    for index in range(8)
                ]
                executor.cancel_request(ids[4])
                collector.finish()
                (again,) = run(executor, Request([3, 4], 5, ignore_end_ids=True))
                assert len(again.token_ids) == 5
                executor.shutdown()
                print(name, provider, "done", file=sys.stderr)


if __name__ == "__main__":
    main()

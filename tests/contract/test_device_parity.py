"""The CUDA backend against the CPU backend, token by token along the same text.

Both say the same forced tokens, so that one near tie does not part them for good; at every position
the logits must agree within a bound, and where the arg max differs the CPU's gap between its two
best must be within that bound too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from executor_client import Collector, run, wait_idle
from random_engine import GROUP_9B, write_random_engine

from runtime import Executor, ExecutorConfig, FinishReason, OutputConfig, Request

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
LOGITS = OutputConfig(return_generation_logits=True)
# Root mean square of the logit error allowed, in standard deviations of the logits. "exact" is fp32
# throughout, in another order of summation. "cublaslt" rounds the inputs of every matrix product to
# BF16; how far that goes is the network's: the random tiny ones amplify it (transformers' own BF16
# run of the first is 0.03 to 0.05 off its fp32 run), the real shape averages it out.
BOUNDS = {
    "tiny_qwen3_5": {"exact": 2e-5, "cublaslt": 0.06},
    "tiny_ratio3": {"exact": 2e-5, "cublaslt": 0.2},
    "group_9b": {"exact": 2e-5, "cublaslt": 0.015},
}


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, engine_dirs: dict[str, Path]
) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("random") / "group_9b"
    write_random_engine(path, GROUP_9B)
    return {**engine_dirs, "group_9b": path}


def prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """32 prompts of mixed length."""
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 90))] for _ in range(32)]


@pytest.mark.parametrize("name", ["tiny_qwen3_5", "tiny_ratio3", "group_9b"])
def test_same_logits_and_ids_up_to_near_ties(engines: dict[str, Path], name: str) -> None:
    rng = random.Random(11)
    vocab_size = 490 if name.startswith("tiny") else GROUP_9B["vocab_size"]
    wanted = prompts(rng, vocab_size)
    limits = {"max_batch_size": 32, "max_kv_tokens": 32 * 256, "max_num_tokens": 1024}
    reference = Executor(engines[name], ExecutorConfig(**limits))
    expected = run(
        reference,
        *[Request(p, NUM_TOKENS, output=LOGITS, ignore_end_ids=True) for p in wanted],
    )
    reference.shutdown()
    for provider, bound in BOUNDS[name].items():
        executor = Executor(
            engines[name],
            ExecutorConfig(
                device="cuda",
                provider=provider,
                max_draft_tokens=7,
                max_scripted_tokens=64,
                max_rounds_in_flight=2,
                **limits,
            ),
        )
        # A third of the rows each: no drafts, drafts of mixed accept length, drafts all right.
        scripts = [[], [3, 0, 7, 1, 5], [7]]
        got = run(
            executor,
            *[
                Request(
                    prompt,
                    NUM_TOKENS,
                    output=LOGITS,
                    ignore_end_ids=True,
                    forced_tokens=result.token_ids,
                    draft_script=scripts[index % 3],
                )
                for index, (prompt, result) in enumerate(zip(wanted, expected, strict=True))
            ],
        )
        executor.shutdown()
        errors = []
        ties = 0
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.generation_logits is not None
            assert theirs.generation_logits is not None
            assert mine.token_ids == theirs.token_ids
            difference = np.abs(mine.generation_logits - theirs.generation_logits)
            error = difference.max()
            errors.append(difference / theirs.generation_logits.std())
            best_two = np.sort(theirs.generation_logits, axis=-1)[:, -2:]
            gaps = best_two[:, 1] - best_two[:, 0]
            differs = mine.generation_logits.argmax(-1) != theirs.generation_logits.argmax(-1)
            ties += int(differs.sum())
            assert (gaps[differs] <= 2 * error).all()
        all_errors = np.concatenate(errors)
        rms = float(np.sqrt(np.mean(all_errors**2)))
        print(
            f"{name} {provider}: logit error rms {rms:.1e} sd, largest {all_errors.max():.1e} sd, "
            f"{ties} near ties of {len(all_errors)}"
        )
        assert rms < bound


def test_real_shape_batches_of_1_to_32_with_cancels(engines: dict[str, Path]) -> None:
    """Batch-invariant segments: each request has the same bits alone and in any company."""
    rng = random.Random(5)
    wanted = prompts(rng, GROUP_9B["vocab_size"])
    config = {
        "device": "cuda",
        "provider": "exact",
        "max_batch_size": 32,
        "max_kv_tokens": 32 * 256,
        "max_num_tokens": 1024,
    }
    executor = Executor(engines["group_9b"], ExecutorConfig(**config))
    solo = [run(executor, Request(p, 8, ignore_end_ids=True))[0].token_ids for p in wanted]
    for size in (2, 3, 8, 17, 32):
        collector = Collector(executor)
        ids = [collector.submit(Request(p, 8, ignore_end_ids=True)) for p in wanted[:size]]
        cancelled = set(rng.sample(ids, size // 4))
        for request_id in cancelled:
            executor.cancel_request(request_id)
        collector.finish()
        for request_id, expected in zip(ids, solo, strict=False):
            result = collector.results[request_id]
            if result.finish_reason is FinishReason.CANCELLED:
                assert request_id in cancelled
                assert result.token_ids == expected[: len(result.token_ids)]
            else:
                assert result.token_ids == expected
        wait_idle(executor)
    executor.shutdown()

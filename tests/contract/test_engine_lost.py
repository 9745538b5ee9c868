"""A loop that fails: every request gets its end, and the executor says why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from executor_client import Collector

from runtime import EngineLost, FinishReason, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime import Executor


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_failed_loop_ends_every_request_once(
    make_executor: Callable[..., Executor], rounds_in_flight: int
) -> None:
    """Known bug Q7, the engine's share: those that run, those that wait and those that come."""
    executor = make_executor(
        max_batch_size=2, max_scripted_tokens=64, max_rounds_in_flight=rounds_in_flight
    )
    collector = Collector(executor)
    running = collector.submit(Request([1, 2], 4000, ignore_end_ids=True))
    while not collector.results[running].token_ids:
        collector.poll(0.1)
    failing = collector.submit(Request([3], 4000, ignore_end_ids=True, fail_after_tokens=20))
    waiting = [collector.submit(Request([4] * 30, 4000)) for _ in range(4)]
    assert executor.engine_error() is None
    collector.finish()

    cause = f"request {failing} made the loop fail"
    assert executor.engine_error() == cause
    assert not executor.can_enqueue_requests()
    for request_id in (running, failing, *waiting):
        result = collector.results[request_id]
        assert result.num_final == 1
        assert result.error == cause
        assert result.finish_reason is FinishReason.CANCELLED
    assert len(collector.results[running].token_ids) > 0
    assert all(collector.results[request_id].token_ids == [] for request_id in waiting)
    with pytest.raises(EngineLost, match=cause):
        executor.enqueue_request(Request([1], 1))
    load = executor.load()
    assert (load.num_running, load.num_queued, load.num_queued_tokens) == (0, 0, 0)
    assert (load.slots_used, load.pages_used, load.silence_ns) == (0, 0, 0)

    executor.cancel_request(running)
    executor.shutdown()
    executor.shutdown()
    assert executor.await_responses(None) == []
    assert executor.engine_error() == cause


def test_failure_hook_is_refused_unless_hooks_are_on(
    make_executor: Callable[..., Executor],
) -> None:
    for config, value in (
        ({}, 1),
        ({"max_scripted_tokens": 8}, 9),
        ({"max_scripted_tokens": 8}, -1),
    ):
        with pytest.raises(ValueError, match="fail_after_tokens"):
            make_executor(**config).enqueue_request(Request([1], 8, fail_after_tokens=value))


def test_idle_time_is_no_silence(make_executor: Callable[..., Executor]) -> None:
    """A server takes a silent engine for a hung one: the first request after a pause must not."""
    executor = make_executor()
    collector = Collector(executor)
    for _ in range(20):
        time.sleep(0.02)
        before = time.monotonic_ns()
        collector.submit(Request([1], 2, ignore_end_ids=True))
        assert executor.load().silence_ns <= time.monotonic_ns() - before
        collector.finish()

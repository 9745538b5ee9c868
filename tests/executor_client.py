"""Drives an executor from a test: collects the responses of requests until they are final."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime import Executor, FinishReason, ProgressPhase, Request, RequestStats, TokenRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

TIMEOUT_S = 60.0


@dataclass
class Collected:
    """Everything that came back for one request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    stop_string: str | None = None
    end_id: int | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_final: int = 0
    error: str | None = None
    stats: RequestStats | None = None
    context_logits: np.ndarray | None = None
    generation_logits: np.ndarray | None = None
    image_embeddings: np.ndarray | None = None
    progress: list[tuple[ProgressPhase, float | None]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # time.monotonic() of responses with tokens


class Collector:
    """The only reader of an executor's responses."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.results: dict[int, Collected] = {}

    def submit(self, request: Request) -> int:
        request_id = self.executor.enqueue_request(request)
        self.results[request_id] = Collected()
        return request_id

    def poll(self, timeout_s: float = 0.0) -> None:
        for response in self.executor.await_responses(timeout_s):
            result = self.results[response.request_id]
            result.text += response.text
            result.deltas.append(response.text)
            result.token_ids += response.token_ids
            result.records += response.records
            result.num_completion_tokens = response.num_completion_tokens
            assert result.num_final == 0, "an event after the final response"
            if response.progress is not None:
                result.progress.append((response.progress.phase, response.progress.fraction))
            if response.token_ids:
                result.arrivals.append(time.monotonic())
            if response.is_final:
                result.num_final += 1
                result.finish_reason = response.finish_reason
                result.stop_string = response.stop_string
                result.end_id = response.end_id
                result.num_prompt_tokens = response.num_prompt_tokens
                result.error = response.error
                result.stats = response.stats
                result.context_logits = response.take_context_logits()
                result.generation_logits = response.take_generation_logits()
                result.image_embeddings = response.take_image_embeddings()

    def finish(self, request_ids: Iterable[int] | None = None) -> None:
        """Waits for the final responses of `request_ids`, or of all that were submitted."""
        wanted = list(self.results if request_ids is None else request_ids)
        deadline = time.monotonic() + TIMEOUT_S
        while any(self.results[request_id].num_final == 0 for request_id in wanted):
            assert time.monotonic() < deadline, "no final response came"
            self.poll(0.2)


def run(executor: Executor, *requests: Request) -> list[Collected]:
    """Submits all at once and returns what each got."""
    collector = Collector(executor)
    request_ids = [collector.submit(request) for request in requests]
    collector.finish()
    return [collector.results[request_id] for request_id in request_ids]


def wait_idle(executor: Executor, timeout_s: float = 2.0) -> None:
    """Waits until nothing runs or waits and no slot or page is held (known bug M4: in 2 s)."""
    deadline = time.monotonic() + timeout_s
    while True:
        load = executor.load()
        held = (load.num_running, load.num_queued, load.slots_used, load.pages_used)
        if not any(held) and load.num_queued_tokens == 0:
            return
        assert time.monotonic() < deadline, f"still held: {held}"
        time.sleep(0.005)

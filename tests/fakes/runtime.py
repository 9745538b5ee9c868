"""The executor of `runtime` as a thread that follows orders, with a real eventfd."""

import contextlib
import os
import threading
from dataclasses import dataclass, field

from runtime import FinishReason, IterationStats, Progress, Request, TokenRecord


@dataclass
class RequestStats:
    arrival_ns: int = 1
    first_scheduled_ns: int = 0
    vision_start_ns: int = 0
    vision_end_ns: int = 0
    prefill_start_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Response:
    request_id: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    is_final: bool = False
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    stop_string: str | None = None
    end_id: int | None = None
    num_completion_tokens: int = 0
    progress: Progress | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass
class LoadReport:
    num_running: int = 0
    num_queued: int = 3
    num_queued_tokens: int = 0
    slots_used: int = 0
    slots_total: int = 4
    pages_used: int = 2
    pages_total: int = 64
    page_size: int = 32
    silence_ns: int = 0
    oldest_queued_ns: int = 0


class Executor:
    """Answers nothing by itself: a test hands it the responses of a step."""

    def __init__(self) -> None:
        self.response_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.report = LoadReport()
        self.requests: dict[int, Request] = {}
        self.cancelled: list[int] = []
        self.num_takes = 0
        self.refusal: Exception | None = None
        self.error: str | None = None
        self.failure: Exception | None = None
        self.stopped = False
        self._ready: list[Response] = []
        self._lock = threading.Lock()

    def enqueue_request(self, request: Request) -> int:
        if self.refusal is not None:
            raise self.refusal
        number = len(self.requests) + 1
        self.requests[number] = request
        return number

    def cancel_request(self, number: int) -> None:
        self.cancelled.append(number)

    def step(self, *responses: Response) -> None:
        """One engine step, on a thread as in the engine."""

        def run() -> None:
            with self._lock:
                self._ready.extend(responses)
            os.eventfd_write(self.response_fd, 1)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def take_responses(self) -> list[Response]:
        self.num_takes += 1
        if self.failure is not None:
            raise self.failure
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.response_fd)
        with self._lock:
            taken, self._ready = self._ready, []
        return taken

    def load(self) -> LoadReport:
        return self.report

    def engine_error(self) -> str | None:
        return self.error

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return []

    def shutdown(self) -> None:
        self.stopped = True

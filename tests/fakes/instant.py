"""An engine without time: the next step of a request is ready as soon as its reader waits."""

import os
from collections.abc import Awaitable
from dataclasses import replace

from fakes.backend import INFO
from fakes.runtime import Executor, Response

from runtime import FinishReason, Request
from server.backend import Generation, GenerationRequest, TokenEvent
from server.backends.executor import ExecutorBackend

WORD = "word"
"""The text of one token."""


class InstantExecutor(Executor):
    """Hands out a step of so many tokens to every request whose reader waits.

    max_tokens is a multiple of it, or the last step is too long.
    """

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__()
        self.tokens_per_step = tokens_per_step
        self.last_number = 0
        self._left: dict[int, int] = {}
        self._waiting: list[int] = []
        # Making them anew for each step would be the engine's time.
        self._responses: dict[int, Response] = {}
        self._text = WORD * tokens_per_step
        self._token_ids = list(range(tokens_per_step))

    def enqueue_request(self, request: Request) -> int:
        assert request.max_tokens is not None
        self.last_number += 1
        self._left[self.last_number] = request.max_tokens
        self._responses[self.last_number] = Response(
            self.last_number, self._text, self._token_ids, finish_reason=FinishReason.LENGTH
        )
        return self.last_number

    def want(self, number: int) -> None:
        """The reader of a request waits for the next step."""
        if not self._waiting:
            os.eventfd_write(self.response_fd, 1)
        self._waiting.append(number)

    def take_responses(self) -> list[Response]:
        os.eventfd_read(self.response_fd)
        waiting, self._waiting = self._waiting, []
        return [self._step(number) for number in waiting]

    def _step(self, number: int) -> Response:
        self._left[number] -= self.tokens_per_step
        if self._left[number] > 0:
            return self._responses[number]
        del self._left[number]
        response = self._responses.pop(number)
        response.is_final = True
        return response


class EagerGeneration:
    """A generation whose reader's wait makes the next step."""

    def __init__(self, generation: Generation, executor: InstantExecutor) -> None:
        self._generation = generation
        self._executor = executor
        self._number = executor.last_number
        self.cancel = generation.cancel
        self.close = generation.close

    def next_event(self) -> Awaitable[TokenEvent]:
        self._executor.want(self._number)
        return self._generation.next_event()


class InstantBackend(ExecutorBackend):
    """The real backend over the instant executor."""

    def __init__(self, tokens_per_step: int) -> None:
        limit = 2**24
        info = replace(
            INFO,
            context_len=limit,
            kv_capacity_tokens=limit,
            max_batch_size=1024,
            max_queued=0,
        )
        self._instant = InstantExecutor(tokens_per_step)
        super().__init__(self._instant, info, stall_s=60.0)  # type: ignore[arg-type]

    def submit(self, request: GenerationRequest) -> EagerGeneration:  # type: ignore[override]
        return EagerGeneration(super().submit(request), self._instant)

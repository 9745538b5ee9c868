"""One answer: its checked options, its way through the engine, its events."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from google.protobuf.message import Message

from deltaflash.v1 import documents_pb2, generation_pb2
from server.backend import (
    EndCause,
    EngineInfo,
    Finished,
    Generation,
    GenerationRequest,
    GenerationStats,
)
from server.config import ServerConfig
from server.errors import DeadlinePassedError, PromptTooLongError, describe
from server.images import PreparedImage
from server.live_requests import LiveRequest
from server.prompt import expand_placeholders
from server.service_context import Engine, ServiceContext
from server.services.events import (
    DECODING,
    PREPROCESSING,
    QUEUED,
    Arrival,
    delta_events,
    finished_event,
    progress_event,
    started_event,
)
from server.services.pictures import image_tokens, page_info
from server.services.writer import CallLine, EventWriter
from server.validation import (
    Findings,
    check_output,
    check_sampling,
    check_speculation,
    check_stopping,
)

log = logging.getLogger(__name__)

MAX_ALLOTTED_MS = 30 * 24 * 3600 * 1000
"""A deadline farther away than a month is none: clients send the largest number for "never"."""


@dataclass(frozen=True, slots=True)
class CallScope:
    """What the tasks of one call share.

    Attributes:
        services: What the services share.
        engine: What generates; the one that was loaded when the call came.
        line: The way to the caller.
    """

    services: ServiceContext
    engine: Engine
    line: CallLine


class Answer:
    """One admitted request on its way through the engine to its reader."""

    def __init__(
        self, scope: CallScope, live: LiveRequest, writer: EventWriter, arrived_ns: int
    ) -> None:
        """Takes the request's surroundings.

        Args:
            scope: The call.
            live: The request's place.
            writer: Takes the events.
            arrived_ns: When the request came, monotonic clock.
        """
        self._config = scope.services.config
        self._engine = scope.engine
        self._remaining_s = scope.line.context.time_remaining
        self._live = live
        self._writer = writer
        self._arrived_ns = arrived_ns
        self._prepared_ns: int | None = None
        self._progress: generation_pb2.Progress | None = None
        self._num_events = 0

    async def prepare(
        self, decode: Callable[[], Coroutine[Any, Any, Sequence[PreparedImage]]]
    ) -> Sequence[PreparedImage] | None:
        """Waits for the pictures of the request.

        Args:
            decode: Decodes them.

        Returns:
            The pictures; None when the request was cancelled first.

        Raises:
            ImageRefusedError: A picture is at fault.
        """
        await self._write_progress(PREPROCESSING)
        images = await self._live.until_cancelled(decode())
        self._prepared_ns = time.monotonic_ns()
        await self._write_progress(QUEUED)
        return images

    async def run(
        self,
        draft: GenerationRequest,
        prompt_ids: tuple[int, ...],
        images: Sequence[PreparedImage] | None = (),
        *,
        is_page: bool = False,
    ) -> generation_pb2.Finished:
        """Submits the request and writes its events until the last one, which it returns.

        The engine's seat is free when this returns or raises, however it ends.

        Args:
            draft: What `check_options` returned.
            prompt_ids: The prompt, one placeholder a picture.
            images: The pictures; None when the request was cancelled before they were decoded.
            is_page: Say what became of the picture.
        """
        info = self._engine.backend.info
        if images is None:
            prompt_ids = images = ()
        prompt_ids = expand_placeholders(prompt_ids, image_tokens(images, info), info)
        request = replace(
            draft,
            request_id=self._live.request_id,
            prompt_ids=prompt_ids,
            max_tokens=answer_limit(draft, len(prompt_ids), info),
            allotted_time_ms=allotted_time_ms(self._remaining_s(), self._config, self._arrived_ns),
            images=tuple(images),
        )
        prepared_ns = self._prepared_ns or time.monotonic_ns()
        arrival = Arrival(self._arrived_ns, prepared_ns)
        outcome = "CLIENT_GONE"
        finished: Finished | None = None
        try:
            finished = await self._stream(
                request, arrival, page_info(images[0]) if is_page and images else None
            )
            event = finished_event(request, finished, arrival, info)
            await self._write(event)
            outcome = finished.cause.name
        except Exception as error:
            outcome = describe(error).reason
            raise
        finally:
            self._log(request, finished, outcome, arrival)
        return event

    async def _stream(
        self,
        request: GenerationRequest,
        arrival: Arrival,
        info: documents_pb2.PageInfo | None,
    ) -> Finished:
        generation: Generation | None = None
        # One that was cancelled while its prompt was made never reaches the engine.
        if not self._live.cancelled:
            generation = self._engine.backend.submit(request)
        try:
            if generation is not None:
                self._live.attach(generation)
            await self._write(started_event(request, self._engine.backend.info))
            if info is not None:
                await self._write(info)
            if generation is None:
                finished = Finished(EndCause.CANCELLED, 0, GenerationStats())
            else:
                finished = await self._forward(generation)
        finally:
            if generation is not None:
                generation.close()
        if self._live.failure is not None:
            raise self._live.failure
        if finished.cause is EndCause.TIMED_OUT and not self._ended_by_server_limit(arrival):
            raise DeadlinePassedError("the deadline of the call passed")
        return finished

    async def _forward(self, generation: Generation) -> Finished:
        while True:
            event = await generation.next_event()
            if event.progress is not None:
                await self._write_progress(progress_event(event.progress))
            elif event.text and self._progress is not None:
                # What was merged for a late reader may have lost it.
                await self._write_progress(DECODING)
            for delta in delta_events(event):
                await self._write(delta)
            if event.finished is not None:
                return event.finished

    def _ended_by_server_limit(self, arrival: Arrival) -> bool:
        limit_ms = self._config.max_request_ms
        remaining_s = self._remaining_s()
        if limit_ms is None:
            return False
        if remaining_s is None or remaining_s > 0:
            return True
        return (time.monotonic_ns() - arrival.arrived_ns) / 1e6 >= limit_ms

    async def _write_progress(self, event: generation_pb2.Progress) -> None:
        if event != self._progress:
            self._progress = event
            await self._write(event)

    async def _write(self, event: Message) -> None:
        await self._writer.write(event)
        self._num_events += 1

    def _log(
        self,
        request: GenerationRequest,
        finished: Finished | None,
        outcome: str,
        arrival: Arrival,
    ) -> None:
        now_ns = time.monotonic_ns()
        stats = GenerationStats() if finished is None else finished.stats
        record: dict[str, object] = {
            "request_id": request.request_id,
            "outcome": outcome,
            "prompt_tokens": len(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "messages": self._num_events,
            "preprocess_ms": (arrival.prepared_ns - arrival.arrived_ns) // 1_000_000,
            "total_ms": (now_ns - arrival.arrived_ns) // 1_000_000,
        }
        if finished is not None:
            record["completion_tokens"] = finished.num_completion_tokens
            record["steps"] = stats.num_steps
            record["drafted"] = stats.num_drafted
            record["accepted"] = stats.num_accepted
        if stats.first_token_ns is not None:
            record["first_token_ms"] = (stats.first_token_ns - arrival.arrived_ns) // 1_000_000
        log.info("request ended", extra=record)


class Options(Protocol):
    """A message that says how an answer is made: a `GenerateRequest` or `PageOptions`."""

    @property
    def sampling(self) -> generation_pb2.SamplingOptions:
        """How tokens are chosen."""
        ...

    @property
    def stopping(self) -> generation_pb2.StoppingOptions:
        """When it ends."""
        ...

    @property
    def output(self) -> generation_pb2.OutputOptions:
        """What it carries."""
        ...

    @property
    def speculation(self) -> generation_pb2.SpeculationOptions:
        """Drafting."""
        ...


def check_options(
    options: Options, info: EngineInfo, config: ServerConfig, findings: Findings, path: str
) -> GenerationRequest:
    """Checks how an answer is to be made.

    Args:
        options: The message.
        info: What is loaded.
        config: Has the server's own limits.
        findings: Takes what is wrong.
        path: Path of the message in the request, with a dot at its end unless it is empty.

    Returns:
        The request without id, prompt and allotted time, meaningless when there are findings; its
        max_tokens is 0 when not named.
    """
    sampling = check_sampling(options.sampling, info, findings, f"{path}sampling.")
    stopping = check_stopping(options.stopping, info, config, findings, f"{path}stopping.")
    output = check_output(options.output, info, findings, f"{path}output.")
    check_speculation(options.speculation, info, findings, f"{path}speculation.")
    if sampling.temperature > 0 and sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(64))
    return GenerationRequest(
        request_id="",
        prompt_ids=(),
        max_tokens=stopping.max_tokens or 0,
        min_tokens=stopping.min_tokens,
        sampling=sampling,
        stop_strings=stopping.stop_strings,
        stop_token_ids=stopping.stop_token_ids,
        ignore_end_tokens=stopping.ignore_end_tokens,
        include_stop=stopping.include_stop,
        repetition_guard=stopping.repetition_guard,
        skip_special_tokens=output.skip_special_tokens,
        token_records=output.token_records,
        top_logprobs=output.top_logprobs,
    )


def answer_limit(draft: GenerationRequest, num_prompt_tokens: int, info: EngineInfo) -> int:
    """Returns the limit that holds for an answer, tokens, at least 1.

    A named limit is cut by the context only, so that one that the KV cache cannot hold is refused
    and not made smaller; the default gives way to both, as far as min_tokens lets it.

    Args:
        draft: The request; its max_tokens is 0 when not named.
        num_prompt_tokens: Length of the prompt, below context_len.
        info: What is loaded.

    Raises:
        PromptTooLongError: It leaves no room for min_tokens.
    """
    context_room = info.context_len - num_prompt_tokens
    if draft.min_tokens > context_room:
        raise PromptTooLongError(num_prompt_tokens, info.context_len - draft.min_tokens)
    if draft.max_tokens:
        return min(draft.max_tokens, context_room)
    cache_room = info.kv_capacity_tokens - num_prompt_tokens
    return max(1, draft.min_tokens, min(info.default_max_tokens, context_room, cache_room))


def allotted_time_ms(
    remaining_s: float | None, config: ServerConfig, arrived_ns: int
) -> int | None:
    """Returns the time that the engine may spend on a request, at least 1 ms; None has no limit.

    Args:
        remaining_s: Time until the call's deadline, seconds; None has none.
        config: Has the server's own limit.
        arrived_ns: When the server's own limit began to run, monotonic clock.

    Raises:
        DeadlinePassedError: The deadline has passed.
    """
    limits_ms = []
    if config.max_request_ms is not None:
        spent_ms = (time.monotonic_ns() - arrived_ns) // 1_000_000
        limits_ms.append(max(1, config.max_request_ms - spent_ms))
    if remaining_s is not None:
        if remaining_s <= 0:
            raise DeadlinePassedError("the deadline of the call passed before the engine was free")
        limits_ms.append(math.ceil(min(remaining_s * 1000, MAX_ALLOTTED_MS)))
    least_ms = min(limits_ms, default=None)
    return least_ms if least_ms is None or least_ms < MAX_ALLOTTED_MS else None

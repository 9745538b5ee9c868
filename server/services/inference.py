"""InferenceService: one checked request to one stream of events."""

import logging
import math
import secrets
import time
from dataclasses import replace

from deltaflash.v1 import inference_pb2, inference_pb2_grpc
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
from server.live_requests import LiveRequest
from server.service_context import Engine, ServiceContext
from server.services.call import CallContext, call
from server.services.events import Arrival, delta_events, finished_event, started_event
from server.validation import (
    Findings,
    check_extras,
    check_message_size,
    check_model,
    check_output,
    check_prompt,
    check_request_id,
    check_sampling,
    check_speculation,
    check_stopping,
)
from server.write_watch import WriteWatch

log = logging.getLogger(__name__)

MAX_ALLOTTED_MS = 30 * 24 * 3600 * 1000
"""A deadline farther away than a month is none: clients send the largest number for "never"."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `deltaflash.v1.InferenceService`."""

    def __init__(self, context: ServiceContext) -> None:
        """Takes what the services share."""
        self.context = context

    # A coroutine that writes, where the stub declares an iterator: a write can be timed.
    @call
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: CallContext
    ) -> None:
        """Generates one answer."""
        arrived_ns = time.monotonic_ns()
        self.context.lifecycle.require_serving()
        engine = self.context.require_engine()
        info = engine.backend.info
        check_message_size(request.ByteSize(), self.context.config)
        request_id = check_request_id(request)
        check_model(request.model if request.HasField("model") else None, info)
        draft = check_generate(request, info, self.context.config)
        with self.context.live.admit(request_id, info.max_batch_size, info.max_queued) as live:
            prompt_ids = await engine.prompts.encode(request, info)
            remaining_s = context.time_remaining()
            generation_request = replace(
                draft,
                request_id=live.request_id,
                prompt_ids=prompt_ids,
                max_tokens=answer_limit(draft, len(prompt_ids), info),
                allotted_time_ms=allotted_time_ms(remaining_s, self.context.config),
            )
            stream = AnswerStream(
                self.context.config, engine, live, context, time.monotonic_ns() - arrived_ns
            )
            await stream.run(generation_request, Arrival(arrived_ns, time.monotonic_ns()))


class AnswerStream:
    """One admitted request on its way through the engine to its reader."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        live: LiveRequest,
        context: CallContext,
        preprocess_ns: int,
    ) -> None:
        """Takes the request's surroundings."""
        self._config = config
        self._engine = engine
        self._live = live
        self._context = context
        self._preprocess_ns = preprocess_ns
        self._num_messages = 0
        self._watch = WriteWatch(config.write_timeout_s)

    async def run(self, request: GenerationRequest, arrival: Arrival) -> None:
        """Submits the request and writes its events until the last one.

        The engine's seat is free when this returns or raises, however it ends.
        """
        outcome = "CLIENT_GONE"
        finished: Finished | None = None
        try:
            with self._watch:
                finished = await self._stream(request, arrival)
            outcome = finished.cause.name
        except Exception as error:
            outcome = describe(error).reason
            raise
        finally:
            self._log(request, finished, outcome, arrival)

    async def _stream(self, request: GenerationRequest, arrival: Arrival) -> Finished:
        backend = self._engine.backend
        if self._live.cancelled:
            # Cancelled while its prompt was tokenised: the engine never hears of it.
            await self._write(started_event(request, backend.info.name))
            finished = Finished(EndCause.CANCELLED, 0, GenerationStats())
            return await self._finish(request, finished, arrival)
        generation = backend.submit(request)
        try:
            self._live.attach(generation)
            await self._write(started_event(request, backend.info.name))
            return await self._forward(generation, request, arrival)
        finally:
            generation.close()

    async def _forward(
        self, generation: Generation, request: GenerationRequest, arrival: Arrival
    ) -> Finished:
        while True:
            event = await generation.next_event()
            for delta in delta_events(event):
                await self._write(delta)
            if event.finished is not None:
                return await self._finish(request, event.finished, arrival)

    async def _finish(
        self, request: GenerationRequest, finished: Finished, arrival: Arrival
    ) -> Finished:
        if self._live.failure is not None:
            raise self._live.failure
        if finished.cause is EndCause.TIMED_OUT and not self._ended_by_server_limit(arrival):
            raise DeadlinePassedError("the deadline of the call passed")
        await self._write(finished_event(request, finished, arrival))
        return finished

    def _ended_by_server_limit(self, arrival: Arrival) -> bool:
        limit_ms = self._config.max_request_ms
        remaining_s = self._context.time_remaining()
        if limit_ms is None:
            return False
        if remaining_s is None or remaining_s > 0:
            return True
        return (time.monotonic_ns() - arrival.arrived_ns) / 1e6 >= limit_ms

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        await self._watch.write(self._context.write(message))
        self._num_messages += 1

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
            "messages": self._num_messages,
            "preprocess_ms": self._preprocess_ns // 1_000_000,
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


def check_generate(
    request: inference_pb2.GenerateRequest, info: EngineInfo, config: ServerConfig
) -> GenerationRequest:
    """Checks every field of a request but its name and model.

    Returns:
        The request without id, prompt and allotted time; its max_tokens is 0 when not named.

    Raises:
        InvalidFieldError: Fields are out of their range.
        FeatureUnimplementedError: A field asks for what this engine cannot do.
        EmptyPromptError: There is no prompt.
        PromptTooLongError: There are too many token ids.
    """
    findings = Findings()
    check_prompt(request, info, findings)
    sampling = check_sampling(request.sampling, info, findings, "sampling.")
    stopping = check_stopping(request.stopping, info, config, findings, "stopping.")
    output = check_output(request.output, info, findings, "output.")
    check_speculation(request.speculation, info, findings, "speculation.")
    check_extras(request, findings)
    findings.raise_any()
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


def allotted_time_ms(remaining_s: float | None, config: ServerConfig) -> int | None:
    """Returns the time that the engine may spend on a request, at least 1 ms; None has no limit.

    Args:
        remaining_s: Time until the call's deadline, seconds; None has none.
        config: Has the server's own limit.

    Raises:
        DeadlinePassedError: The deadline has passed.
    """
    limits_ms = [] if config.max_request_ms is None else [config.max_request_ms]
    if remaining_s is not None:
        if remaining_s <= 0:
            raise DeadlinePassedError("the deadline of the call passed before the engine was free")
        limits_ms.append(math.ceil(min(remaining_s * 1000, MAX_ALLOTTED_MS)))
    least_ms = min(limits_ms, default=None)
    return least_ms if least_ms is None or least_ms < MAX_ALLOTTED_MS else None

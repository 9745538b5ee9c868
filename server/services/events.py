"""Events and statistics of a backend in the words of the wire contract."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from deltaflash.v1 import generation_pb2
from server.backend import (
    EndCause,
    EngineInfo,
    Finished,
    GenerationRequest,
    GenerationStats,
    Progress,
    ProgressPhase,
    TokenEvent,
    TokenRecord,
)

MAX_DELTA_CHARS = 256 * 1024
"""At most 1 MiB of UTF-8: what was merged for a late reader stays below gRPC's default limit."""
MAX_DELTA_RECORDS = 512
"""Below 1 MiB with 20 candidates each, as long as a token has less than 80 bytes."""

_Reason = generation_pb2.FinishReason
REASONS = {
    EndCause.END_TOKEN: _Reason.FINISH_REASON_STOP,
    EndCause.STOP_STRING: _Reason.FINISH_REASON_STOP,
    EndCause.LENGTH: _Reason.FINISH_REASON_LENGTH,
    EndCause.CANCELLED: _Reason.FINISH_REASON_CANCELLED,
    EndCause.TIMED_OUT: _Reason.FINISH_REASON_DEADLINE,
    EndCause.REPETITION: _Reason.FINISH_REASON_REPETITION,
}
_Phase = generation_pb2.ProgressPhase
PHASES = {
    ProgressPhase.QUEUED: _Phase.PROGRESS_PHASE_QUEUED,
    ProgressPhase.ENCODING: _Phase.PROGRESS_PHASE_ENCODING,
    ProgressPhase.PREFILL: _Phase.PROGRESS_PHASE_PREFILL,
    ProgressPhase.DECODING: _Phase.PROGRESS_PHASE_DECODING,
}
PREPROCESSING = generation_pb2.Progress(phase=_Phase.PROGRESS_PHASE_PREPROCESSING)
QUEUED = generation_pb2.Progress(phase=_Phase.PROGRESS_PHASE_QUEUED)
DECODING = generation_pb2.Progress(phase=_Phase.PROGRESS_PHASE_DECODING)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came and when it was ready for the engine, monotonic clock, ns."""

    arrived_ns: int
    prepared_ns: int


def started_event(request: GenerationRequest, info: EngineInfo) -> generation_pb2.Started:
    """Returns the Started event of an accepted request."""
    sampling = request.sampling
    return generation_pb2.Started(
        request_id=request.request_id,
        model=info.name,
        prompt_tokens=len(request.prompt_ids),
        image_tokens=request.prompt_ids.count(info.image_token_id),
        max_tokens=request.max_tokens,
        seed=sampling.seed if sampling.temperature > 0 else None,
    )


def progress_event(progress: Progress) -> generation_pb2.Progress:
    """Returns a Progress event."""
    return generation_pb2.Progress(phase=PHASES[progress.phase], fraction=progress.fraction)


def delta_events(event: TokenEvent) -> Iterator[generation_pb2.Delta]:
    """Yields Delta events of bounded size, one as a rule; no record comes before its text."""
    text, records = event.text, event.records
    while len(text) > MAX_DELTA_CHARS:
        yield _delta(text[:MAX_DELTA_CHARS], ())
        text = text[MAX_DELTA_CHARS:]
    while text or records:
        yield _delta(text, records[:MAX_DELTA_RECORDS])
        text, records = "", records[MAX_DELTA_RECORDS:]


def _delta(text: str, records: tuple[TokenRecord, ...]) -> generation_pb2.Delta:
    delta = generation_pb2.Delta(text=text)
    for record in records:
        delta.tokens.add(
            id=record.id,
            piece=record.piece,
            logprob=record.logprob,
            rank=record.rank,
            candidates=[
                generation_pb2.TokenCandidate(id=c.id, piece=c.piece, logprob=c.logprob)
                for c in record.candidates
            ],
        )
    return delta


def finished_event(
    request: GenerationRequest, finished: Finished, arrival: Arrival, info: EngineInfo
) -> generation_pb2.Finished:
    """Returns the Finished event of a request."""
    match: generation_pb2.StopMatch | None = None
    if finished.stop_string is not None:
        match = generation_pb2.StopMatch(stop_string=finished.stop_string)
    elif finished.end_token_id is not None:
        if finished.end_token_id in request.stop_token_ids:
            match = generation_pb2.StopMatch(stop_token_id=finished.end_token_id)
        else:
            match = generation_pb2.StopMatch(end_token_id=finished.end_token_id)
    num_prompt, num_completion = len(request.prompt_ids), finished.num_completion_tokens
    return generation_pb2.Finished(
        finish_reason=REASONS[finished.cause],
        stop_match=match,
        usage=generation_pb2.Usage(
            prompt_tokens=num_prompt,
            image_tokens=request.prompt_ids.count(info.image_token_id),
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
        ),
        stats=stats_message(finished.stats, arrival),
    )


def stats_message(stats: GenerationStats, arrival: Arrival) -> generation_pb2.RequestStats:
    """Returns the statistics of a request that ends now."""
    now_ns = time.monotonic_ns()
    # A request that never ran waited until now.
    scheduled_ns = stats.first_scheduled_ns or now_ns
    message = generation_pb2.RequestStats(
        steps=stats.num_steps,
        drafted_tokens=stats.num_drafted,
        accepted_tokens=stats.num_accepted,
        queue_us=_us(arrival.prepared_ns, scheduled_ns),
        preprocess_us=_us(arrival.arrived_ns, arrival.prepared_ns),
        vision_us=_us(stats.vision_start_ns, stats.vision_end_ns),
        prefill_us=_us(stats.prefill_start_ns or stats.first_scheduled_ns, stats.first_token_ns),
        decode_us=_us(stats.first_token_ns, stats.last_token_ns),
        total_us=_us(arrival.arrived_ns, now_ns),
    )
    if stats.first_token_ns is not None:
        message.time_to_first_token_us = _us(arrival.arrived_ns, stats.first_token_ns)
    return message


def _us(begin_ns: int | None, end_ns: int | None) -> int:
    if begin_ns is None or end_ns is None:
        return 0
    return max(0, end_ns - begin_ns) // 1000

"""Errors of calls: one table from exception type to gRPC status, reason and details.

`proto/deltaflash/v1/errors.proto` says when each reason is given. Nothing looks into a message.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from server.backend import (
    CapacityExceededError,
    EngineLostError,
    QueueFullError,
    RequestRefusedError,
)
from server.images import ImageRefusedError

log = logging.getLogger(__name__)

ERROR_DOMAIN = "deltaflash"
# Details travel in one trailer, and gRPC cuts metadata at 8 KiB.
MAX_VIOLATIONS = 16
MAX_MESSAGE_CHARS = 512
MAX_METADATA_CHARS = 128


@dataclass(frozen=True, slots=True)
class Violation:
    """A bad field of a request: its path from the request message, and what is wrong."""

    field: str
    description: str


class ServiceError(Exception):
    """A call that the service itself refuses or ends.

    Attributes:
        metadata: Facts that the reason promises.
        violations: Bad fields.
        retry_delay_ms: When the caller may come again; None says nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[Violation] = (),
        retry_delay_ms: int | None = None,
    ) -> None:
        """Takes the message for people and the details for programs."""
        super().__init__(message)
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_delay_ms = retry_delay_ms


class InvalidFieldError(ServiceError):
    """Fields of the request are out of their range."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        """Takes at least one violation."""
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(f"{first.field}: {first.description}{more}", violations=violations)


class EmptyPromptError(ServiceError):
    """The prompt is absent or has no token."""


class PromptTooLongError(ServiceError):
    """The prompt has more tokens than the context takes."""

    def __init__(self, prompt_tokens: int, max_prompt_tokens: int) -> None:
        """Takes the two counts."""
        super().__init__(
            f"the prompt has {prompt_tokens} tokens or more, the limit is {max_prompt_tokens}",
            metadata={
                "prompt_tokens": str(prompt_tokens),
                "max_prompt_tokens": str(max_prompt_tokens),
            },
        )


class UnknownModelError(ServiceError):
    """The request names a model that is not served."""


class UnknownRequestError(ServiceError):
    """Cancel names a request that is neither live nor remembered."""


class RequestIdInUseError(ServiceError):
    """A live request has this id."""


class FeatureUnimplementedError(ServiceError):
    """The request asks for a feature that this server or engine does not have."""

    def __init__(self, feature: str) -> None:
        """Takes the path of the field, or of the call."""
        super().__init__(
            f"{feature}: not implemented by this server and engine", metadata={"feature": feature}
        )


class MessageTooLargeError(ServiceError):
    """The serialised request is over the limit."""


class HeldImagesFullError(ServiceError):
    """The pictures of all requests fill the memory for them."""

    def __init__(self, held_bytes: int, max_held_bytes: int) -> None:
        """Takes what would be held with this request, and the limit."""
        super().__init__(
            f"the pictures of this and the other requests need {held_bytes} bytes, the server has "
            f"{max_held_bytes} for them",
            metadata={"held_bytes": str(held_bytes), "max_held_bytes": str(max_held_bytes)},
        )


class EngineLoadingError(ServiceError):
    """The engine is not loaded yet."""


class DrainingError(ServiceError):
    """The server admits nothing new."""


class ClientTooOldError(ServiceError):
    """The caller's schema revision is not supported any more."""


class SlowReaderError(ServiceError):
    """The caller stopped reading its stream."""


class DeadlinePassedError(ServiceError):
    """The call's own deadline passed while it waited or ran."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """What the caller sees for a type of exception."""

    code: grpc.StatusCode
    reason: str


_Code = grpc.StatusCode
INTERNAL = StatusRow(_Code.INTERNAL, "INTERNAL_FAULT")
STATUS_TABLE: Mapping[type[Exception], StatusRow] = {
    InvalidFieldError: StatusRow(_Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    RequestRefusedError: StatusRow(_Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    EmptyPromptError: StatusRow(_Code.INVALID_ARGUMENT, "EMPTY_PROMPT"),
    PromptTooLongError: StatusRow(_Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    UnknownModelError: StatusRow(_Code.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownRequestError: StatusRow(_Code.NOT_FOUND, "UNKNOWN_REQUEST"),
    RequestIdInUseError: StatusRow(_Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE"),
    FeatureUnimplementedError: StatusRow(_Code.UNIMPLEMENTED, "FEATURE_UNIMPLEMENTED"),
    QueueFullError: StatusRow(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    HeldImagesFullError: StatusRow(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    CapacityExceededError: StatusRow(_Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED"),
    MessageTooLargeError: StatusRow(_Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    EngineLostError: StatusRow(_Code.UNAVAILABLE, "ENGINE_LOST"),
    EngineLoadingError: StatusRow(_Code.UNAVAILABLE, "ENGINE_LOADING"),
    DrainingError: StatusRow(_Code.UNAVAILABLE, "DRAINING"),
    ClientTooOldError: StatusRow(_Code.FAILED_PRECONDITION, "CLIENT_TOO_OLD"),
    SlowReaderError: StatusRow(_Code.ABORTED, "SLOW_READER"),
    DeadlinePassedError: StatusRow(_Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED"),
}


def describe(error: Exception) -> StatusRow:
    """Returns the table's row for an exception; a type without a row is a fault of the server."""
    if isinstance(error, ImageRefusedError):
        return StatusRow(_Code.INVALID_ARGUMENT, error.reason.value)
    for kind in type(error).__mro__:
        row = STATUS_TABLE.get(kind)
        if row is not None:
            return row
    return INTERNAL


def status_of(error: Exception, *, queue_retry_ms: int = 1000) -> status_pb2.Status:
    """Returns the status that the caller gets.

    Args:
        error: Why the call fails.
        queue_retry_ms: The delay named when the queue is full.
    """
    row, message = describe(error), message_of(error)
    violations: tuple[Violation, ...] = ()
    retry_ms = queue_retry_ms if row.reason == "QUEUE_FULL" else None
    match error:
        case ServiceError():
            violations = error.violations
            retry_ms = error.retry_delay_ms or retry_ms
        case RequestRefusedError():
            violations = (Violation("request", message),)
        case _:
            pass
    details = [
        error_details_pb2.ErrorInfo(
            reason=row.reason, domain=ERROR_DOMAIN, metadata=metadata_of(error)
        )
    ]
    if violations:
        bad = error_details_pb2.BadRequest()
        for violation in violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(
                field=violation.field[:MAX_METADATA_CHARS],
                description=violation.description[:MAX_METADATA_CHARS],
            )
        details.append(bad)
    if retry_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        box = any_pb2.Any()
        box.Pack(detail)
        packed.append(box)
    code: int = row.code.value[0]
    return status_pb2.Status(code=code, message=message, details=packed)


def log_fault(error: Exception) -> None:
    """Writes a fault of the server to the log; every other exception is the caller's matter."""
    if describe(error) is INTERNAL:
        log.error("internal fault", exc_info=error)


def message_of(error: Exception) -> str:
    """Returns what the caller reads; a fault of the server is told to its log alone."""
    if describe(error) is INTERNAL:
        return "a fault of the server; its log has the cause"
    return str(error)[:MAX_MESSAGE_CHARS]


def metadata_of(error: Exception) -> dict[str, str]:
    """Returns the facts that the reason of an exception promises."""
    facts: Mapping[str, str] = {}
    match error:
        case ServiceError() | ImageRefusedError():
            facts = error.metadata
        case QueueFullError():
            facts = {"queued": str(error.num_queued), "max_queued": str(error.max_queued)}
        case CapacityExceededError():
            facts = {"needed": str(error.needed_tokens), "available": str(error.available_tokens)}
        case _:
            pass
    return {key: value[:MAX_METADATA_CHARS] for key, value in facts.items()}


async def abort(
    context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    error: Exception,
    *,
    queue_retry_ms: int = 1000,
) -> NoReturn:
    """Ends a call with the status of an exception; a fault of the server is logged.

    Raises:
        grpc.aio.AbortError: It ends the handler.
        asyncio.CancelledError: The caller is gone.
    """
    log_fault(error)
    status = status_of(error, queue_retry_ms=queue_retry_ms)
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.InternalError as left:
        # The caller left while its status was on the way.
        raise asyncio.CancelledError from left
    raise AssertionError("abort_with_status returned")

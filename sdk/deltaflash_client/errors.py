"""Errors of calls, with the reason and details that the service gave."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

ERROR_DOMAIN = "deltaflash"
DETAILS_KEY = "grpc-status-details-bin"


class ErrorReason(enum.StrEnum):
    """Why a call failed; `proto/deltaflash/v1/errors.proto` says when each is given.

    UNSPECIFIED stands for a reason this client does not know.
    """

    UNSPECIFIED = "UNSPECIFIED"
    INVALID_FIELD = "INVALID_FIELD"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
    UNKNOWN_ENGINE = "UNKNOWN_ENGINE"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    FEATURE_UNIMPLEMENTED = "FEATURE_UNIMPLEMENTED"
    QUEUE_FULL = "QUEUE_FULL"
    CAPACITY_EXCEEDED = "CAPACITY_EXCEEDED"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    IMAGE_TOO_LARGE = "IMAGE_TOO_LARGE"
    IMAGE_INVALID = "IMAGE_INVALID"
    DOCUMENT_INVALID = "DOCUMENT_INVALID"
    TOO_MANY_PAGES = "TOO_MANY_PAGES"
    ENGINE_LOST = "ENGINE_LOST"
    ENGINE_LOADING = "ENGINE_LOADING"
    DRAINING = "DRAINING"
    SWAPPING = "SWAPPING"
    SWAP_IN_PROGRESS = "SWAP_IN_PROGRESS"
    ENGINE_REFUSED = "ENGINE_REFUSED"
    CLIENT_TOO_OLD = "CLIENT_TOO_OLD"
    BAD_CREDENTIALS = "BAD_CREDENTIALS"
    FORBIDDEN = "FORBIDDEN"
    SLOW_READER = "SLOW_READER"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    INTERNAL_FAULT = "INTERNAL_FAULT"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path from the request message, and what is wrong."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What a status says besides its code.

    Attributes:
        reason: Why, for programs; None when no service code gave one (the network, a proxy, the
            gRPC library itself).
        metadata: Facts named with the reason.
        field_violations: The bad fields, with INVALID_FIELD.
        retry_delay_s: When to try again at the earliest, seconds; None when not said.
    """

    reason: ErrorReason | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    field_violations: tuple[FieldViolation, ...] = ()
    retry_delay_s: float | None = None


class DeltaFlashError(Exception):
    """A call failed.

    Attributes:
        code: The gRPC status code.
        message: The text of the status, for people.
        reason: Why, for programs; None when no service code gave one.
        metadata: Facts named with the reason.
        field_violations: The bad fields, with INVALID_FIELD.
        retry_delay_s: When to try again at the earliest, seconds; None when not said.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        details: ErrorDetails | None = None,
    ) -> None:
        """Takes a status apart.

        Args:
            message: The text of the status.
            code: The gRPC status code; None is the code of the class.
            details: What else the status says.
        """
        details = details or ErrorDetails()
        self.code = code or self.default_code
        self.message = message
        self.reason = details.reason
        self.metadata = details.metadata
        self.field_violations = details.field_violations
        self.retry_delay_s = details.retry_delay_s
        reason = f" {details.reason}" if details.reason else ""
        violations = [f"{v.field}: {v.description}" for v in details.field_violations]
        # Our server's text has the first of them.
        fields = "".join(f"; {violation}" for violation in violations if violation not in message)
        super().__init__(f"{self.code.name}{reason}: {message}{fields}")


class InvalidArgumentError(DeltaFlashError):
    """The request is wrong; the same request will fail again."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(DeltaFlashError):
    """The named model, request or engine does not exist."""

    default_code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(DeltaFlashError):
    """A live request has this id."""

    default_code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(DeltaFlashError):
    """The server is not in the state that the call needs."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(DeltaFlashError):
    """The call lost against another one, or its reader was too slow."""

    default_code = grpc.StatusCode.ABORTED


class ResourceExhaustedError(DeltaFlashError):
    """A limit was met; `reason` tells a full queue from a request that is too large."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnauthenticatedError(DeltaFlashError):
    """The bearer token is absent or wrong."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(DeltaFlashError):
    """The caller may not use this service."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class UnimplementedError(DeltaFlashError):
    """The server does not have what the request asks for."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class UnavailableError(DeltaFlashError):
    """The server cannot be reached, is draining, or lost its engine."""

    default_code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(DeltaFlashError):
    """The call's timeout passed."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(DeltaFlashError):
    """The call was cancelled: its stream was closed, or something between ended it."""

    default_code = grpc.StatusCode.CANCELLED


class DataLossError(DeltaFlashError):
    """Data was lost or damaged."""

    default_code = grpc.StatusCode.DATA_LOSS


class InternalError(DeltaFlashError):
    """A fault of the server, or a status without a class of its own."""

    default_code = grpc.StatusCode.INTERNAL


class ProtocolError(InternalError):
    """The server's stream breaks the contract."""


_CLASSES: dict[grpc.StatusCode, type[DeltaFlashError]] = {
    cls.default_code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        AbortedError,
        ResourceExhaustedError,
        UnauthenticatedError,
        PermissionDeniedError,
        UnimplementedError,
        UnavailableError,
        DeadlineExceededError,
        RequestCancelledError,
        DataLossError,
        InternalError,
    )
}


def parse_details(trailers: Iterable[tuple[str, str | bytes]]) -> ErrorDetails:
    """Reads the google.rpc details out of a call's trailing metadata.

    Details of other types and of other domains are skipped, and so is a trailer that cannot be
    parsed: an error must not hide behind its own description.

    Args:
        trailers: Pairs of key and value.
    """
    status = status_pb2.Status()
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                return ErrorDetails()
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_info = error_details_pb2.RetryInfo()
    reason: ErrorReason | None = None
    metadata: dict[str, str] = {}
    violations: list[FieldViolation] = []
    retry_delay_s: float | None = None
    for detail in status.details:
        try:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                known = info.reason in ErrorReason.__members__
                reason = ErrorReason(info.reason) if known else ErrorReason.UNSPECIFIED
                metadata = dict(info.metadata)
            elif detail.Unpack(bad_request):
                violations = [
                    FieldViolation(v.field, v.description) for v in bad_request.field_violations
                ]
            elif detail.Unpack(retry_info):
                delay = retry_info.retry_delay
                retry_delay_s = max(0.0, delay.seconds + delay.nanos * 1e-9)
        except DecodeError:
            continue
    return ErrorDetails(reason, metadata, tuple(violations), retry_delay_s)


def error_of_code(number: int, message: str, details: ErrorDetails) -> DeltaFlashError:
    """Returns the exception for a status that was told in an event.

    Args:
        number: The status code as a number of google.rpc.Code.
        message: The text of the status.
        details: What else the status says.
    """
    codes = {code.value[0]: code for code in grpc.StatusCode}
    code = codes.get(number, grpc.StatusCode.UNKNOWN)
    return _CLASSES.get(code, InternalError)(message, code=code, details=details)


def error_from_status(
    code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> DeltaFlashError:
    """Returns the exception for a status that is not OK.

    Args:
        code: The status code.
        message: The text of the status.
        trailers: The call's trailing metadata.
    """
    cls = _CLASSES.get(code, InternalError)
    return cls(message or "", code=code, details=parse_details(trailers or ()))

"""Messages of the wire as values of this package; what it does not know becomes UNSPECIFIED."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from deltaflash.v1 import (
    control_pb2,
    documents_pb2,
    errors_pb2,
    generation_pb2,
    inference_pb2,
)
from deltaflash_client.errors import (
    DeltaFlashError,
    ErrorDetails,
    ErrorReason,
    ProtocolError,
    error_of_code,
)
from deltaflash_client.events import (
    Delta,
    DocumentEvent,
    DocumentFinished,
    DocumentStarted,
    Finished,
    FinishReason,
    GenerationEvent,
    PageEvent,
    PageFailed,
    PageInfo,
    Progress,
    ProgressPhase,
    RequestStats,
    Started,
    StopMatch,
    TokenCandidate,
    TokenRecord,
    Usage,
)
from deltaflash_client.server_info import (
    CancelStatus,
    Capability,
    DrainState,
    Limits,
    LoadInfo,
    ModelInfo,
    ServerInfo,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataclassT = TypeVar("DataclassT", bound=DataclassInstance)
else:
    DataclassT = TypeVar("DataclassT")
EnumT = TypeVar("EnumT", bound=enum.StrEnum)


def _enum_table(file: FileDescriptor, cls: type[EnumT], prefix: str) -> Mapping[int, EnumT]:
    """Returns number on the wire -> member of `cls`, which has the enum's name and its values'."""
    values = file.enum_types_by_name[cls.__name__].values_by_name
    return {values[f"{prefix}_{member.name}"].number: member for member in cls}


_PHASES = _enum_table(generation_pb2.DESCRIPTOR, ProgressPhase, "PROGRESS_PHASE")
_FINISH_REASONS = _enum_table(generation_pb2.DESCRIPTOR, FinishReason, "FINISH_REASON")
_CAPABILITIES = _enum_table(control_pb2.DESCRIPTOR, Capability, "CAPABILITY")
_CANCEL_STATUSES = _enum_table(control_pb2.DESCRIPTOR, CancelStatus, "CANCEL_STATUS")


def mirror(cls: type[DataclassT], message: Message) -> DataclassT:
    """Returns a dataclass whose fields are scalars, or lists of them, named as in the message.

    Args:
        cls: The dataclass.
        message: The message; an absent `optional` field becomes None, a repeated one a tuple.
    """
    values: dict[str, object] = {}
    by_name = message.DESCRIPTOR.fields_by_name
    for field in dataclasses.fields(cls):
        descriptor = by_name[field.name]
        value = getattr(message, field.name)
        if descriptor.is_repeated:
            value = tuple(value)
        elif descriptor.has_presence and not message.HasField(field.name):
            value = None
        values[field.name] = value
    return cls(**values)


def _token_record(record: generation_pb2.TokenRecord) -> TokenRecord:
    return TokenRecord(
        id=record.id,
        piece=record.piece,
        logprob=record.logprob if record.HasField("logprob") else None,
        rank=record.rank if record.HasField("rank") else None,
        candidates=tuple(TokenCandidate(c.id, c.piece, c.logprob) for c in record.candidates),
    )


def _stop_match(match: generation_pb2.StopMatch) -> StopMatch:
    match match.WhichOneof("match"):
        case "end_token_id":
            return StopMatch(end_token_id=match.end_token_id)
        case "stop_string":
            return StopMatch(stop_string=match.stop_string)
        case "stop_token_id":
            return StopMatch(stop_token_id=match.stop_token_id)
        case _:
            return StopMatch()


def _finished(finished: generation_pb2.Finished) -> Finished:
    has_match = finished.HasField("stop_match")
    return Finished(
        finish_reason=_FINISH_REASONS.get(finished.finish_reason, FinishReason.UNSPECIFIED),
        stop_match=_stop_match(finished.stop_match) if has_match else None,
        usage=mirror(Usage, finished.usage),
        stats=mirror(RequestStats, finished.stats),
    )


def generation_event(
    message: inference_pb2.GenerateResponse
    | documents_pb2.ParsePageResponse
    | documents_pb2.ParseDocumentResponse,
) -> GenerationEvent | None:
    """Returns the event of one answer, None for a kind that this client does not know."""
    match message.WhichOneof("event"):
        case "delta":
            delta = message.delta
            return Delta(delta.text, tuple(_token_record(record) for record in delta.tokens))
        case "started":
            return mirror(Started, message.started)
        case "progress":
            progress = message.progress
            return Progress(
                phase=_PHASES.get(progress.phase, ProgressPhase.UNSPECIFIED),
                fraction=progress.fraction if progress.HasField("fraction") else None,
            )
        case "finished":
            return _finished(message.finished)
        case "page_info" if not isinstance(message, inference_pb2.GenerateResponse):
            return mirror(PageInfo, message.page_info)
        case _:
            return None


def _page_error(failed: documents_pb2.PageFailed) -> DeltaFlashError:
    try:
        name = errors_pb2.ErrorReason.Name(failed.reason).removeprefix("ERROR_REASON_")
    except ValueError:
        name = ErrorReason.UNSPECIFIED
    return error_of_code(
        failed.code, failed.message, ErrorDetails(ErrorReason(name), dict(failed.metadata))
    )


def document_event(message: documents_pb2.ParseDocumentResponse) -> DocumentEvent | None:
    """Returns the event of a document, None for a kind that this client does not know.

    Raises:
        ProtocolError: An event of a page does not say which page.
    """
    match message.WhichOneof("event"):
        case "document_started":
            return mirror(DocumentStarted, message.document_started)
        case "document_finished":
            finished = message.document_finished
            return DocumentFinished(
                num_pages=finished.num_pages,
                usage=mirror(Usage, finished.usage),
                total_us=finished.total_us,
                num_failed_pages=finished.num_failed_pages,
                cancelled=finished.cancelled,
            )
        case kind:
            event: GenerationEvent | PageFailed | None = (
                PageFailed(_page_error(message.page_failed))
                if kind == "page_failed"
                else generation_event(message)
            )
            if event is None:
                return None
            if not message.HasField("page_index"):
                raise ProtocolError(f"an event of a page without page_index: {event}")
            return PageEvent(message.page_index, event)


def server_info(message: control_pb2.ServerInfo) -> ServerInfo:
    """Returns what the server says about itself."""
    return ServerInfo(
        version=message.version,
        schema_revision=message.schema_revision,
        minimum_client_revision=message.minimum_client_revision,
        limits=mirror(Limits, message.limits),
        capabilities=frozenset(
            _CAPABILITIES.get(c, Capability.UNSPECIFIED) for c in message.capabilities
        ),
        default_max_tokens=message.default_max_tokens,
    )


def model_info(message: control_pb2.ModelInfo) -> ModelInfo:
    """Returns what the server says about its engine."""
    return mirror(ModelInfo, message)


def load_info(message: control_pb2.LoadInfo) -> LoadInfo:
    """Returns what the server says about its load."""
    return mirror(LoadInfo, message)


def drain_state(message: control_pb2.DrainResponse) -> DrainState:
    """Returns what a drain still has to finish."""
    return mirror(DrainState, message)


def cancel_status(message: control_pb2.CancelResponse) -> CancelStatus:
    """Returns what `cancel` found."""
    return _CANCEL_STATUSES.get(message.status, CancelStatus.UNSPECIFIED)

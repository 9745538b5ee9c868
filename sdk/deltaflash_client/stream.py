"""Streams of the blocking client."""

import abc
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc

from deltaflash.v1 import documents_pb2, inference_pb2
from deltaflash_client import _decode
from deltaflash_client.completion import Completion, Document, DocumentTranscript, Transcript
from deltaflash_client.errors import (
    DeltaFlashError,
    ProtocolError,
    RequestCancelledError,
    error_from_status,
)
from deltaflash_client.events import (
    Delta,
    DocumentEvent,
    DocumentFinished,
    Finished,
    GenerationEvent,
)
from deltaflash_client.retry import Attempts

MessageT = TypeVar("MessageT")
MessageT_co = TypeVar("MessageT_co", covariant=True)
EventT = TypeVar("EventT")


class Call(Protocol[MessageT_co]):
    """What a stream uses of one gRPC call."""

    def __next__(self) -> MessageT_co:
        """Blocks until the next message; raises StopIteration at the end."""

    def cancel(self) -> object:
        """Ends the call; harmless after its end."""


def error_from_rpc(error: grpc.RpcError) -> DeltaFlashError:
    """Returns the exception of this package for one of gRPC."""
    trailers = [(pair.key, pair.value) for pair in error.trailing_metadata() or ()]
    return error_from_status(error.code(), error.details(), trailers)


class EventStream(abc.ABC, Generic[MessageT, EventT]):
    """The events of one request, read by one thread.

    It ends the request on the server when it is closed, when a `with` block ends, and when the last
    reference to it goes: gRPC's own call object, held by nobody else, does the last. `close` may be
    called from any thread. Once it has failed, reading on raises the same error again.
    """

    def __init__(self, start: Callable[[float | None], Call[MessageT]], attempts: Attempts) -> None:
        """Sends the request.

        Args:
            start: Makes one attempt; its argument is the time left, seconds.
            attempts: Counts the attempts and decides on the next.
        """
        self._start = start
        self._attempts = attempts
        self._begun = False
        self._ended = False
        self._failure: DeltaFlashError | None = None
        self._close_requested = threading.Event()
        self._lock = threading.Lock()
        self._call = start(attempts.remaining_s())

    @abc.abstractmethod
    def _decode(self, message: MessageT) -> EventT | None:
        """Returns the event of a message, None for one that this client does not know."""

    @abc.abstractmethod
    def _is_last(self, event: EventT) -> bool:
        """Whether the contract allows nothing after this event."""

    @abc.abstractmethod
    def _record(self, event: EventT) -> None:
        """Takes the event into the transcript; raises ProtocolError where it must not come."""

    def __iter__(self) -> Self:
        """Returns itself: a stream is read once."""
        return self

    def __next__(self) -> EventT:
        """Blocks until the next event.

        Raises:
            DeltaFlashError: The request failed, or the stream was closed before its end.
        """
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopIteration
        try:
            event = self._receive_event()
            self._record(event)
            if self._is_last(event):
                self._receive_end()
        except DeltaFlashError as error:
            self._failure = error
            self.close()
            raise
        except BaseException:  # an interrupt must not leave the request running
            self.close()
            raise
        return event

    def _receive_event(self) -> EventT:
        event = self._receive()
        if event is None:
            raise ProtocolError("the stream ended with status OK before its last event")
        return event

    def _receive(self) -> EventT | None:
        """Blocks until the next event, retrying as allowed; returns None at the end."""
        while True:
            if self._close_requested.is_set():
                raise RequestCancelledError("the stream was closed")
            try:
                message = next(self._call)
            except StopIteration:
                return None
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if not self._close_requested.is_set():
                    delay_s = None if self._begun else self._attempts.delay_before_next_s(error)
                    if delay_s is None:
                        raise error from None
                    self._restart(delay_s)
                continue
            self._begun = True
            event = self._decode(message)
            if event is not None:
                return event

    def _receive_end(self) -> None:
        """Reads the status behind the last event, so that closing cancels no finished request."""
        event = self._receive()
        if event is not None:
            raise ProtocolError(f"an event after the last one: {event}")
        self._ended = True

    def _restart(self, delay_s: float) -> None:
        self._close_requested.wait(delay_s)
        with self._lock:
            if not self._close_requested.is_set():
                self._call = self._start(self._attempts.remaining_s())

    def close(self) -> None:
        """Ends the request on the server; harmless after its end and when called again."""
        with self._lock:
            self._close_requested.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        """Returns itself; the end of the block closes it."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the stream."""
        self.close()


class GenerationStream(
    EventStream[inference_pb2.GenerateResponse | documents_pb2.ParsePageResponse, GenerationEvent]
):
    """The events of one answer."""

    def __init__(
        self,
        start: Callable[
            [float | None], Call[inference_pb2.GenerateResponse | documents_pb2.ParsePageResponse]
        ],
        attempts: Attempts,
    ) -> None:
        """Sends the request; see EventStream."""
        self._transcript = Transcript()
        super().__init__(start, attempts)

    def _decode(
        self, message: inference_pb2.GenerateResponse | documents_pb2.ParsePageResponse
    ) -> GenerationEvent | None:
        return _decode.generation_event(message)

    def _is_last(self, event: GenerationEvent) -> bool:
        return isinstance(event, Finished)

    def _record(self, event: GenerationEvent) -> None:
        self._transcript.add(event)

    def text(self) -> Iterator[str]:
        """Yields the text as it comes; closes the stream when it ends or is left."""
        with self:
            for event in self:
                if isinstance(event, Delta) and event.text:
                    yield event.text

    def collect(self) -> Completion:
        """Reads to the end and returns the whole answer, what was read before included.

        Raises:
            DeltaFlashError: The request failed.
        """
        with self:
            for _ in self:
                pass
        return self._transcript.completion()


class DocumentStream(EventStream[documents_pb2.ParseDocumentResponse, DocumentEvent]):
    """The events of a document and its pages."""

    def __init__(
        self,
        start: Callable[[float | None], Call[documents_pb2.ParseDocumentResponse]],
        attempts: Attempts,
    ) -> None:
        """Sends the request; see EventStream."""
        self._transcript = DocumentTranscript()
        super().__init__(start, attempts)

    def _decode(self, message: documents_pb2.ParseDocumentResponse) -> DocumentEvent | None:
        return _decode.document_event(message)

    def _is_last(self, event: DocumentEvent) -> bool:
        return isinstance(event, DocumentFinished)

    def _record(self, event: DocumentEvent) -> None:
        self._transcript.add(event)

    def collect(self) -> Document:
        """Reads to the end and returns all pages, what was read before included.

        Pages that failed are among `Document.failed_pages`; they raise nothing.

        Raises:
            DeltaFlashError: The document as a whole failed.
        """
        with self:
            for _ in self:
                pass
        return self._transcript.document()

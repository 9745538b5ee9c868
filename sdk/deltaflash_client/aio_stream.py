"""Streams of the asyncio client."""

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio

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


class AsyncCall(Protocol[MessageT_co]):
    """What a stream uses of one gRPC call."""

    async def read(self) -> MessageT_co | object:
        """Returns the next message, `grpc.aio.EOF` at the end."""

    def cancel(self) -> bool:
        """Ends the call; harmless after its end."""


def error_from_aio_rpc(error: grpc.aio.AioRpcError) -> DeltaFlashError:
    """Returns the exception of this package for one of grpc.aio."""
    return error_from_status(error.code(), error.details(), error.trailing_metadata())


def task_is_cancelled() -> bool:
    """Whether somebody cancels the running task.

    grpc.aio raises CancelledError too when a call ended with the status CANCELLED, and only this
    tells the two apart.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncEventStream(abc.ABC, Generic[MessageT, EventT]):
    """The events of one request, read by one task.

    It ends the request on the server when it is closed, when an `async with` block ends, when the
    reading task is cancelled, and when the last reference to it goes; grpc.aio itself does not do
    the last (grpc/grpc#43462). Once it has failed, reading on raises the same error again.
    """

    _dropped_open = False  # until __init__ is through, for __del__

    def __init__(
        self, start: Callable[[float | None], AsyncCall[MessageT]], attempts: Attempts
    ) -> None:
        """Sends the request.

        Args:
            start: Makes one attempt; its argument is the time left, seconds.
            attempts: Counts the attempts and decides on the next.
        """
        self._loop = asyncio.get_running_loop()
        self._start = start
        self._attempts = attempts
        self._begun = False
        self._ended = False
        self._failure: DeltaFlashError | None = None
        self._close_requested = asyncio.Event()
        self._call = start(attempts.remaining_s())
        self._dropped_open = True

    @abc.abstractmethod
    def _decode(self, message: MessageT) -> EventT | None:
        """Returns the event of a message, None for one that this client does not know."""

    @abc.abstractmethod
    def _is_last(self, event: EventT) -> bool:
        """Whether the contract allows nothing after this event."""

    @abc.abstractmethod
    def _record(self, event: EventT) -> None:
        """Takes the event into the transcript; raises ProtocolError where it must not come."""

    def __aiter__(self) -> Self:
        """Returns itself: a stream is read once."""
        return self

    async def __anext__(self) -> EventT:
        """Waits for the next event.

        Raises:
            DeltaFlashError: The request failed, or the stream was closed before its end.
        """
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._receive_event()
            self._record(event)
            if self._is_last(event):
                await self._receive_end()
        except DeltaFlashError as error:
            self._failure = error
            self._cancel()
            raise
        except BaseException:  # a cancelled task must not leave the request running
            self._cancel()
            raise
        return event

    async def _read(self) -> MessageT | None:
        """Reads one message; returns None at the end."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_aio_rpc(error) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            text = "the stream was closed" if self._close_requested.is_set() else "cancelled"
            raise RequestCancelledError(text) from None
        return None if message is grpc.aio.EOF else message  # type: ignore[return-value]

    async def _receive_event(self) -> EventT:
        event = await self._receive()
        if event is None:
            raise ProtocolError("the stream ended with status OK before its last event")
        return event

    async def _receive(self) -> EventT | None:
        """Waits for the next event, retrying as allowed; returns None at the end."""
        while True:
            if self._close_requested.is_set():
                raise RequestCancelledError("the stream was closed")
            try:
                message = await self._read()
            except DeltaFlashError as error:
                if not self._close_requested.is_set():
                    delay_s = None if self._begun else self._attempts.delay_before_next_s(error)
                    if delay_s is None:
                        raise
                    await self._restart(delay_s)
                continue
            if message is None:
                return None
            self._begun = True
            event = self._decode(message)
            if event is not None:
                return event

    async def _receive_end(self) -> None:
        """Reads the status behind the last event, so that closing cancels no finished request."""
        event = await self._receive()
        if event is not None:
            raise ProtocolError(f"an event after the last one: {event}")
        self._ended = True
        self._dropped_open = False

    async def _restart(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._close_requested.wait(), delay_s)
        if not self._close_requested.is_set():
            self._call = self._start(self._attempts.remaining_s())

    def _cancel(self) -> None:
        self._close_requested.set()
        self._dropped_open = False
        self._call.cancel()

    async def aclose(self) -> None:
        """Ends the request on the server; harmless after its end and when called again."""
        self._cancel()

    async def __aenter__(self) -> Self:
        """Returns itself; the end of the block closes it."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the stream."""
        self._cancel()

    def __del__(self) -> None:
        """Ends the request of a stream that was dropped before its end.

        The garbage collector may run in any thread, and a call belongs to its loop.
        """
        if self._dropped_open:
            with contextlib.suppress(Exception):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._call.cancel)


class AsyncGenerationStream(
    AsyncEventStream[
        inference_pb2.GenerateResponse | documents_pb2.ParsePageResponse, GenerationEvent
    ]
):
    """The events of one answer."""

    def __init__(
        self,
        start: Callable[
            [float | None],
            AsyncCall[inference_pb2.GenerateResponse | documents_pb2.ParsePageResponse],
        ],
        attempts: Attempts,
    ) -> None:
        """Sends the request; see AsyncEventStream."""
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

    async def text(self) -> AsyncIterator[str]:
        """Yields the text as it comes; closes the stream when it ends or is left."""
        async with self:
            async for event in self:
                if isinstance(event, Delta) and event.text:
                    yield event.text

    async def collect(self) -> Completion:
        """Reads to the end and returns the whole answer, what was read before included.

        Raises:
            DeltaFlashError: The request failed.
        """
        async with self:
            async for _ in self:
                pass
        return self._transcript.completion()


class AsyncDocumentStream(AsyncEventStream[documents_pb2.ParseDocumentResponse, DocumentEvent]):
    """The events of a document and its pages."""

    def __init__(
        self,
        start: Callable[[float | None], AsyncCall[documents_pb2.ParseDocumentResponse]],
        attempts: Attempts,
    ) -> None:
        """Sends the request; see AsyncEventStream."""
        self._transcript = DocumentTranscript()
        super().__init__(start, attempts)

    def _decode(self, message: documents_pb2.ParseDocumentResponse) -> DocumentEvent | None:
        return _decode.document_event(message)

    def _is_last(self, event: DocumentEvent) -> bool:
        return isinstance(event, DocumentFinished)

    def _record(self, event: DocumentEvent) -> None:
        self._transcript.add(event)

    async def collect(self) -> Document:
        """Reads to the end and returns all pages, what was read before included.

        Pages that failed are among `Document.failed_pages`; they raise nothing.

        Raises:
            DeltaFlashError: The document as a whole failed.
        """
        async with self:
            async for _ in self:
                pass
        return self._transcript.document()

"""Events to one caller: one message at a time, whichever task of the call it comes from."""

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

from deltaflash.v1 import documents_pb2, generation_pb2
from server.services.call import CallContext
from server.write_watch import WriteWatch

FIELDS: Mapping[type[Message], str] = {
    generation_pb2.Started: "started",
    generation_pb2.Progress: "progress",
    generation_pb2.Delta: "delta",
    generation_pb2.Finished: "finished",
    documents_pb2.PageInfo: "page_info",
    documents_pb2.PageFailed: "page_failed",
    documents_pb2.DocumentStarted: "document_started",
    documents_pb2.DocumentFinished: "document_finished",
}
"""The field of a response that holds an event."""


class CallLine:
    """The stream of one call, shared by the tasks that write to it."""

    def __init__(self, context: CallContext, limit_s: float) -> None:
        """Takes the call.

        Args:
            context: The call.
            limit_s: A write that lasts longer ends the call.
        """
        self.context = context
        self.limit_s = limit_s
        self.lock = asyncio.Lock()
        # A write that was given up may still be under way: none may follow.
        self.broken = False


class EventWriter:
    """Writes the events of one task; use it as a context, in that task."""

    def __init__(self, line: CallLine, response: Callable[..., Message], **fields: int) -> None:
        """Takes the way to the caller.

        Args:
            line: The stream of the call.
            response: Type of its messages.
            **fields: What every message says besides its event.
        """
        self._line = line
        self._response = response
        self._fields = fields
        self._watch = WriteWatch(line.limit_s)

    def __enter__(self) -> Self:
        """Starts the watch over the writes."""
        self._watch.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the watch."""
        self._watch.__exit__(exc_type, exc, traceback)

    async def write(self, event: Message) -> None:
        """Writes an event.

        Raises:
            SlowReaderError: The caller did not read for too long.
            asyncio.CancelledError: The caller is gone, or another task's write failed.
        """
        fields: dict[str, Any] = {FIELDS[type(event)]: event, **self._fields}
        message = self._response(**fields)
        line = self._line
        async with line.lock:
            if line.broken:
                raise asyncio.CancelledError
            line.broken = True
            self._watch.begin()
            try:
                await line.context.write(message)
            except BaseException as error:
                if (meaning := self._watch.meaning(error)) is not error:
                    raise meaning from error
                raise
            self._watch.end()
            line.broken = False

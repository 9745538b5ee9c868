"""The hand-over from an engine's thread-free loop side to the one reader of a generation."""

import asyncio
from collections.abc import Callable

from server.backend import TokenEvent, merge_events


class Mailbox:
    """A `Generation` that a backend fills on the event loop, once for each engine step.

    A reader that is late finds its pending events merged into one, so that what waits for it is
    one text, with the newest progress, and not a queue of messages.
    """

    __slots__ = ("_closed", "_ended", "_error", "_loop", "_on_cancel", "_pending", "_waiter")

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        """Takes the way to the engine.

        Args:
            on_cancel: Asks the engine to end the request; called at most while it is not finished.
        """
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._pending: list[TokenEvent] = []
        self._ended = False
        self._error: Exception | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """True once the reader has left."""
        return self._closed

    def put(self, event: TokenEvent) -> None:
        """Adds an event; dropped when the reader has left."""
        if event.finished is not None:
            self._ended = True
        if not self._closed:
            self._pending.append(event)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the generation with an error, which the reader gets after what is pending."""
        self._error = error
        self._wake()

    def cancel(self) -> None:
        """Asks the engine to end the request; harmless when it has ended."""
        if not self._ended and self._error is None:
            self._on_cancel()

    def close(self) -> None:
        """The reader leaves: cancels what still runs, drops what is pending."""
        if self._closed:
            return
        self.cancel()
        self._closed = True
        self._pending.clear()

    async def next_event(self) -> TokenEvent:
        """Waits for events and returns all that are pending as one.

        Raises:
            EngineLostError: The backend failed the generation.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._pending = self._pending, []
        return events[0] if len(events) == 1 else merge_events(events)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

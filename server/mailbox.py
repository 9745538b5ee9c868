"""The hand-over from an engine's thread-free loop side to the one reader of a generation."""

import asyncio
from collections.abc import Callable

from server.backend import Finished, Progress, TokenEvent, TokenRecord


class Mailbox:
    """A `Generation` that a backend fills on the event loop, once for each engine step.

    A reader that is late finds its pending events merged into one, so that what waits for it is
    one text, with the newest progress, and not a queue of messages.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_finished",
        "_on_cancel",
        "_progress",
        "_records",
        "_text",
        "_token_ids",
        "_waiter",
    )

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        """Takes the way to the engine.

        Args:
            on_cancel: Asks the engine to end the request; called at most while it is not finished.
        """
        self._on_cancel = on_cancel
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._records: list[TokenRecord] = []
        self._finished: Finished | None = None
        self._progress: Progress | None = None
        self._error: Exception | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """True once the reader has left."""
        return self._closed

    def put(self, event: TokenEvent) -> None:
        """Adds an event; dropped when the reader has left."""
        if self._closed:
            self._finished = self._finished or event.finished
            return
        if event.text:
            self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        self._records.extend(event.records)
        self._progress = event.progress or self._progress
        self._finished = self._finished or event.finished
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the generation with an error, which the reader gets after what is pending."""
        self._error = error
        self._wake()

    def cancel(self) -> None:
        """Asks the engine to end the request; harmless when it has ended."""
        if self._finished is None and self._error is None:
            self._on_cancel()

    def close(self) -> None:
        """The reader leaves: cancels what still runs, drops what is pending."""
        if self._closed:
            return
        self.cancel()
        self._closed = True
        self._drop()

    async def next_event(self) -> TokenEvent:
        """Waits for events and returns all that are pending as one.

        Raises:
            EngineLostError: The backend failed the generation.
        """
        while not (self._has_news() or self._error):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._has_news():
            raise self._error
        event = TokenEvent(
            "".join(self._text),
            tuple(self._token_ids),
            self._finished,
            tuple(self._records),
            self._progress,
        )
        self._drop()
        return event

    def _drop(self) -> None:
        self._text.clear()
        self._token_ids.clear()
        self._records.clear()
        self._progress = None

    def _has_news(self) -> bool:
        return bool(self._text or self._token_ids or self._finished or self._progress)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

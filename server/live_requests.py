"""The requests in the house: admission by count, names, cancelling, waiting for the last."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from server.backend import Generation, QueueFullError
from server.errors import RequestIdInUseError, UnknownRequestError

NUM_REMEMBERED = 1024
"""How many ended requests Cancel still knows."""


class LiveRequest:
    """One admitted request."""

    __slots__ = ("_generation", "cancelled", "failure", "request_id")

    def __init__(self, request_id: str) -> None:
        """Takes its name."""
        self.request_id = request_id
        self.cancelled = False
        self.failure: Exception | None = None
        self._generation: Generation | None = None

    def attach(self, generation: Generation) -> None:
        """Names the generation that a cancel has to end."""
        self._generation = generation
        if self.cancelled:
            generation.cancel()

    def cancel(self, failure: Exception | None = None) -> None:
        """Ends the request, before or after it reached the engine.

        Args:
            failure: What the caller gets instead of a Finished event.
        """
        self.cancelled = True
        self.failure = self.failure or failure
        if self._generation is not None:
            self._generation.cancel()


class LiveRequests:
    """All admitted requests of a server by name."""

    def __init__(self) -> None:
        """Starts empty."""
        self._live: dict[str, LiveRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Counts the requests in the house."""
        return len(self._live)

    @contextmanager
    def admit(
        self, request_id: str | None, max_running: int, max_queued: int
    ) -> Iterator[LiveRequest]:
        """Holds a place for one request as long as the context lasts.

        Args:
            request_id: The caller's name for it; None makes one up.
            max_running: Requests that the engine runs at once.
            max_queued: Requests that may wait beyond those, tokenisation included.

        Raises:
            RequestIdInUseError: A live request has this name.
            QueueFullError: Every place is taken.
        """
        if request_id is None:
            request_id = secrets.token_hex(16)
        if request_id in self._live:
            raise RequestIdInUseError(
                f"a live request has the id {request_id}", metadata={"request_id": request_id}
            )
        if len(self._live) >= max_running + max_queued:
            raise QueueFullError(len(self._live) - max_running, max_queued)
        live = LiveRequest(request_id)
        self._live[request_id] = live
        self._idle.clear()
        try:
            yield live
        finally:
            del self._live[request_id]
            self._ended[request_id] = None
            self._ended.move_to_end(request_id)
            if len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)
            if not self._live:
                self._idle.set()

    def cancel(self, request_id: str) -> bool:
        """Ends a request.

        Returns:
            True when it was live, False when it had ended before.

        Raises:
            UnknownRequestError: It is neither live nor remembered.
        """
        live = self._live.get(request_id)
        if live is not None:
            live.cancel()
            return True
        if request_id in self._ended:
            return False
        raise UnknownRequestError(
            "no live or remembered request has this id", metadata={"request_id": request_id}
        )

    def cancel_all(self, failure: Exception) -> None:
        """Ends every request; their callers get `failure`."""
        for live in list(self._live.values()):
            live.cancel(failure)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in the house.

        Returns:
            False when the time was over first.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

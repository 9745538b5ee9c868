"""The requests in the house: admission by count and memory, names, cancelling, the last end."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from server.backend import QueueFullError
from server.errors import HeldImagesFullError, RequestIdInUseError, UnknownRequestError

NUM_REMEMBERED = 1024
"""How many ended requests Cancel still knows."""

T = TypeVar("T")


class Work(Protocol):
    """What a request is doing, and a cancel ends: a generation, a task, the pages of a document."""

    def cancel(self) -> object:
        """Asks for its end; harmless after it."""
        ...


class LiveRequest:
    """One admitted request."""

    __slots__ = ("_work", "cancelled", "failure", "request_id")

    def __init__(self, request_id: str) -> None:
        """Takes its name."""
        self.request_id = request_id
        self.cancelled = False
        self.failure: Exception | None = None
        self._work: Work | None = None

    def attach(self, work: Work) -> None:
        """Names what a cancel has to end, in place of what it was before."""
        self._work = work
        if self.cancelled:
            work.cancel()

    async def until_cancelled(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for work that a cancel of the request ends.

        Returns:
            Its result; None when the request was cancelled first.

        Raises:
            Exception: The failure that the cancel named, or what the work raised.
        """
        task = asyncio.ensure_future(work)
        self.attach(task)
        try:
            await asyncio.wait({task})
        finally:
            self._work = None
            task.cancel()
        if not task.cancelled():
            return task.result()
        if self.failure is not None:
            raise self.failure
        return None

    def cancel(self, failure: Exception | None = None) -> None:
        """Ends the request, before or after it reached the engine.

        Args:
            failure: What the caller gets instead of a Finished event.
        """
        self.cancelled = True
        self.failure = self.failure or failure
        if self._work is not None:
            self._work.cancel()


class LiveRequests:
    """All admitted requests of a server by name, and the memory that their pictures take."""

    def __init__(self, max_held_bytes: int) -> None:
        """Starts empty.

        Args:
            max_held_bytes: What the pictures of all requests may take together, as sent and
                decoded.
        """
        self._live: dict[str, LiveRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_places = 0
        self._held_bytes = 0
        self._max_held_bytes = max_held_bytes

    def __len__(self) -> int:
        """Counts the requests in the house; a document counts, and so does each page in work."""
        return len(self._live)

    @property
    def num_places(self) -> int:
        """Counts the requests that the engine has or will have."""
        return self._num_places

    @property
    def held_bytes(self) -> int:
        """What the pictures of all requests take."""
        return self._held_bytes

    @contextmanager
    def admit(
        self, request_id: str | None, max_running: int, max_queued: int, held_bytes: int = 0
    ) -> Iterator[LiveRequest]:
        """Holds a place for one request as long as the context lasts.

        Args:
            request_id: The caller's name for it; None makes one up.
            max_running: Requests that the engine runs at once.
            max_queued: Requests that may wait beyond those, what comes before the engine included.
            held_bytes: What its pictures take.

        Raises:
            RequestIdInUseError: A live request has this name.
            QueueFullError: Every place is taken.
            HeldImagesFullError: There is no memory for its pictures now.
        """
        if request_id is None:
            request_id = secrets.token_hex(16)
        self._check_free(request_id)
        if self._num_places >= max_running + max_queued:
            raise QueueFullError(self._num_places - max_running, max_queued)
        if held_bytes and self._held_bytes + held_bytes > self._max_held_bytes:
            raise HeldImagesFullError(self._held_bytes + held_bytes, self._max_held_bytes)
        with self._enter(request_id, 1, held_bytes) as live:
            yield live

    def has_room(self, max_places: int, held_bytes: int) -> bool:
        """Whether a further page of an admitted document finds a place and memory."""
        room = self._held_bytes + held_bytes <= self._max_held_bytes
        return room and self._num_places < max_places

    @contextmanager
    def admit_page(
        self, request_id: str, num_places: int, held_bytes: int
    ) -> Iterator[LiveRequest]:
        """Holds a place for a page of an admitted document.

        Args:
            request_id: The page's name.
            num_places: 0 for one that takes the place of its document, else 1.
            held_bytes: What its picture takes beyond what the document holds already.

        Raises:
            RequestIdInUseError: A live request has this name.
        """
        self._check_free(request_id)
        with self._enter(request_id, num_places, held_bytes) as live:
            yield live

    def _check_free(self, request_id: str) -> None:
        if request_id in self._live:
            raise RequestIdInUseError(
                f"a live request has the id {request_id}", metadata={"request_id": request_id}
            )

    @contextmanager
    def _enter(self, request_id: str, num_places: int, held_bytes: int) -> Iterator[LiveRequest]:
        live = LiveRequest(request_id)
        self._live[request_id] = live
        self._num_places += num_places
        self._held_bytes += held_bytes
        self._idle.clear()
        try:
            yield live
        finally:
            del self._live[request_id]
            self._num_places -= num_places
            self._held_bytes -= held_bytes
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

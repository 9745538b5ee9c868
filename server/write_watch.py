"""The watch over a stream's writes: ends one that its reader leaves standing."""

import asyncio
from types import TracebackType
from typing import Self

import grpc

from server.errors import SlowReaderError


class WriteWatch:
    """Limits the time of every write of one task, with one timer for all of them.

    The task stays in the watch's context for all its writes, and calls `begin` before and `end`
    after each: a coroutine around a write, or `asyncio.timeout`, is a good part of the cost of a
    message.
    """

    def __init__(self, limit_s: float) -> None:
        """Makes a watch for the running task; use it as a context.

        Args:
            limit_s: A write that lasts longer is ended, after at most half as long again.
        """
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._began_s: float | None = None
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Starts the timer."""
        self._arm()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the timer, and says what the failure of a write means.

        Raises:
            SlowReaderError: It lasted longer than the limit.
            asyncio.CancelledError: The caller is gone.
        """
        if self._timer is not None:
            self._timer.cancel()
        if exc is not None and (meaning := self.meaning(exc)) is not exc:
            raise meaning from exc

    def meaning(self, error: BaseException) -> BaseException:
        """Returns what the failure of a write means, or the error itself.

        SlowReaderError: it lasted longer than the limit. CancelledError: the caller is gone.
        """
        if isinstance(error, grpc.aio.InternalError):
            # The caller left while its event was on the way.
            return asyncio.CancelledError()
        cancelled = isinstance(error, asyncio.CancelledError) and self._expired
        # By us, unless somebody else cancels the task as well.
        if cancelled and self._task is not None and self._task.uncancel() == 0:
            self._expired = False
            return SlowReaderError(f"nothing was read from the stream for {self._limit_s:g} s")
        return error

    def begin(self) -> None:
        """A write begins."""
        self._began_s = self._loop.time()

    def end(self) -> None:
        """The write has ended."""
        self._began_s = None

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / 2, self._check)

    def _check(self) -> None:
        if self._began_s is not None and self._loop.time() - self._began_s >= self._limit_s:
            self._expired = True
            if self._task is not None:
                self._task.cancel()
            return
        self._arm()

"""The parent's side of one worker: a process, and a socket to it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server.images.limits import ImageLimits
from server.images.refusal import DecoderLostError
from server.images.shared_bytes import SharedBytes

MAX_MESSAGE_BYTES = 1 << 16
START_TIMEOUT_S = 60.0
# Ends that a file can bring about: bugs of codecs, an abort without memory, the limit of CPU time.
FILE_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGXCPU,
    }
)


class WorkerCrashedError(Exception):
    """The process ended in a way that the file can bring about."""


class WorkerProcess:
    """A worker that does one job at a time. After any error or a cancelled job it is of no use.

    Attributes:
        num_jobs: Jobs that it was sent.
        usable: False once an answer is missing; `end` is all that is left to do.
    """

    def __init__(self, limits: ImageLimits) -> None:
        """Starts the process, which takes a few milliseconds: call it in a thread.

        It inherits the socket and stderr, no other descriptor and none of the environment but the
        path of modules.

        Raises:
            OSError: The process cannot be started.
        """
        self.num_jobs = 0
        self.usable = True
        # Held while somebody waits for an answer: the socket may not be closed under it.
        self._busy = asyncio.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own module, no shell
                [
                    *(sys.executable, "-P", "-m", "server.images.worker"),
                    *(str(theirs.fileno()), json.dumps(asdict(limits))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                # One arena and one thread of BLAS: each takes address space that is never used.
                env={"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Waits until the process has loaded its codecs and set its limits.

        Raises:
            DecoderLostError: It did not get so far; stderr has its reason.
            TimeoutError: It takes too long.
        """
        async with self._busy:
            await self._receive(START_TIMEOUT_S)

    async def do(
        self, job: dict[str, Any], payload: SharedBytes, timeout_s: float
    ) -> tuple[dict[str, Any], SharedBytes | None]:
        """Sends a job and returns the answer, with pixels if it has any.

        Raises:
            TimeoutError: The job took too long; the process was killed.
            WorkerCrashedError: The process ended, and the file may be why.
            DecoderLostError: The process was killed, or did not keep to the protocol.
            asyncio.CancelledError: The process was killed.
        """
        self.num_jobs += 1
        async with self._busy:
            try:
                socket.send_fds(self._channel, [json.dumps(job).encode()], [payload.fd])
            except OSError:
                self.usable = False
                raise await self._how_it_ended() from None
            return await self._receive(timeout_s)

    async def end(self) -> None:
        """Kills the process, waits for it and closes the socket; a job that runs fails first."""
        self.usable = False
        await self._reap()
        async with self._busy:
            self._channel.close()

    def kill(self) -> None:
        """Kills the process if it runs."""
        self._process.kill()

    async def _receive(self, timeout_s: float) -> tuple[dict[str, Any], SharedBytes | None]:
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable()
            text, descriptors, _, _ = socket.recv_fds(
                self._channel, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BaseException as error:
            self.usable = False
            self.kill()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise await self._how_it_ended() from None
            raise
        if not text:
            self.usable = False
            raise await self._how_it_ended()
        try:
            pixels = SharedBytes(descriptors[0]) if descriptors else None
            answer = dict(json.loads(text))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self.usable = False
            self.kill()
            raise DecoderLostError(f"a decode worker answered {text[:100]!r}") from error
        return answer, pixels

    async def _reap(self) -> int:
        """Kills the process and waits for it; returns its exit status as `subprocess` does."""
        self.kill()
        return await asyncio.to_thread(self._process.wait)

    async def _readable(self) -> None:
        """Waits until there is an answer, or the end of the stream."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()

        def wake() -> None:
            loop.remove_reader(self._channel)
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self._channel, wake)
        try:
            await ready
        finally:
            loop.remove_reader(self._channel)

    async def _how_it_ended(self) -> Exception:
        """Returns what became of a process that closed its socket."""
        status = await self._reap()
        if -status in FILE_SIGNALS:
            return WorkerCrashedError(signal.Signals(-status).name)
        return DecoderLostError(
            f"a decode worker ended with {signal.Signals(-status).name if status < 0 else status}"
        )

"""Bytes in shared memory, handed from process to process as a file descriptor."""

import asyncio
import fcntl
import os
from typing import Self

# Below this many bytes a copy is quicker than the way to a thread and back.
MAX_INLINE_BYTES = 1 << 18
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedBytes:
    """An anonymous file in memory that nobody can change any more. It owns its descriptor."""

    def __init__(self, fd: int) -> None:
        """Takes over a descriptor of `memfd_create` and seals it.

        Raises:
            OSError: The descriptor is of another kind, or somebody may still write through a map.
        """
        self.fd = fd
        self.size = 0
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            self.size = os.fstat(fd).st_size
        except OSError:
            self.close()
            raise

    @classmethod
    def write(cls, data: bytes | memoryview) -> Self:
        """Copies bytes into a new file.

        Raises:
            OSError: There is no memory or no descriptor left.
        """
        fd = os.memfd_create("deltaflash", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    async def write_off_loop(cls, data: bytes) -> Self:
        """Copies bytes into a new file without holding up the event loop."""
        if len(data) <= MAX_INLINE_BYTES:
            return cls.write(data)
        return await asyncio.to_thread(cls.write, data)

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        if self.fd < 0:
            raise ValueError("the bytes were given back")

    def read(self) -> bytes:
        """Returns a copy of all bytes."""
        return os.pread(self.fd, self.size, 0)

    def move_into(self, buffer: memoryview) -> None:
        """Copies all bytes into a buffer of their size and closes; call it in a thread if large.

        Raises:
            OSError: There are fewer bytes.
        """
        at = 0
        while at < len(buffer):
            count = os.preadv(self.fd, [buffer[at:]], at)
            if count == 0:
                raise OSError(f"{at} bytes are there, expected {len(buffer)}")
            at += count
        self.close()

    def close(self) -> None:
        """Gives the descriptor back; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close_off_loop(self) -> None:
        """Closes without holding up the event loop: freeing takes 0.1 ms a megabyte."""
        if self.size <= MAX_INLINE_BYTES:
            self.close()
        elif self.fd >= 0:
            fd, self.fd = self.fd, -1
            asyncio.get_running_loop().run_in_executor(None, os.close, fd)

    def __del__(self) -> None:
        """Closes what nobody closed."""
        self.close()

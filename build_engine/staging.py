"""How a directory is written so that its target is, at any moment, absent or whole.

Files go to a staging directory beside the target, are flushed to the disk, and the directory is
renamed whole. A lock file beside the target keeps a second writer out; who holds it removes what a
killed earlier run has left.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from build_engine.errors import OutputError
from runtime.engine_directory import FileEntry
from runtime.errors import refusal

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


class StagedFile:
    """A new file that is hashed while it is written and flushed to the disk when it closes."""

    def __init__(self, path: Path) -> None:
        """Creates the file.

        Args:
            path: Must not exist.
        """
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends."""
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def entry(self) -> FileEntry:
        """Digest and length of what was written."""
        return FileEntry(sha256=self._digest.hexdigest(), bytes=self._num_bytes)

    def __enter__(self) -> Self:
        """Returns the file itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flushes to the disk, unless an error ends the block."""
        with self._file:
            if exc_type is None:
                self._file.flush()
                os.fsync(self._file.fileno())


class Target:
    """The path at which a directory shall appear."""

    def __init__(self, path: Path) -> None:
        """Checks the place.

        Args:
            path: May exist; its parent must.

        Raises:
            OutputError: The parent is not a directory or the path is a symbolic link.
        """
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - keeps a final symbolic link
        self.parent = self.path.parent
        if not self.path.name:
            raise OutputError(refusal(path, "the root directory", "a new directory", "name one"))
        if not self.parent.is_dir():
            raise OutputError(
                refusal(
                    path,
                    f"no directory {self.parent}",
                    "an existing parent directory",
                    f"mkdir -p {shlex.quote(str(self.parent))}",
                )
            )
        if self.path.is_symlink():
            raise OutputError(
                refusal(path, "a symbolic link", "a directory", "name the directory it points to")
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the target; removes what a killed run has left, then the lock file.

        Raises:
            OutputError: Another process holds it, or the parent directory is not writable.
        """
        path = self.parent / f".{self.path.name}.lock"
        descriptor = self._lock(path)
        try:
            self._remove_leftovers()
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def _lock(self, path: Path) -> int:
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise OutputError(
                    refusal(
                        self.path,
                        f"{error.strerror} in {self.parent}",
                        "a writable directory",
                        f"chmod u+w {shlex.quote(str(self.parent))}",
                    )
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                current = path.stat()
                held = os.fstat(descriptor)
            except BlockingIOError as error:
                os.close(descriptor)
                raise OutputError(
                    refusal(
                        self.path,
                        "another build_engine writing here",
                        "one writer at a time",
                        "wait for it to end, then run again",
                    )
                ) from error
            except FileNotFoundError:  # its last holder removed the file in between
                os.close(descriptor)
                continue
            except BaseException:
                os.close(descriptor)
                raise
            if (current.st_dev, current.st_ino) == (held.st_dev, held.st_ino):
                return descriptor
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        replaced = self._siblings("replaced")
        if replaced and not os.path.lexists(self.path):
            replaced.pop().rename(self.path)  # killed between the two renames of `publish`
        for path in [*replaced, *self._siblings("staging")]:
            shutil.rmtree(path)

    def _siblings(self, kind: str) -> list[Path]:
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.{kind}-[0-9a-f]{{16}}")
        return [entry for entry in self.parent.iterdir() if pattern.fullmatch(entry.name)]

    def _new_sibling(self, kind: str) -> Path:
        return self.parent / f".{self.path.name}.{kind}-{secrets.token_hex(8)}"

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A new directory beside the target; removed at the end unless `publish` renamed it."""
        path = self._new_sibling("staging")
        path.mkdir()
        try:
            yield path
        finally:
            if path.exists():
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, staging: Path) -> None:
        """Flushes the staging directory and renames it to the target, replacing what is there.

        A directory that is there is swapped with the new one in one step where the file system can
        (Linux renameat2), else moved aside first: a kill in between leaves the target absent, and
        the next run under the lock restores it.

        Args:
            staging: From `staging`; its files are flushed already.

        Raises:
            OSError: The target is as it was.
            OutputError: The target is new and whole, but a power cut may still undo the rename.
        """
        for directory, _, _ in os.walk(staging, topdown=False):
            sync_directory(Path(directory))
        if not self.path.exists():
            staging.rename(self.path)
        elif not _exchange(staging, self.path):
            self._replace(staging)
        try:
            sync_directory(self.parent)
        except OSError as error:
            raise OutputError(
                refusal(
                    self.path,
                    f"{error.strerror} after the new engine was put in place",
                    "a directory that can be flushed to the disk",
                    "sync, then check the disk",
                )
            ) from error

    def _replace(self, staging: Path) -> None:
        replaced = self._new_sibling("replaced")
        self.path.rename(replaced)
        try:
            staging.rename(self.path)
        except OSError:
            replaced.rename(self.path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Flushes the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two directories atomically; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))

"""A server in a process of its own: its log, its signals, its exit code."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


class Process:
    """A running server process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.records: list[dict[str, Any]] = []
        self.lines: list[str] = []

    async def until(self, event: str) -> dict[str, Any]:
        """Reads the log up to a record."""
        assert self.process.stderr is not None
        async with asyncio.timeout(10):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if line.startswith("{"):
                    self.records.append(json.loads(line))
                    if self.records[-1]["event"] == event:
                        return self.records[-1]
        raise AssertionError(f"no {event} in {self.lines}")

    async def end(self, limit_s: float = 8) -> int:
        """Waits for the exit code; the rest of stderr goes to `lines`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(limit_s):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@asynccontextmanager
async def started(*words: str, paths: tuple[Path, ...] = ()) -> AsyncIterator[Process]:
    """Runs a program, with more places to import from; kills it when it outlives the block."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env={"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

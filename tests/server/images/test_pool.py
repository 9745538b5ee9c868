"""Workers may hang, crash, be killed or run out of memory: only their job is lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import uvloop
from pdf_files import PdfPage, pdf_file
from picture_files import png_chunk, random_file
from PIL import Image

from server.images import (
    DecodePool,
    DecoderLostError,
    ImageLimits,
    ImageRefusedError,
    ImageSize,
    PreparedImage,
    RefusalReason,
)
from server.images import pool as pool_module
from server.images.decode import decode
from server.images.formats import check_header
from server.images.resize import resize

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from typing import Any

LIMITS = ImageLimits()
SIZE = ImageSize(65536, 1 << 24)
MIB = 1 << 20


@contextlib.asynccontextmanager
async def running_pool(
    limits: ImageLimits = LIMITS, num_workers: int = 1
) -> AsyncIterator[DecodePool]:
    pool = DecodePool(limits, num_workers)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs on the event loop that the server uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def png(width: int, height: int, colour: str = "navy") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG", compress_level=1)
    return out.getvalue()


PNG = png(400, 300)


def status_kib(pid: int | str, field: str) -> int:
    """Returns a field of /proc/PID/status in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def open_files(pid: int) -> list[str]:
    """Returns what the descriptors of a process are, /dev/null left out."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(str(link.readlink()))
    return [target for target in targets if target != "/dev/null"]


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the state of other processes
            await asyncio.sleep(0.01)


async def started(job: Coroutine[Any, Any, PreparedImage]) -> asyncio.Task[PreparedImage]:
    """Starts a job and lets it reach its worker."""
    task = asyncio.create_task(job)
    await asyncio.sleep(0.1)
    assert not task.done()
    return task


def test_same_pixels_as_without_workers() -> None:
    async def main() -> None:
        async with running_pool(num_workers=2) as pool:
            files = [random_file(index, "pool") for index in range(24)]
            made = await asyncio.gather(*(pool.prepare(f.data, SIZE, f.mime_type) for f in files))
        for file, picture in zip(files, made, strict=True):
            header = check_header(file.data, LIMITS)
            expected = np.asarray(resize(decode(file.data, header.format, LIMITS), SIZE))
            np.testing.assert_array_equal(picture.pixels, expected, err_msg=file.name)
            assert (picture.source_height, picture.source_width) == file.upright.shape[:2]
            assert picture.pixels.dtype == np.uint8
            assert picture.pixels.flags.c_contiguous
            height, width, _ = picture.pixels.shape
            whole = f"{height} {width} 3 uint8\n".encode() + picture.pixels.tobytes()
            assert picture.digest == hashlib.sha256(whole).digest()

    run(main)


def test_a_hang_costs_its_job() -> None:
    async def main() -> None:
        async with running_pool(ImageLimits(decode_timeout_s=0.5)) as pool:
            os.kill(pool.worker_pids[0], signal.SIGSTOP)
            waiting = asyncio.create_task(pool.prepare(PNG, SIZE))
            with pytest.raises(
                ImageRefusedError, match=r"400 x 300 pixels takes .* 0\.5 s"
            ) as caught:
                await pool.prepare(PNG, SIZE)
            assert caught.value.reason is RefusalReason.INVALID
            with contextlib.suppress(ImageRefusedError):  # one of the two met the stopped worker
                await waiting
            assert (await pool.prepare(PNG, SIZE)).source_width == 400

    run(main)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_crash_refuses_its_file(number: signal.Signals) -> None:
    async def main() -> None:
        async with running_pool() as pool:
            (pid,) = pool.worker_pids
            os.kill(pid, signal.SIGSTOP)
            job = await started(pool.prepare(PNG, SIZE))
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(ImageRefusedError, match=number.name) as caught:
                await job
            assert caught.value.reason is RefusalReason.INVALID
            assert (await pool.prepare(PNG, SIZE)).source_width == 400
            assert pid not in pool.worker_pids

    run(main)


def test_killed_once_is_tried_again_and_twice_is_an_error() -> None:
    """As the kernel does it when memory runs out: no fault of this file."""

    async def main() -> None:
        async with running_pool() as pool:
            (pid,) = pool.worker_pids
            os.kill(pid, signal.SIGSTOP)
            job = await started(pool.prepare(PNG, SIZE))
            os.kill(pid, signal.SIGKILL)
            assert (await job).source_width == 400
            os.kill(pool.worker_pids[0], signal.SIGKILL)  # while it is idle
            assert (await pool.prepare(PNG, SIZE)).source_width == 400
        async with running_pool(num_workers=2) as pool:
            pids = pool.worker_pids
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            job = await started(pool.prepare(PNG, SIZE))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(DecoderLostError, match="SIGKILL"):
                await job
            assert (await pool.prepare(PNG, SIZE)).source_width == 400

    run(main)


def test_cancelled_job_frees_its_worker() -> None:
    async def main() -> None:
        async with running_pool() as pool:
            os.kill(pool.worker_pids[0], signal.SIGSTOP)
            running = await started(pool.prepare(PNG, SIZE))
            waiting = await started(pool.prepare(PNG, SIZE))
            next_one = await started(pool.prepare(PNG, SIZE))
            waiting.cancel()
            running.cancel()
            assert (await next_one).source_width == 400  # long before the time is over
            for task in (waiting, running):
                with pytest.raises(asyncio.CancelledError):
                    await task

    run(main)


def test_memory_has_a_limit() -> None:
    """A picture within the limit of pixels, but not of memory."""
    size = 7000
    packer = zlib.compressobj(1)
    row = bytes(1 + 3 * size)
    packed = b"".join(packer.compress(row) for _ in range(size)) + packer.flush()
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    large = b"\x89PNG\r\n\x1a\n" + b"".join(
        png_chunk(*c) for c in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    )

    async def main() -> None:
        async with running_pool(ImageLimits(memory_bytes=256 * MIB)) as pool:
            with pytest.raises(ImageRefusedError, match="268435456 bytes allowed") as caught:
                await pool.prepare(large, SIZE)
            assert caught.value.reason is RefusalReason.TOO_LARGE
            assert caught.value.metadata == {"value": "over 268435456", "limit": "268435456"}
            assert (await pool.prepare(PNG, SIZE)).source_width == 400
            assert status_kib(pool.worker_pids[0], "VmPeak") <= 256 * 1024

    run(main)


BAD_FILES = {
    "zero bytes": b"",
    "text": b"words, words, words",
    "HTML": b"<html><body>not found</body></html>",
    "PDF": pdf_file([PdfPage()]),
    "cut PNG": PNG[: len(PNG) // 2],
    "PNG of 40,000 x 40,000": b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 1, 0, 0, 0, 0)),
    "GIF of 65,535 x 65,535": b"GIF89a\xff\xff\xff\xff\0\0\0;",
    "1 x 1": png(1, 1),
    "1 x 20,000": png(1, 20_000),
    "PNG of 60 Mpixel without pixels": b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8_000, 7_500, 8, 2, 0, 0, 0))
    + png_chunk(b"IDAT", b"\0")
    + png_chunk(b"IEND", b""),
}


@pytest.mark.plain_build
def test_50_bad_files_at_once() -> None:
    """I3, I4: all are refused, and the server does not grow."""

    async def main() -> None:
        async with running_pool(num_workers=2) as pool:
            await pool.prepare(PNG, SIZE)
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before_kib = status_kib("self", "VmRSS")
            for data in BAD_FILES.values():
                results = await asyncio.gather(
                    *(pool.prepare(data, SIZE) for _ in range(50)), return_exceptions=True
                )
                assert {type(r) for r in results} == {ImageRefusedError}
                reasons = {r.reason for r in results if isinstance(r, ImageRefusedError)}
                assert reasons <= {RefusalReason.INVALID, RefusalReason.TOO_LARGE}
            mixed = [*BAD_FILES.values()] * 5
            results = await asyncio.gather(
                *(pool.prepare(data, SIZE) for data in mixed), return_exceptions=True
            )
            assert {type(r) for r in results} == {ImageRefusedError}
            grown_kib = status_kib("self", "VmHWM") - before_kib
            print("grown", grown_kib, "KiB")
            assert grown_kib < 50 * 1024
            assert (await pool.prepare(PNG, SIZE)).source_width == 400

    run(main)


def test_worker_inherits_nothing() -> None:
    """No socket of the server, no secret of its environment."""

    async def main() -> None:
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        os.environ["OF_THE_SERVER"] = "a secret"
        try:
            async with running_pool() as pool:
                (pid,) = pool.worker_pids
                await pool.prepare(PNG, SIZE)
                await until(lambda: len(open_files(pid)) == 1)  # the answer is given back
                assert open_files(pid)[0].startswith("socket:")
                assert b"OF_THE_SERVER" not in Path(f"/proc/{pid}/environ").read_bytes()
                modules = Path(f"/proc/{pid}/maps").read_text()
                assert "grpc" not in modules
                assert "_native" not in modules
        finally:
            del os.environ["OF_THE_SERVER"]
            os.close(read_end)
            os.close(write_end)

    run(main)


def test_signals_of_a_terminal_and_a_supervisor_are_for_the_server() -> None:
    async def main() -> None:
        async with running_pool() as pool:
            (pid,) = pool.worker_pids
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            assert (await pool.prepare(PNG, SIZE)).source_width == 400
            assert pool.worker_pids == [pid]
            assert os.getpgid(pid) != os.getpgid(0)

    run(main)


def test_close_leaves_no_child_and_no_waiter() -> None:
    async def main() -> None:
        pool = DecodePool(LIMITS, 2)
        await pool.start()
        pids = pool.worker_pids
        assert len(set(pids)) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        jobs = [await started(pool.prepare(PNG, SIZE)) for _ in range(5)]
        await pool.close()
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(result, DecoderLostError)
        with pytest.raises(DecoderLostError, match="have ended"):
            await pool.prepare(PNG, SIZE)
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()

    run(main)


def test_close_while_workers_start() -> None:
    async def main() -> None:
        pool = DecodePool(LIMITS, 2)
        start = asyncio.create_task(pool.start())
        await until(lambda: bool(pool.worker_pids))
        pids = pool.worker_pids
        start.cancel()
        await pool.close()
        with pytest.raises((asyncio.CancelledError, DecoderLostError)):
            await start
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()
        assert pool.worker_pids == []

    run(main)


def test_worker_ends_with_the_server() -> None:
    """A server that is killed closes the socket, and that ends a worker."""

    async def main() -> None:
        pool = DecodePool(LIMITS)
        await pool.start()
        (worker,) = pool._workers
        worker._channel.close()
        await until(lambda: worker._process.poll() is not None)
        assert worker._process.returncode == 0
        await pool.close()

    run(main)


def test_a_worker_serves_a_bounded_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_JOBS_PER_WORKER", 3)

    async def main() -> None:
        async with running_pool() as pool:
            seen = set()
            for _ in range(7):
                assert (await pool.prepare(PNG, SIZE)).source_width == 400
                seen.update(pool.worker_pids)
            assert len(seen) == 3

    run(main)


def test_a_worker_is_replaced_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first try to start it fails."""
    monkeypatch.setattr(pool_module, "RESTART_DELAY_S", 0.1)
    python = sys.executable

    async def main() -> None:
        async with running_pool() as pool:
            (pid,) = pool.worker_pids
            monkeypatch.setattr(sys, "executable", "/bin/false")
            os.kill(pid, signal.SIGKILL)
            job = await started(pool.prepare(PNG, SIZE))
            await asyncio.sleep(0.5)
            monkeypatch.setattr(sys, "executable", python)
            assert (await job).source_width == 400
            (pid,) = pool.worker_pids
            await asyncio.sleep(0.5)
            assert pool.worker_pids == [pid]

    run(main)


def test_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def main() -> None:
        pool = DecodePool(LIMITS)
        with pytest.raises(DecoderLostError, match="does not start"):
            await pool.start()
        assert pool.worker_pids == []
        await pool.close()

    run(main)


@pytest.mark.plain_build
def test_the_event_loop_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest files and pictures: no callback takes the loop's thread for long."""
    noise = np.random.default_rng().integers(0, 256, (3000, 3400, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "BMP")
    data = out.getvalue()
    assert len(data) > 30_000_000
    document = pdf_file([PdfPage(content=b"%" * 20_000_000)])
    longest_s = 0.0
    run_handle = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        nonlocal longest_s
        # The thread's own time: what other processes take of a small machine is not ours.
        began = time.thread_time()
        run_handle(handle)
        longest_s = max(longest_s, time.thread_time() - began)

    async def main() -> None:
        nonlocal longest_s
        async with running_pool() as pool:
            await pool.prepare(PNG, SIZE)
            monkeypatch.setattr(asyncio.Handle, "_run", timed_run)
            made = await asyncio.gather(*(pool.prepare(data, SIZE) for _ in range(3)))
            assert [p.source_width for p in made] == [3400] * 3
            pdf = await pool.open_pdf(document)
            await pool.prepare_pdf_page(pdf, 0, 72, SIZE)
            monkeypatch.undo()

    asyncio.run(main())
    print(f"longest callback {longest_s * 1e3:.2f} ms")
    assert longest_s < 0.005

"""The pool of worker processes as the server sees it."""

import asyncio
import contextlib
import logging
from dataclasses import asdict
from typing import Any

import numpy as np

from server.images.formats import ImageHeader, check_header
from server.images.limits import ImageLimits, ImageSize
from server.images.prepared import PdfInfo, PreparedImage
from server.images.refusal import DecoderLostError, ImageRefusedError, RefusalReason
from server.images.shared_bytes import SharedBytes
from server.images.worker_process import WorkerCrashedError, WorkerProcess

log = logging.getLogger(__name__)

# A worker starts afresh now and then: what a codec leaks does not add up.
MAX_JOBS_PER_WORKER = 1000
RESTART_DELAY_S = 1.0


class DecodePool:
    """Decodes pictures and pages in worker processes, which may hang or die without harm.

    A job waits in the order of arrival until a worker is free. A cancelled job frees its worker at
    once: the process is killed, and another one started. All methods belong to one event loop,
    which none of them holds up.
    """

    def __init__(self, limits: ImageLimits, num_workers: int = 1) -> None:
        """Takes the limits; `start` starts the processes."""
        self.limits = limits
        self.num_workers = num_workers
        # Free workers; None once the pool is closed.
        self._free: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()
        self._workers: set[WorkerProcess] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run or start."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Starts the workers and waits until they are ready.

        Raises:
            DecoderLostError: A worker does not start.
        """
        starts = [asyncio.create_task(self._add_worker()) for _ in range(self.num_workers)]
        self._starts.update(starts)
        try:
            await asyncio.gather(*map(asyncio.shield, starts))
        finally:
            self._starts.difference_update(task for task in starts if task.done())

    async def close(self) -> None:
        """Ends the workers at once; jobs that run or wait fail with DecoderLostError."""
        self._closed.set()
        self._free.put_nowait(None)
        # A worker that is being started ends itself when it finds the pool closed.
        await asyncio.gather(*(worker.end() for worker in set(self._workers)))
        await asyncio.gather(*self._starts, return_exceptions=True)
        self._workers.clear()

    async def prepare(
        self, data: bytes, size: ImageSize, mime_type: str | None = None
    ) -> PreparedImage:
        """Makes the model's picture from a file.

        Raises:
            ImageRefusedError: The file is at fault; its header is checked before it waits.
            DecoderLostError: No worker could do it.
        """
        header = check_header(data, self.limits, mime_type)
        job = {"kind": "image", "format": header.format.value, "size": asdict(size)}
        what = f"the {_describe(header)}"
        answer, pixels = await self._run(job, data, RefusalReason.INVALID, what)
        return await _prepared(answer, pixels, size)

    async def open_pdf(
        self, data: bytes, first_page: int = 0, num_pages: int | None = None
    ) -> PdfInfo:
        """Opens a document and keeps its bytes.

        Args:
            data: The file.
            first_page: The first page to read.
            num_pages: How many pages to read; None reads to the end.

        Raises:
            ImageRefusedError: The file is no readable document, or the range has no page or too
                many.
            DecoderLostError: No worker could do it.
        """
        _check_document(data, self.limits)
        kept = await SharedBytes.write_off_loop(data)
        try:
            job = {"kind": "count_pages"}
            answer, _ = await self._run(job, kept, RefusalReason.DOCUMENT_INVALID, "the PDF")
            total = int(answer["num_pages"])
            indices = _page_range(total, first_page, num_pages, self.limits)
        except BaseException:
            kept.close_off_loop()
            raise
        return PdfInfo(total, indices, kept)

    async def prepare_pdf_page(
        self, pdf: PdfInfo, index: int, dpi: int, size: ImageSize
    ) -> PreparedImage:
        """Makes the model's picture of one page.

        Args:
            pdf: What `open_pdf` returned.
            index: The page, 0 to pdf.num_pages - 1.
            dpi: Resolution of the rendering; lower where the page had more pixels than allowed, or
                than the model reads.
            size: What the model reads.

        Raises:
            ImageRefusedError: The page is at fault; others may be fine. Its metadata has
                `page_index`.
            DecoderLostError: No worker could do it.
        """
        job = {"kind": "page", "index": index, "dpi": dpi, "size": asdict(size)}
        try:
            answer, pixels = await self._run(
                job, pdf.data, RefusalReason.DOCUMENT_INVALID, f"page {index} of the PDF"
            )
        except ImageRefusedError as error:
            error.metadata["page_index"] = str(index)
            raise
        return await _prepared(answer, pixels, size)

    async def _run(
        self, job: dict[str, Any], data: bytes | SharedBytes, reason: RefusalReason, what: str
    ) -> tuple[dict[str, Any], SharedBytes | None]:
        """Has a job done, by another worker if the first was lost through no fault of the file.

        Args:
            job: The message.
            data: The file; bytes are copied when a worker is free, not before.
            reason: Given when the file ends its worker, or takes it for too long.
            what: The file's name in that message.
        """
        try:
            return await self._run_once(job, data, reason, what)
        except DecoderLostError as error:
            if self._closed.is_set():
                raise
            log.warning("%s is tried again: %s", what, error)
        return await self._run_once(job, data, reason, what)

    async def _run_once(
        self, job: dict[str, Any], data: bytes | SharedBytes, reason: RefusalReason, what: str
    ) -> tuple[dict[str, Any], SharedBytes | None]:
        worker = await self._take()
        timeout_s = self.limits.decode_timeout_s
        copied = None
        try:
            if isinstance(data, bytes):
                payload = copied = await SharedBytes.write_off_loop(data)
            else:
                payload = data
                payload.check_open()
            answer, pixels = await worker.do(job, payload, timeout_s)
        except TimeoutError:
            text = f"{what} takes longer to decode than the {timeout_s:g} s allowed"
            raise ImageRefusedError(reason, text) from None
        except WorkerCrashedError as error:
            text = f"{what} ends its decoder ({error}): it is damaged, or needs too much memory"
            raise ImageRefusedError(reason, text) from None
        finally:
            self._give_back(worker)
            if copied is not None:
                copied.close_off_loop()
        match answer:
            case {"refused": [reason_name, text, facts]}:
                raise ImageRefusedError(RefusalReason(reason_name), text, facts)
            case {"fault": text}:
                raise RuntimeError(f"a decode worker failed:\n{text}")
        return answer, pixels

    async def _take(self) -> WorkerProcess:
        worker = await self._free.get()
        if worker is None:
            self._free.put_nowait(None)  # for the next that waits
            raise DecoderLostError("the decode workers have ended")
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        """Makes a worker free, or starts another in its place."""
        if self._closed.is_set():
            return
        if worker.usable and worker.num_jobs < MAX_JOBS_PER_WORKER:
            self._free.put_nowait(worker)
            return
        task = asyncio.create_task(self._replace(worker))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _replace(self, worker: WorkerProcess) -> None:
        """Ends a worker and starts another, as often as it takes."""
        await worker.end()
        self._workers.discard(worker)
        while not self._closed.is_set():
            try:
                await self._add_worker()
            except (DecoderLostError, OSError) as error:
                if not self._closed.is_set():
                    log.error("%s; tried again in %g s", error, RESTART_DELAY_S)  # noqa: TRY400
            else:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RESTART_DELAY_S)

    async def _add_worker(self) -> None:
        """Starts a worker and makes it free."""
        worker = await asyncio.to_thread(WorkerProcess, self.limits)
        self._workers.add(worker)
        try:
            if self._closed.is_set():
                worker.kill()
            await worker.wait_ready()
        except (DecoderLostError, WorkerCrashedError, TimeoutError) as error:
            await worker.end()
            self._workers.discard(worker)
            raise DecoderLostError(f"a decode worker does not start: {error}") from error
        self._free.put_nowait(worker)


def _describe(header: ImageHeader) -> str:
    return f"{header.format.value} image of {header.width} x {header.height} pixels"


async def _prepared(
    answer: dict[str, Any], pixels: SharedBytes | None, size: ImageSize
) -> PreparedImage:
    """Makes the picture of an answer.

    The pixels are copied once, in a thread: pages of shared memory would be mapped one by one when
    they are first read, on the event loop.

    Raises:
        DecoderLostError: The answer is no picture.
    """
    match answer:
        case {
            "image": {
                "width": int(width),
                "height": int(height),
                "source_width": int(source_width),
                "source_height": int(source_height),
                "digest": str(digest),
            }
        } if pixels and pixels.size == 3 * width * height:
            factor = size.factor
            if min(width, height) >= factor and width % factor == height % factor == 0:
                copy = np.empty((height, width, 3), np.uint8)
                await asyncio.to_thread(pixels.move_into, copy.data.cast("B"))
                return PreparedImage(copy, source_width, source_height, bytes.fromhex(digest))
    raise DecoderLostError(f"a decode worker answered {str(answer)[:200]}")


def _check_document(data: bytes, limits: ImageLimits) -> None:
    if len(data) > limits.max_document_bytes:
        raise ImageRefusedError(
            RefusalReason.TOO_LARGE,
            f"the PDF has {len(data)} bytes, the limit is {limits.max_document_bytes}",
            {"value": str(len(data)), "limit": str(limits.max_document_bytes)},
        )
    # PDFium looks for the signature in the first 1024 bytes, as readers of PDF do.
    if b"%PDF" not in data[:1024]:
        raise ImageRefusedError(
            RefusalReason.DOCUMENT_INVALID,
            f"the document of {len(data)} bytes starts with {data[:8].hex(' ') or 'nothing'}; "
            "needed is a PDF, which starts with %PDF",
        )


def _page_range(total: int, first_page: int, num_pages: int | None, limits: ImageLimits) -> range:
    """Returns the pages that a request reads."""
    last = total if num_pages is None else min(total, first_page + num_pages)
    indices = range(first_page, last)
    if not indices:
        raise ImageRefusedError(
            RefusalReason.DOCUMENT_INVALID,
            f"the PDF has {total} pages; the request reads none of them, it begins at {first_page}",
        )
    if len(indices) > limits.max_pages:
        raise ImageRefusedError(
            RefusalReason.TOO_MANY_PAGES,
            f"the request reads {len(indices)} pages, the limit is {limits.max_pages}",
            {"pages": str(len(indices)), "max_pages": str(limits.max_pages)},
        )
    return indices

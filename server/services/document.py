"""One document: its pages are prepared ahead within a bound, read in parallel, and counted."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from deltaflash.v1 import documents_pb2, errors_pb2, generation_pb2
from server.backend import EngineLostError, GenerationRequest
from server.errors import (
    DeadlinePassedError,
    DrainingError,
    SlowReaderError,
    describe,
    log_fault,
    message_of,
    metadata_of,
)
from server.images import PreparedImage
from server.live_requests import LiveRequest
from server.services.answer import Answer, CallScope
from server.services.writer import EventWriter

PAGES_AHEAD = 2
"""Pages that are decoded or rendered while others hold the document's seats."""
ENDS_DOCUMENT = (DeadlinePassedError, DrainingError, EngineLostError, SlowReaderError)
"""What is no fault of a page: it ends the call. Anything else is one page's error."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What is to be read.

    Attributes:
        indices: The pages by their index in the document, in order.
        prepare: Decodes or renders the page of an index.
    """

    indices: Sequence[int]
    prepare: Callable[[int], Coroutine[Any, Any, PreparedImage]]


class DocumentReader:
    """Reads the pages of one admitted document.

    Its first page in work has the place and the memory that the document was admitted with, so that
    it always goes on; a further one starts only when the server has a place and memory for it.
    """

    def __init__(
        self,
        scope: CallScope,
        live: LiveRequest,
        pages: Pages,
        max_parallel: int,
        page_bytes: int,
    ) -> None:
        """Takes the document and its surroundings.

        Args:
            scope: The call.
            live: The document's place; a cancel of it ends its pages.
            pages: What is to be read.
            max_parallel: Most pages in the engine at once.
            page_bytes: What one page takes at most once it is decoded.
        """
        self._scope = scope
        self._places = scope.services.live
        self._live = live
        self._pages = pages
        self._max_parallel = max_parallel
        self._page_bytes = page_bytes
        self._turn = asyncio.Semaphore(max_parallel)
        self._in_work: set[LiveRequest] = set()
        self._own_place_is_free = True
        self._finished = documents_pb2.DocumentFinished(usage=generation_pb2.Usage())

    def cancel(self) -> None:
        """Ends the pages in work, with what ended the document; no further one starts."""
        for page in list(self._in_work):
            page.cancel(self._live.failure)

    async def read(
        self, draft: GenerationRequest, prompt_ids: tuple[int, ...]
    ) -> documents_pb2.DocumentFinished:
        """Reads all pages.

        Args:
            draft: How each is read.
            prompt_ids: The prompt of each, its picture as one placeholder.

        Returns:
            What became of them; the time is the caller's to fill in.

        Raises:
            Exception: What ends the call; every page has given back what it held.
        """
        self._live.attach(self)
        running: set[asyncio.Task[None]] = set()
        try:
            for index in self._pages.indices:
                while not self._may_start(len(running)):
                    running = await first_ends(running)
                if self._live.cancelled:
                    break
                running.add(asyncio.ensure_future(self._read_page(index, draft, prompt_ids)))
                await asyncio.sleep(0)  # it takes its place before the next asks for one
            while running:
                running = await first_ends(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if self._live.failure is not None:
            raise self._live.failure
        self._finished.cancelled = self._live.cancelled
        return self._finished

    def _may_start(self, num_running: int) -> bool:
        if self._live.cancelled or num_running == 0:
            return True
        if num_running >= self._max_parallel + PAGES_AHEAD:
            return False
        info = self._scope.engine.backend.info
        max_places = info.max_batch_size + info.max_queued
        return self._own_place_is_free or self._places.has_room(max_places, self._page_bytes)

    async def _read_page(
        self, index: int, draft: GenerationRequest, prompt_ids: tuple[int, ...]
    ) -> None:
        name = f"{self._live.request_id}/{index}"
        takes_own, self._own_place_is_free = self._own_place_is_free, False
        extra = (0, 0) if takes_own else (1, self._page_bytes)
        response = documents_pb2.ParseDocumentResponse
        with EventWriter(self._scope.line, response, page_index=index) as writer:
            try:
                with self._places.admit_page(name, *extra) as live:
                    self._in_work.add(live)
                    try:
                        finished = await self._answer(live, index, writer, draft, prompt_ids)
                    finally:
                        self._in_work.discard(live)
                self._count(finished)
            except ENDS_DOCUMENT:
                raise
            except Exception as error:  # noqa: BLE001 the edge of a page
                log_fault(error)
                await writer.write(page_failed(error))
                self._finished.num_failed_pages += 1
            finally:
                self._own_place_is_free |= takes_own

    async def _answer(
        self,
        live: LiveRequest,
        index: int,
        writer: EventWriter,
        draft: GenerationRequest,
        prompt_ids: tuple[int, ...],
    ) -> generation_pb2.Finished:
        async def prepare() -> list[PreparedImage]:
            return [await self._pages.prepare(index)]

        answer = Answer(self._scope, live, writer, time.monotonic_ns())
        images = await answer.prepare(prepare)
        if images is None:
            return await answer.run(draft, prompt_ids, None, is_page=True)
        has_turn = await live.until_cancelled(self._turn.acquire())
        try:
            return await answer.run(draft, prompt_ids, images, is_page=True)
        finally:
            if has_turn:
                self._turn.release()

    def _count(self, finished: generation_pb2.Finished) -> None:
        self._finished.num_pages += 1
        total, page = self._finished.usage, finished.usage
        total.prompt_tokens += page.prompt_tokens
        total.image_tokens += page.image_tokens
        total.completion_tokens += page.completion_tokens
        total.total_tokens += page.total_tokens


async def first_ends(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits until one of the tasks has ended and returns the others.

    Raises:
        Exception: What one of them raised.
    """
    done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    # A failed write cancels those that wait to write: the failure is the cause.
    for task in sorted(done, key=asyncio.Task.cancelled):
        task.result()
    return others


def page_failed(error: Exception) -> documents_pb2.PageFailed:
    """Returns the event of a page that was not read."""
    row = describe(error)
    return documents_pb2.PageFailed(
        code=row.code.value[0],
        reason=errors_pb2.ErrorReason.Value(f"ERROR_REASON_{row.reason}"),
        message=message_of(error),
        metadata=metadata_of(error),
    )

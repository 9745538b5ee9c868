"""DocumentsService: a picture, or the pages of a document, to streams of text."""

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deltaflash.v1 import documents_pb2, documents_pb2_grpc
from server.backend import EngineInfo, GenerationRequest
from server.config import ServerConfig
from server.images import (
    DecodePool,
    ImageRefusedError,
    ImageSize,
    PreparedImage,
    RefusalReason,
)
from server.live_requests import LiveRequest
from server.service_context import Engine, ServiceContext
from server.services.answer import Answer, CallScope, check_options
from server.services.call import CallContext, call
from server.services.document import DocumentReader, Pages
from server.services.pictures import check_picture, check_room, decoded_bytes
from server.services.writer import CallLine, EventWriter
from server.validation import (
    Findings,
    check_message_size,
    check_model,
    check_priority,
    check_request_id,
)

MAX_DOCUMENT_NAME_CHARS = 112
"""A page's name is its document's and its index, and has to be a name itself."""
MAX_INSTRUCTION_BYTES = 8192
MIN_PAGE_PIXELS = 1024
MIN_DPI, DEFAULT_DPI, MAX_DPI = 36, 144, 600
MAX_PARALLEL_PAGES = 64


@dataclass(frozen=True, slots=True)
class PageOrder:
    """How pages are read, checked.

    Attributes:
        draft: The request without id, prompt and time.
        instruction: What the model is told.
        size: Size of the picture that the model reads.
    """

    draft: GenerationRequest
    instruction: str
    size: ImageSize


class DocumentsServicer(documents_pb2_grpc.DocumentsServiceServicer):
    """Serves `deltaflash.v1.DocumentsService`."""

    def __init__(self, context: ServiceContext) -> None:
        """Takes what the services share."""
        self.context = context

    @call
    async def ParsePage(  # type: ignore[override]  # noqa: N802
        self, request: documents_pb2.ParsePageRequest, context: CallContext
    ) -> None:
        """Reads one page."""
        arrived_ns = time.monotonic_ns()
        self.context.lifecycle.require_serving()
        engine, config = self.context.require_engine(), self.context.config
        info, pool = engine.backend.info, self.context.require_pool("DocumentsService.ParsePage")
        check_message_size(request.ByteSize(), config)
        request_id = check_request_id(request)
        check_model(request.model if request.HasField("model") else None, info)
        findings = Findings()
        order = check_page_options(request.options, engine, config, findings)
        check_priority(request.priority, findings)
        findings.raise_any()
        picture = check_picture(request.image, config)
        held = request.ByteSize() + decoded_bytes(order.size, picture.header)
        scope = CallScope(self.context, engine, CallLine(context, config.write_timeout_s))
        with (
            self.context.live.admit(request_id, info.max_batch_size, info.max_queued, held) as live,
            EventWriter(scope.line, documents_pb2.ParsePageResponse) as writer,
        ):
            prompt_ids = await engine.prompts.encode_page(order.instruction, info)
            check_room([picture], order.size, prompt_ids, info)
            answer = Answer(scope, live, writer, arrived_ns)

            async def prepare() -> list[PreparedImage]:
                return [await picture.prepare(pool, order.size)]

            images = await answer.prepare(prepare)
            await answer.run(order.draft, prompt_ids, images, is_page=True)

    @call
    async def ParseDocument(  # type: ignore[override]  # noqa: N802
        self, request: documents_pb2.ParseDocumentRequest, context: CallContext
    ) -> None:
        """Reads the pages of a document."""
        arrived_ns = time.monotonic_ns()
        self.context.lifecycle.require_serving()
        engine, config = self.context.require_engine(), self.context.config
        info = engine.backend.info
        pool = self.context.require_pool("DocumentsService.ParseDocument")
        check_message_size(request.ByteSize(), config)
        request_id = check_request_id(request, MAX_DOCUMENT_NAME_CHARS)
        check_model(request.model if request.HasField("model") else None, info)
        findings = Findings()
        order = check_page_options(request.options, engine, config, findings)
        check_priority(request.priority, findings)
        check_document(request, config, findings)
        findings.raise_any()
        page_bytes = decoded_page_bytes(request, order.size, config)
        # A PDF is kept once more, in the memory that the workers read.
        held = request.ByteSize() * (2 if request.HasField("pdf") else 1) + page_bytes
        scope = CallScope(self.context, engine, CallLine(context, config.write_timeout_s))
        with (
            self.context.live.admit(request_id, info.max_batch_size, info.max_queued, held) as live,
            EventWriter(scope.line, documents_pb2.ParseDocumentResponse) as writer,
        ):
            prompt_ids = await engine.prompts.encode_page(order.instruction, info)
            started = documents_pb2.DocumentStarted(request_id=live.request_id)
            async with open_document(request, live, pool, order.size, config) as pages:
                started.num_pages = len(pages.indices)
                await writer.write(started)
                limit = max_parallel_pages(info, config)
                if request.HasField("max_parallel_pages"):
                    limit = min(limit, request.max_parallel_pages)
                reader = DocumentReader(scope, live, pages, limit, page_bytes)
                finished = await reader.read(order.draft, prompt_ids)
            finished.total_us = (time.monotonic_ns() - arrived_ns) // 1000
            await writer.write(finished)


def check_page_options(
    options: documents_pb2.PageOptions, engine: Engine, config: ServerConfig, findings: Findings
) -> PageOrder:
    """Checks how pages are to be read; the result is meaningless when there are findings."""
    info = engine.backend.info
    draft = check_options(options, info, config, findings, "options.")
    instruction = engine.prompts.page_instruction
    if options.HasField("instruction"):
        instruction = options.instruction
        num_bytes = len(instruction.encode())
        if not 0 < num_bytes <= MAX_INSTRUCTION_BYTES:
            findings.bad(
                "options.instruction",
                f"expected 1 to {MAX_INSTRUCTION_BYTES} bytes, got {num_bytes}",
            )
    most = info.max_image_pixels
    if options.HasField("max_pixels"):
        most = options.max_pixels
        findings.check_range("options.max_pixels", most, MIN_PAGE_PIXELS, info.max_image_pixels)
    least = min(info.min_image_pixels, most)
    if options.HasField("min_pixels"):
        least = options.min_pixels
        findings.check_range("options.min_pixels", least, MIN_PAGE_PIXELS, most)
    draft = replace(draft, report_progress=True)
    return PageOrder(draft, instruction, ImageSize(least, most, info.image_factor))


def check_document(
    request: documents_pb2.ParseDocumentRequest, config: ServerConfig, findings: Findings
) -> None:
    """Checks everything about a document but its bytes.

    Raises:
        ImageRefusedError: It has too many pictures.
    """
    most = config.images.max_pages
    match request.WhichOneof("document"):
        case "pdf":
            pdf = request.pdf
            if pdf.HasField("num_pages"):
                findings.check_range("pdf.num_pages", pdf.num_pages, 1, most)
            if pdf.HasField("dpi"):
                findings.check_range("pdf.dpi", pdf.dpi, MIN_DPI, MAX_DPI)
        case "pages":
            num_pages = len(request.pages.images)
            if num_pages == 0:
                findings.bad("pages.images", f"expected 1 to {most} pictures, got 0")
            if num_pages > most:
                raise ImageRefusedError(
                    RefusalReason.TOO_MANY_PAGES,
                    f"the document has {num_pages} pictures, the limit is {most} pages",
                    {"pages": str(num_pages), "max_pages": str(most)},
                )
        case _:
            findings.bad("document", "expected pdf or pages")
    if request.HasField("max_parallel_pages"):
        findings.check_range(
            "max_parallel_pages", request.max_parallel_pages, 1, MAX_PARALLEL_PAGES
        )


def max_parallel_pages(info: EngineInfo, config: ServerConfig) -> int:
    """Returns the most pages of one document in the engine; a seat is left to others."""
    return min(config.max_parallel_pages, max(1, info.max_batch_size - 1))


def decoded_page_bytes(
    request: documents_pb2.ParseDocumentRequest, size: ImageSize, config: ServerConfig
) -> int:
    """Returns what one page of a document takes at most once it is decoded."""
    if request.HasField("pdf"):
        return decoded_bytes(size, None)
    most = 0
    for image in request.pages.images:
        with contextlib.suppress(ImageRefusedError):  # its own error when its turn comes
            most = max(most, decoded_bytes(size, check_picture(image, config).header))
    return most


@asynccontextmanager
async def open_document(
    request: documents_pb2.ParseDocumentRequest,
    live: LiveRequest,
    pool: DecodePool,
    size: ImageSize,
    config: ServerConfig,
) -> AsyncIterator[Pages]:
    """Opens a document for as long as the context lasts; a cancelled one has no pages.

    Raises:
        ImageRefusedError: It cannot be opened.
    """
    images, pdf = request.pages.images, request.pdf
    num_pages = pdf.num_pages if pdf.HasField("num_pages") else None
    dpi = pdf.dpi if pdf.HasField("dpi") else DEFAULT_DPI

    async def decode(index: int) -> PreparedImage:
        return await check_picture(images[index], config).prepare(pool, size)

    async def render(index: int) -> PreparedImage:
        assert opened is not None  # noqa: S101 no page before
        return await pool.prepare_pdf_page(opened, index, dpi, size)

    if request.HasField("pages"):
        yield Pages(range(len(images)), decode)
        return
    opened = await live.until_cancelled(pool.open_pdf(pdf.data, pdf.first_page, num_pages))
    if opened is None:
        yield Pages((), render)
        return
    try:
        yield Pages(opened.page_indices, render)
    finally:
        opened.close()

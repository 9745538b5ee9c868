"""The pool of worker processes as the server sees it."""

from server.images.limits import ImageLimits, ImageSize
from server.images.prepared import PdfInfo, PreparedImage


class DecodePool:
    """Decodes pictures and pages in worker processes, which may hang or die without harm.

    A job waits in the order of arrival until a worker is free. A cancelled job frees its worker.
    """

    def __init__(self, limits: ImageLimits, num_workers: int = 1) -> None:
        """Takes the limits; `start` starts the processes."""
        self.limits = limits
        self.num_workers = num_workers

    async def start(self) -> None:
        """Starts the workers and waits until they are ready.

        Raises:
            DecoderLostError: A worker does not start.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the workers at once; jobs that run or wait fail with DecoderLostError."""
        raise NotImplementedError

    async def prepare(
        self, data: bytes, size: ImageSize, mime_type: str | None = None
    ) -> PreparedImage:
        """Makes the model's picture from a file.

        Raises:
            ImageRefusedError: The file is at fault; its header is checked before it waits.
            DecoderLostError: No worker could do it.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    async def prepare_pdf_page(
        self, pdf: PdfInfo, index: int, dpi: int, size: ImageSize
    ) -> PreparedImage:
        """Makes the model's picture of one page.

        Args:
            pdf: What `open_pdf` returned.
            index: The page, 0 to pdf.num_pages - 1.
            dpi: Resolution of the rendering; lower where the page had more pixels than allowed.
            size: What the model reads.

        Raises:
            ImageRefusedError: The page is at fault; others may be fine.
            DecoderLostError: No worker could do it.
        """
        raise NotImplementedError

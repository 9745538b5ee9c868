"""Pages of a PDF become RGB pictures, through PDFium. Runs in a worker process."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pypdfium2
import pypdfium2.raw
from PIL import Image

from server.images.formats import check_size
from server.images.limits import ImageLimits
from server.images.refusal import ImageRefusedError, RefusalReason

POINTS_PER_INCH = 72


@contextmanager
def open_document(data: bytes) -> Iterator[pypdfium2.PdfDocument]:
    """Opens a document for as long as the context lasts.

    Raises:
        ImageRefusedError: It is no PDF, is broken, needs a password or has no page.
    """
    # Not by the binding's own way, which takes a document without pages for an error of before.
    handle = pypdfium2.raw.FPDF_LoadMemDocument64(data, len(data), None)
    if not handle:
        if pypdfium2.raw.FPDF_GetLastError() == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise _refusal("the PDF is encrypted; needed is one that opens without a password")
        raise _refusal(
            f"the PDF of {len(data)} bytes, starting with {data[:8].hex(' ')}, cannot be opened: "
            "it is damaged or cut short"
        )
    document = pypdfium2.PdfDocument(handle)
    try:
        if len(document) < 1:
            raise _refusal("the PDF has no page; needed is at least 1")
        yield document
    finally:
        document.close()


def count_pages(data: bytes) -> int:
    """Returns the number of pages, 1 and up.

    Raises:
        ImageRefusedError: As `open_document`.
    """
    with open_document(data) as document:
        return len(document)


def render_page(
    data: bytes, index: int, dpi: int, max_pixels: int, limits: ImageLimits
) -> Image.Image:
    """Renders one page on white, turned as it says, with form fields and annotations.

    Args:
        data: The document.
        index: The page, from 0.
        dpi: Resolution; lower where the page had more than `max_pixels` pixels.
        max_pixels: Most pixels of the picture.
        limits: What pictures may be.

    Raises:
        ImageRefusedError: The page cannot be read, or has no sane size.
    """
    with open_document(data) as document:
        document.init_forms()
        try:
            page = document[index]
        except pypdfium2.PdfiumError as error:
            raise _refusal(f"page {index} of the PDF cannot be read: {error}") from None
        width, height = page.get_size()
        name = f"page {index} of the PDF"
        if not (0 < width < math.inf and 0 < height < math.inf):
            raise _refusal(f"{name} is {width:g} x {height:g} points; sides must be over 0")
        scale = _scale(width, height, dpi, max_pixels)
        # As PDFium's binding rounds them.
        pixels = math.ceil(width * scale), math.ceil(height * scale)
        check_size(*pixels, limits, f"{name} at {scale * POINTS_PER_INCH:.4g} dpi")
        bitmap = page.render(scale=scale, rev_byteorder=True)
        return Image.frombuffer(
            "RGB",
            (bitmap.width, bitmap.height),
            bitmap.buffer,
            "raw",
            "RGB",
            bitmap.stride,
            1,
        ).copy()


def _scale(width: float, height: float, dpi: int, max_pixels: int) -> float:
    """Returns pixels a point, so that a page of that many points has at most `max_pixels`."""
    scale = dpi / POINTS_PER_INCH
    if math.ceil(width * scale) * math.ceil(height * scale) <= max_pixels:
        return scale
    # Sides are rounded up: (width * s + 1) * (height * s + 1) = max_pixels, solved for s.
    area, rim = width * height, width + height
    return (math.sqrt(rim * rim + 4 * area * (max_pixels - 1)) - rim) / (2 * area)


def _refusal(message: str) -> ImageRefusedError:
    return ImageRefusedError(RefusalReason.DOCUMENT_INVALID, message)

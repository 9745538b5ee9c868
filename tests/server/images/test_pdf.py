"""Pages of a PDF become pictures; a bad page is its own error, a bad document a clear one."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pdf_files import PdfPage, pdf_file

from server.images import (
    DecodePool,
    ImageLimits,
    ImageRefusedError,
    ImageSize,
    PreparedImage,
    RefusalReason,
)
from server.images.pdf import render_page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    T = TypeVar("T")

LIMITS = ImageLimits()
SIZE = ImageSize(1024, 1 << 24)
RED, WHITE = (255, 0, 0), (255, 255, 255)


def with_pool(use: Callable[[DecodePool], Awaitable[T]], limits: ImageLimits = LIMITS) -> T:
    """Runs a coroutine with a pool of one worker."""

    async def main() -> T:
        pool = DecodePool(limits)
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    """Colours near the corners: top left, top right, bottom left, bottom right."""
    return [tuple(int(c) for c in pixels[y, x]) for y in (5, -6) for x in (5, -6)]


@pytest.mark.parametrize(
    ("rotate", "red_corner", "is_wide"),
    [(0, 2, True), (90, 0, False), (180, 1, True), (270, 3, False)],
)
def test_rotation(rotate: int, red_corner: int, is_wide: bool) -> None:
    picture = render_page(pdf_file([PdfPage(rotate=rotate)]), 0, 144, 1 << 24, LIMITS)
    assert picture.size == ((400, 200) if is_wide else (200, 400))
    expected = [WHITE] * 4
    expected[red_corner] = RED
    assert corners(np.asarray(picture)) == expected


def test_resolution() -> None:
    data = pdf_file([PdfPage()])
    for dpi, size in ((36, (100, 50)), (72, (200, 100)), (600, (1667, 834))):
        assert render_page(data, 0, dpi, 1 << 24, LIMITS).size == size


@pytest.mark.parametrize("max_pixels", [1024, 5000, 54_321, 1_000_000])
def test_resolution_falls_until_the_page_fits(max_pixels: int) -> None:
    for box in ((0, 0, 612, 792), (0, 0, 14_400, 14_400), (0, 0, 31.7, 5999), (-50, -20, 400, 77)):
        page = PdfPage(box=box)
        picture = render_page(pdf_file([page]), 0, 600, max_pixels, LIMITS)
        assert picture.width * picture.height <= max_pixels
        # As large as whole pixels allow: one more on each side would be too many.
        assert (picture.width + 1) * (picture.height + 1) > 0.95 * max_pixels
        ratio = (box[2] - box[0]) / (box[3] - box[1])
        assert math.isclose(picture.width / picture.height, ratio, rel_tol=2 / min(picture.size))


def test_box_that_begins_elsewhere() -> None:
    page = PdfPage(content=b"1 0 0 rg 1000 2000 100 50 re f", box=(1000, 2000, 1200, 2100))
    assert corners(np.asarray(render_page(pdf_file([page]), 0, 72, 1 << 24, LIMITS))) == [
        WHITE,
        WHITE,
        RED,
        WHITE,
    ]


def test_pages_through_the_pool() -> None:
    async def use(pool: DecodePool) -> tuple[range, list[PreparedImage]]:
        pdf = await pool.open_pdf(pdf_file([PdfPage(), PdfPage(rotate=90), PdfPage(content=b"")]))
        made = [await pool.prepare_pdf_page(pdf, index, 144, SIZE) for index in pdf.page_indices]
        pdf.close()
        with pytest.raises(ValueError, match="given back"):
            await pool.prepare_pdf_page(pdf, 0, 144, SIZE)
        return pdf.page_indices, made

    indices, made = with_pool(use)
    assert indices == range(3)
    assert [(p.source_width, p.source_height) for p in made] == [(400, 200), (200, 400), (400, 200)]
    assert made[0].pixels.shape == (192, 384, 3)  # 6.25 and 12.5 blocks, to the even one
    assert (made[2].pixels == 255).all()
    assert len({p.digest for p in made}) == 3


def test_a_page_is_not_rendered_larger_than_the_model_reads() -> None:
    async def use(pool: DecodePool) -> PreparedImage:
        pdf = await pool.open_pdf(pdf_file([PdfPage()]))
        return await pool.prepare_pdf_page(pdf, 0, 600, ImageSize(1024, 50_000))

    made = with_pool(use)
    assert made.source_width * made.source_height <= 50_000
    assert made.pixels.shape[0] * made.pixels.shape[1] <= 50_000


def test_one_broken_page_fails_alone() -> None:
    pages = [PdfPage(), PdfPage(broken=True), PdfPage(box=(0, 0, 2, 1000)), PdfPage()]

    async def use(pool: DecodePool) -> list[PreparedImage | BaseException]:
        pdf = await pool.open_pdf(pdf_file(pages))
        return await asyncio.gather(
            *(pool.prepare_pdf_page(pdf, index, 72, SIZE) for index in pdf.page_indices),
            return_exceptions=True,
        )

    first, broken, strip, last = with_pool(use)
    assert isinstance(first, PreparedImage)
    assert isinstance(last, PreparedImage)
    assert first.digest == last.digest
    assert isinstance(broken, ImageRefusedError)
    assert broken.reason is RefusalReason.DOCUMENT_INVALID
    assert broken.metadata == {"page_index": "1"}
    assert "page 1" in str(broken)
    assert isinstance(strip, ImageRefusedError)
    assert strip.metadata == {"page_index": "2"}
    assert "2 x 1000 pixels" in str(strip)


def test_bad_documents() -> None:
    good = pdf_file([PdfPage()])
    bad = {
        "encrypted": (pdf_file([PdfPage()], user_password=b"secret"), "password"),
        "empty": (pdf_file([]), "no page"),
        "no bytes": (b"", "nothing"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "89 50 4e 47"),
        "cut to its first line": (good[:9], "cannot be opened"),
        "zeros": (b"%PDF-1.7\n" + bytes(5000), "cannot be opened"),
    }

    async def use(pool: DecodePool) -> dict[str, ImageRefusedError]:
        errors = {}
        for name, (data, _) in bad.items():
            with pytest.raises(ImageRefusedError) as caught:
                await pool.open_pdf(data)
            errors[name] = caught.value
        return errors

    for name, error in with_pool(use).items():
        assert error.reason is RefusalReason.DOCUMENT_INVALID, name
        assert bad[name][1] in str(error), name


def test_encrypted_without_a_password_is_read() -> None:
    """Its owner forbids printing and the like; every viewer shows it."""
    data = pdf_file([PdfPage()], user_password=b"")
    assert b"/Encrypt" in data
    picture = render_page(data, 0, 72, 1 << 24, LIMITS)
    assert corners(np.asarray(picture)) == [WHITE, WHITE, RED, WHITE]


def test_many_pages() -> None:
    """10,000 pages are refused as a whole; a part of them is fine."""
    data = pdf_file([PdfPage()] * 10_000)

    async def use(pool: DecodePool) -> PreparedImage:
        with pytest.raises(ImageRefusedError, match="10000 pages, the limit is 1000") as caught:
            await pool.open_pdf(data)
        assert caught.value.reason is RefusalReason.TOO_MANY_PAGES
        assert caught.value.metadata == {"pages": "10000", "max_pages": "1000"}
        pdf = await pool.open_pdf(data, 9_500, 20)
        assert (pdf.num_pages, pdf.page_indices) == (10_000, range(9_500, 9_520))
        assert (await pool.open_pdf(data, 9_999, 50)).page_indices == range(9_999, 10_000)
        with pytest.raises(ImageRefusedError, match="reads none") as caught:
            await pool.open_pdf(data, 10_000, 1)
        assert caught.value.reason is RefusalReason.DOCUMENT_INVALID
        return await pool.prepare_pdf_page(pdf, 9_519, 72, SIZE)

    assert with_pool(use).source_width == 200


def test_document_over_its_limit_of_bytes() -> None:
    data = pdf_file([PdfPage()])

    async def use(pool: DecodePool) -> None:
        with pytest.raises(ImageRefusedError) as caught:
            await pool.open_pdf(data)
        assert caught.value.reason is RefusalReason.TOO_LARGE
        assert caught.value.metadata == {"value": str(len(data)), "limit": str(len(data) - 1)}

    with_pool(use, ImageLimits(max_document_bytes=len(data) - 1))


def test_pages_that_lie_about_their_count() -> None:
    data = pdf_file([PdfPage()]).replace(b"/Count 1 ", b"/Count 999999999 ")

    async def use(pool: DecodePool) -> int | RefusalReason:
        try:
            return (await pool.open_pdf(data)).num_pages
        except ImageRefusedError as error:
            return error.reason

    assert with_pool(use) in {1, RefusalReason.TOO_MANY_PAGES, RefusalReason.DOCUMENT_INVALID}

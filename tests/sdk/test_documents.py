"""Documents of which pages failed, in both clients."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from sdk.scripted_server import Script, finished, started

from deltaflash.v1 import documents_pb2, errors_pb2, generation_pb2
from deltaflash_client import (
    AsyncClient,
    Client,
    Document,
    ErrorReason,
    Image,
    InternalError,
    InvalidArgumentError,
    PageEvent,
    PageFailed,
    Pdf,
    ProtocolError,
)

response = documents_pb2.ParseDocumentResponse
IMAGES = [Image(b"a"), Image(b"b")]


def failed(index: int, **fields: object) -> documents_pb2.ParseDocumentResponse:
    values = {
        "code": grpc.StatusCode.INVALID_ARGUMENT.value[0],
        "reason": errors_pb2.ERROR_REASON_IMAGE_TOO_LARGE,
        "message": "too large",
        "metadata": {"value": "9", "limit": "8"},
    }
    return response(page_index=index, page_failed=documents_pb2.PageFailed(**(values | fields)))


def document_of(
    *events: documents_pb2.ParseDocumentResponse, num_failed: int, **fields: object
) -> list[documents_pb2.ParseDocumentResponse]:
    """A document of page 0, which is read, and these events."""
    return [
        response(document_started=documents_pb2.DocumentStarted(request_id="d", num_pages=2)),
        response(page_index=0, started=started().started),
        *events,
        response(page_index=0, finished=finished().finished),
        response(
            document_finished=documents_pb2.DocumentFinished(
                num_pages=1,
                num_failed_pages=num_failed,
                usage=generation_pb2.Usage(total_tokens=7),
                **fields,
            )
        ),
    ]


def collect_blocking(target: str) -> Document:
    with Client(target) as client:
        return client.parse_document(IMAGES).collect()


def collect_asyncio(target: str) -> Document:
    async def ask() -> Document:
        async with AsyncClient(target) as client:
            return await client.parse_document(IMAGES).collect()

    return asyncio.run(ask())


both = pytest.mark.parametrize("collect", [collect_blocking, collect_asyncio])


@both
def test_failed_pages_are_told_apart(script: Script, collect: Callable[[str], Document]) -> None:
    begun = response(page_index=1, started=started().started)
    script.document_events = document_of(begun, failed(1), num_failed=1)
    document = collect(script.target)
    assert [page.index for page in document.pages] == [0]
    (page,) = document.failed_pages
    assert page.index == 1
    assert isinstance(page.error, InvalidArgumentError)
    assert page.error.reason is ErrorReason.IMAGE_TOO_LARGE
    assert page.error.metadata == {"value": "9", "limit": "8"}
    assert "too large" in str(page.error)
    assert not document.cancelled
    with pytest.raises(InvalidArgumentError, match="too large"):
        document.require_all()


@both
def test_cancelled_document(script: Script, collect: Callable[[str], Document]) -> None:
    script.document_events = document_of(num_failed=0, cancelled=True)
    document = collect(script.target)
    assert document.cancelled
    assert document.require_all() == document.pages


def test_failed_page_in_a_stream_and_reasons_to_come(script: Script) -> None:
    script.document_events = document_of(failed(1, code=99, reason=999), num_failed=1)
    with Client(script.target) as client:
        events = list(client.parse_document(IMAGES))
    (event,) = [e for e in events if isinstance(e, PageEvent) and e.page_index == 1]
    assert isinstance(event.event, PageFailed)
    assert isinstance(event.event.error, InternalError)
    assert event.event.error.reason is ErrorReason.UNSPECIFIED


@pytest.mark.parametrize(
    "events",
    [
        document_of(failed(1), num_failed=0),
        document_of(num_failed=1),
        document_of(failed(1), response(page_index=1, started=started().started), num_failed=1),
        document_of(failed(1), failed(1), num_failed=1),
    ],
    ids=["not counted", "counted only", "event after it", "twice"],
)
def test_a_stream_against_the_contract_is_an_error(
    script: Script, events: list[documents_pb2.ParseDocumentResponse]
) -> None:
    script.document_events = events
    with pytest.raises(ProtocolError):
        collect_blocking(script.target)


def test_a_pdf_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%PDF-1.4")
    assert Pdf.from_file(path, num_pages=2, dpi=100) == Pdf(b"%PDF-1.4", None, 2, 100)

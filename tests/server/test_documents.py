"""Documents: pages side by side, broken ones among good ones, every end of the whole."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from fakes.app import Details, Served, ask, error_of, on_loop, serving
from fakes.backend import SEES, FakeBackend, Script
from fakes.files import encrypted_pdf, gif_header, pdf, png

from deltaflash.v1 import control_pb2, documents_pb2, errors_pb2, generation_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
REASON = errors_pb2.ErrorReason
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
LONG = Script(deltas=("tick ",) * 64, step_s=0.05)
SHORT = Script(deltas=("a", "b"), step_s=0.02)

Response = documents_pb2.ParseDocumentResponse
Call = grpc.aio.UnaryStreamCall[documents_pb2.ParseDocumentRequest, Response]


def seeing(script: Script | None = None, **info: object) -> FakeBackend:
    return FakeBackend(script, replace(SEES, **info))


def ask_pdf(data: bytes, **fields: object) -> documents_pb2.ParseDocumentRequest:
    of_pdf = {name: fields.pop(name) for name in ("first_page", "num_pages", "dpi") & fields.keys()}
    return documents_pb2.ParseDocumentRequest(pdf=documents_pb2.Pdf(data=data, **of_pdf), **fields)


def ask_images(*pages: bytes, **fields: object) -> documents_pb2.ParseDocumentRequest:
    images = [generation_pb2.Image(data=data) for data in pages]
    return documents_pb2.ParseDocumentRequest(
        pages=documents_pb2.PageImages(images=images), **fields
    )


async def read_all(
    served: Served, request: documents_pb2.ParseDocumentRequest
) -> tuple[list[Response], dict[int, list[str]], documents_pb2.DocumentFinished]:
    """All events; the kinds of those of each page; the last one."""
    return sorted_out([event async for event in served.documents.ParseDocument(request)])


def sorted_out(
    events: list[Response],
) -> tuple[list[Response], dict[int, list[str]], documents_pb2.DocumentFinished]:
    assert events[0].HasField("document_started")
    assert events[-1].HasField("document_finished")
    pages: dict[int, list[str]] = {}
    for event in events[1:-1]:
        assert event.HasField("page_index")
        pages.setdefault(event.page_index, []).append(event.WhichOneof("event") or "")
    for kinds in pages.values():
        assert kinds[-1] in {"finished", "page_failed"}
        assert not {"finished", "page_failed"} & set(kinds[:-1])
    return events, pages, events[-1].document_finished


@on_loop
async def test_pages_of_a_pdf() -> None:
    async with serving(seeing(SHORT)) as served:
        request = ask_pdf(pdf("one", "two", "three"), request_id="doc", dpi=100)
        events, pages, finished = await read_all(served, request)
        assert events[0].document_started.request_id == "doc"
        assert events[0].document_started.num_pages == 3
        assert sorted(pages) == [0, 1, 2]
        for kinds in pages.values():
            assert [kind for kind in kinds if kind != "progress"][:2] == ["started", "page_info"]
            assert kinds.count("progress") == 5
        started = {e.page_index: e.started for e in events if e.HasField("started")}
        assert {s.request_id for s in started.values()} == {"doc/0", "doc/1", "doc/2"}
        info = next(e.page_info for e in events if e.HasField("page_info"))
        assert info.source_width == pytest.approx(298 / 72 * 100, abs=2)
        assert (finished.num_pages, finished.num_failed_pages, finished.cancelled) == (3, 0, False)
        assert finished.usage.completion_tokens == 6
        assert finished.usage.image_tokens == sum(s.image_tokens for s in started.values())
        assert finished.total_us > 0
        await served.until_idle()
        assert served.app.context.live.held_bytes == 0


@on_loop
async def test_a_range_of_pages_keeps_their_numbers() -> None:
    async with serving(seeing()) as served:
        many = pdf(*[f"page {i}" for i in range(30)])
        _, pages, finished = await read_all(served, ask_pdf(many, first_page=27))
        assert sorted(pages) == [27, 28, 29]
        _, pages, finished = await read_all(served, ask_pdf(many, first_page=3, num_pages=2))
        assert sorted(pages) == [3, 4]
        assert finished.num_pages == 2


@on_loop
async def test_broken_pages_fail_alone() -> None:
    async with serving(seeing()) as served:
        request = ask_images(png(), b"no picture", png(300, 300)[:-40], gif_header(), png(64, 64))
        events, pages, finished = await read_all(served, request)
        assert (finished.num_pages, finished.num_failed_pages) == (2, 3)
        failed = {e.page_index: e.page_failed for e in events if e.HasField("page_failed")}
        assert {index: entry.reason for index, entry in failed.items()} == {
            1: REASON.ERROR_REASON_IMAGE_INVALID,
            2: REASON.ERROR_REASON_IMAGE_INVALID,
            3: REASON.ERROR_REASON_IMAGE_TOO_LARGE,
        }
        assert {entry.code for entry in failed.values()} == {INVALID.value[0]}
        assert "65535 x 65535" in failed[3].message
        assert int(failed[3].metadata["limit"]) > 0
        assert [pages[i][-1] for i in (0, 4)] == ["finished"] * 2
        events, pages, finished = await read_all(served, ask_pdf(pdf("a", "b", "c", broken=(1,))))
        assert (finished.num_pages, finished.num_failed_pages) == (2, 1)
        (entry,) = [e for e in events if e.HasField("page_failed")]
        assert entry.page_index == 1
        assert entry.page_failed.reason == REASON.ERROR_REASON_DOCUMENT_INVALID
        await served.until_idle()


@on_loop
async def test_pages_that_all_fail_end_with_ok() -> None:
    async with serving(seeing()) as served:
        _, _, finished = await read_all(served, ask_images(b"x", b"y"))
        assert (finished.num_pages, finished.num_failed_pages) == (0, 2)
        assert finished.usage == generation_pb2.Usage()
        assert served.backend.requests == []


@on_loop
async def test_a_page_too_long_for_the_context_fails_alone() -> None:
    async with serving(seeing(context_len=200)) as served:
        events, _, finished = await read_all(served, ask_images(png(64, 64), png(512, 512)))
        assert (finished.num_pages, finished.num_failed_pages) == (1, 1)
        (entry,) = [e.page_failed for e in events if e.HasField("page_failed")]
        assert entry.reason == REASON.ERROR_REASON_PROMPT_TOO_LONG
        assert entry.metadata["max_prompt_tokens"] == "199"


BAD_DOCUMENTS: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "DOCUMENT_INVALID", "PDF"),
    "picture": (png(), "DOCUMENT_INVALID", "%PDF"),
    "text": (b"page one", "DOCUMENT_INVALID", "%PDF"),
    "junk": (b"%PDF-1.7 and nothing else", "DOCUMENT_INVALID", "cannot be opened"),
    "cut": (pdf("a", "b")[:300], "DOCUMENT_INVALID", "cannot be opened"),
    "encrypted": (encrypted_pdf(), "DOCUMENT_INVALID", "encrypted"),
    "10,000 pages": (pdf(*["x"] * 10_000), "TOO_MANY_PAGES", "10000 pages, the limit is 1000"),
}


@on_loop
async def test_documents_that_cannot_be_opened_fail_the_call() -> None:
    async with serving(seeing()) as served:
        for name, (data, reason, words) in BAD_DOCUMENTS.items():
            call = served.documents.ParseDocument(ask_pdf(data))
            error = await error_of(call)
            assert (error.code(), Details(error).reason) == (INVALID, reason), name
            assert words in (error.details() or ""), (name, error.details())
        error = Details(await error_of(served.documents.ParseDocument(ask_pdf(pdf()))))
        assert error.reason == "DOCUMENT_INVALID"
        beyond = served.documents.ParseDocument(ask_pdf(pdf("a"), first_page=1))
        assert Details(await error_of(beyond)).reason == "DOCUMENT_INVALID"
        # A few of many pages can be had.
        many = ask_pdf(BAD_DOCUMENTS["10,000 pages"][0], first_page=9_998)
        _, pages, _ = await read_all(served, many)
        assert sorted(pages) == [9_998, 9_999]
        error = Details(await error_of(served.documents.ParseDocument(ask_images(*[b"x"] * 1001))))
        assert (error.code, error.reason) == (INVALID, "TOO_MANY_PAGES")
        assert error.metadata == {"pages": "1001", "max_pages": "1000"}
        await served.until_idle()
        assert served.app.context.live.held_bytes == 0


@on_loop
async def test_bad_fields_are_named() -> None:
    async with serving(seeing()) as served:
        one = pdf("a")
        for request, field in (
            (documents_pb2.ParseDocumentRequest(), "document"),
            (ask_images(), "pages.images"),
            (ask_pdf(one, dpi=35), "pdf.dpi"),
            (ask_pdf(one, dpi=601), "pdf.dpi"),
            (ask_pdf(one, num_pages=0), "pdf.num_pages"),
            (ask_pdf(one, num_pages=1001), "pdf.num_pages"),
            (ask_pdf(one, max_parallel_pages=0), "max_parallel_pages"),
            (ask_pdf(one, max_parallel_pages=65), "max_parallel_pages"),
            (ask_pdf(one, request_id="x" * 113), "request_id"),
            (
                ask_pdf(one, options=documents_pb2.PageOptions(instruction="")),
                "options.instruction",
            ),
        ):
            error = Details(await error_of(served.documents.ParseDocument(request)))
            assert (error.code, error.fields) == (INVALID, [field]), field


@on_loop
async def test_a_document_leaves_seats_to_others() -> None:
    async with serving(seeing(Script(deltas=("tick ",) * 8, step_s=0.05))) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 40), request_id="long"))
        await until(lambda: len(served.backend.open) >= 3)
        assert served.backend.info.max_batch_size == 4
        most = 0
        for _ in range(20):
            most = max(most, len(served.backend.open))
            await asyncio.sleep(0.02)
        assert most == 3  # and the pages that are ready wait outside of the engine
        assert served.app.context.live.num_places == 5
        began = time.monotonic()
        await served.collect(ask(stopping=generation_pb2.StoppingOptions(max_tokens=1)))
        assert time.monotonic() - began < 0.3
        call.cancel()
        await served.until_idle()
        # The caller may ask for fewer, not for more.
        call = served.documents.ParseDocument(ask_pdf(pdf("x", "x", "x"), max_parallel_pages=1))
        most = 0
        async for _ in call:
            most = max(most, len(served.backend.open))
        assert most == 1


async def until(good: Callable[[], bool], limit_s: float = 3.0) -> None:
    async with asyncio.timeout(limit_s):
        while not good():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@on_loop
async def test_a_document_goes_on_when_the_house_is_full() -> None:
    async with serving(seeing(SHORT, max_batch_size=2, max_queued=0)) as served:
        served.backend.script = LONG
        other = served.generate()
        await other.read()
        served.backend.script = SHORT
        # One place is left: one page after the other, none of them refused.
        _, _, finished = await read_all(served, ask_pdf(pdf(*["x"] * 5)))
        assert finished.num_pages == 5
        other.cancel()
        await served.until_idle()


@on_loop
async def test_cancel_of_a_page_ends_that_page() -> None:
    async with serving(seeing(Script(deltas=("tick ",) * 16, step_s=0.05))) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf("a", "b", "c"), request_id="doc"))
        events = []
        async for event in call:
            events.append(event)
            if event.HasField("delta") and event.page_index == 1 and len(events) < 1000:
                await served.control.Cancel(control_pb2.CancelRequest(request_id="doc/1"))
        _, _, finished = sorted_out(events)
        assert (finished.num_pages, finished.cancelled) == (3, False)
        reasons = {e.page_index: e.finished.finish_reason for e in events if e.HasField("finished")}
        assert reasons[1] == CANCELLED
        assert Counter(reasons.values())[CANCELLED] == 1


@on_loop
async def test_cancel_of_a_document_ends_its_pages() -> None:
    async with serving(seeing(LONG)) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 20), request_id="doc"))
        events = []
        async for event in call:
            events.append(event)
            if event.HasField("delta") and sum(e.HasField("delta") for e in events) == 1:
                began = time.monotonic()
                await served.control.Cancel(control_pb2.CancelRequest(request_id="doc"))
        assert time.monotonic() - began < 1
        _, pages, finished = sorted_out(events)
        assert finished.cancelled
        assert 1 <= len(pages) == finished.num_pages < 20
        reasons = {e.finished.finish_reason for e in events if e.HasField("finished")}
        assert reasons == {CANCELLED}
        await served.until_idle()
        status = await served.control.Cancel(control_pb2.CancelRequest(request_id="doc"))
        assert status.status == control_pb2.CANCEL_STATUS_ALREADY_FINISHED


async def leave(served: Served, call: Call) -> None:
    del served
    call.cancel()


async def pass_deadline(served: Served, call: Call) -> None:
    del served
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way", [leave, pass_deadline])
@on_loop
async def test_every_end_frees_everything(
    way: Callable[[Served, Call], Awaitable[None]],
) -> None:
    async with serving(seeing(LONG)) as served:
        for num_events in (0, 1, 4, 12):
            timeout = 0.4 if way is pass_deadline else None
            call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 20)), timeout=timeout)
            for _ in range(num_events):
                await call.read()
            await way(served, call)
            await served.until_idle(5)
            assert served.app.context.live.held_bytes == 0
            assert served.app.context.live.num_places == 0


@on_loop
async def test_a_lost_engine_ends_the_call() -> None:
    async with serving(seeing(LONG)) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 20)))
        for _ in range(8):
            await call.read()
        served.backend.lose("the device is gone")
        error = await error_of(call)
        assert (error.code(), Details(error).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")


@on_loop
async def test_drain_lets_a_document_end() -> None:
    async with serving(seeing(SHORT)) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 12)))
        events = [await call.read()]
        served.app.request_stop()
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
        _, _, finished = sorted_out(events)
        assert finished.num_pages == 12


@on_loop
async def test_end_of_the_grace_ends_a_document() -> None:
    async with serving(seeing(LONG), grace_s=0.3) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 12)))
        await call.read()
        served.app.request_stop()
        error = await error_of(call)
        assert (error.code(), Details(error).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


@on_loop
async def test_a_slow_reader_is_ended_and_holds_nobody_up() -> None:
    script = Script(deltas=("x" * 200_000,) * 8, step_s=0.001)
    async with serving(seeing(script), write_timeout_s=0.5) as served:
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 40)))
        await call.read()
        await asyncio.sleep(0.3)
        texts, _ = await served.collect()
        assert sum(map(len, texts)) == 1_600_000
        error = None
        await asyncio.sleep(1.2)
        await served.until_idle(5)
        error = await error_of(call)
        assert (error.code(), Details(error).reason) == (grpc.StatusCode.ABORTED, "SLOW_READER")


@on_loop
async def test_names_of_pages_that_are_in_use() -> None:
    async with serving(seeing(LONG)) as served:
        other = served.generate(ask(request_id="doc/1"))
        await other.read()
        call = served.documents.ParseDocument(ask_pdf(pdf("a", "b"), request_id="doc"))
        async for event in call:
            if event.HasField("page_failed"):
                assert event.page_index == 1
                assert event.page_failed.reason == REASON.ERROR_REASON_REQUEST_ID_IN_USE
                break
        call.cancel()
        other.cancel()
        await served.until_idle()


@on_loop
async def test_a_dead_decoder_harms_one_page() -> None:
    async with serving(seeing(SHORT)) as served:
        pool = served.app.context.pool
        assert pool is not None
        call = served.documents.ParseDocument(ask_pdf(pdf(*["x"] * 6)))
        events = []
        async for event in call:
            events.append(event)
            if len(events) == 4:
                for worker in list(pool._workers):
                    worker.kill()
        _, _, finished = sorted_out(events)
        assert finished.num_pages + finished.num_failed_pages == 6
        assert finished.num_failed_pages <= 1
        assert served.app.context.lifecycle.phase.name == "SERVING"

"""Answers come in order, and a stream that is left ends its request on the server."""

import asyncio
import gc
import threading
import time

import grpc
import pytest
from sdk.callers import Ask, both_clients
from sdk.scripted_server import Events, Script, delta, finished, started

from deltaflash.v1 import documents_pb2, generation_pb2, inference_pb2
from deltaflash_client import (
    AsyncClient,
    Client,
    Delta,
    DocumentFinished,
    DocumentStarted,
    Finished,
    FinishReason,
    GenerationStream,
    Image,
    PageEvent,
    ProgressPhase,
    ProtocolError,
    RequestCancelledError,
    Started,
    StopMatch,
    TokenCandidate,
    TokenRecord,
)

TEXTS = ["# Ti", "tle\n", "", "caf\u00e9 \U0001f469\u200d\U0001f52c", " end"]


def answer(_request: inference_pb2.GenerateRequest, _context: grpc.ServicerContext) -> Events:
    yield inference_pb2.GenerateResponse(
        progress=generation_pb2.Progress(phase=generation_pb2.PROGRESS_PHASE_QUEUED, fraction=0.5)
    )
    yield started(seed=2**64 - 1)
    yield inference_pb2.GenerateResponse()  # an event that this client does not know
    for text in TEXTS:
        yield delta(text)
    yield finished()


def endless(_request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    yield started()
    while context.is_active():
        yield delta("x")
        time.sleep(0.01)


def silent(_request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    while context.is_active():
        time.sleep(0.01)
    return
    yield


@both_clients
def test_completion_has_everything_the_events_said(script: Script, ask: Ask) -> None:
    script.answers = [answer]
    completion = ask(script.target)
    assert completion.text == "".join(TEXTS)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_match == StopMatch(stop_string="END")
    assert completion.usage.total_tokens == 7
    assert completion.stats.accepted_per_position == (1, 1, 0)
    assert completion.stats.time_to_first_token_us is None
    assert completion.seed == 2**64 - 1
    assert script.ended.wait(1)
    assert not script.ended_as_cancelled


def test_deltas_joined_equal_the_collected_text(script: Script) -> None:
    script.answers = [answer]
    with Client(script.target) as client:
        events = list(client.generate("hi"))
        assert "".join(e.text for e in events if isinstance(e, Delta)) == "".join(TEXTS)
        assert events[0].phase is ProgressPhase.QUEUED
        assert events[0].fraction == 0.5
        assert isinstance(events[1], Started)
        assert isinstance(events[-1], Finished)
        assert "".join(client.generate("hi").text()) == client.generate_text("hi").text


def test_collect_keeps_what_was_read_before(script: Script) -> None:
    script.answers = [answer]
    with Client(script.target) as client:
        stream = client.generate("hi")
        next(stream)
        while not isinstance(next(stream), Delta):
            pass
        assert stream.collect().text == "".join(TEXTS)
        assert list(stream) == []


def test_token_records(script: Script) -> None:
    record = generation_pb2.TokenRecord(id=7, piece=b"\xe2\x82", logprob=-0.5, rank=1)
    record.candidates.add(id=7, piece=b"\xe2\x82", logprob=-0.5)
    bare = generation_pb2.TokenRecord(id=8, piece=b"\xac")
    script.answers = [lambda _r, _c: iter([started(), delta("\u20ac", record, bare), finished()])]
    with Client(script.target) as client:
        assert client.generate_text("hi").tokens == (
            TokenRecord(7, b"\xe2\x82", -0.5, 1, (TokenCandidate(7, b"\xe2\x82", -0.5),)),
            TokenRecord(8, b"\xac", None, None, ()),
        )


@both_clients
@pytest.mark.parametrize(
    "events",
    [
        [started(), delta("x")],
        [started(), started(), finished()],
        [delta("x"), finished()],
        [started(), finished(), delta("x")],
    ],
    ids=["no Finished", "two Started", "no Started", "text after Finished"],
)
def test_a_stream_against_the_contract_is_an_error(
    script: Script, ask: Ask, events: list[inference_pb2.GenerateResponse]
) -> None:
    script.answers = [lambda _r, _c: iter(events)]
    with pytest.raises(ProtocolError):
        ask(script.target)


def read_until_delta(stream: GenerationStream) -> None:
    while not isinstance(next(stream), Delta):
        pass


def assert_cancelled_within_1_s(script: Script) -> None:
    assert script.ended.wait(1)
    assert script.ended_as_cancelled


def test_leaving_the_block_cancels(script: Script) -> None:
    script.answers = [endless]
    with Client(script.target) as client:
        with client.generate("hi") as stream:
            for event in stream:
                if isinstance(event, Delta):
                    break
        assert_cancelled_within_1_s(script)
        with pytest.raises(RequestCancelledError):
            next(stream)


def test_an_exception_in_the_loop_cancels(script: Script) -> None:
    script.answers = [endless]
    with Client(script.target) as client:

        def consume() -> None:
            with client.generate("hi") as stream:
                for _ in stream:
                    raise KeyError

        with pytest.raises(KeyError):
            consume()
        assert_cancelled_within_1_s(script)


def test_a_dropped_stream_cancels(script: Script) -> None:
    script.answers = [endless]
    with Client(script.target) as client:
        stream = client.generate("hi")
        read_until_delta(stream)
        del stream
        gc.collect()
        assert_cancelled_within_1_s(script)


def test_leaving_the_text_loop_cancels(script: Script) -> None:
    script.answers = [endless]
    with Client(script.target) as client:
        for _ in client.generate("hi").text():
            break
        assert_cancelled_within_1_s(script)


def test_close_from_another_thread_ends_a_blocked_read(script: Script) -> None:
    script.answers = [silent]
    with Client(script.target) as client:
        stream = client.generate("hi")
        timer = threading.Timer(0.2, stream.close)
        timer.start()
        with pytest.raises(RequestCancelledError):
            next(stream)
        timer.join()
        assert_cancelled_within_1_s(script)


async def aread_until_delta(stream: object) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            return


def test_asyncio_leaving_the_block_cancels(script: Script) -> None:
    script.answers = [endless]

    async def main() -> None:
        async with AsyncClient(script.target) as client:
            async with client.generate("hi") as stream:
                await aread_until_delta(stream)
            assert await asyncio.to_thread(script.ended.wait, 1)
            with pytest.raises(RequestCancelledError):
                await anext(stream)

    asyncio.run(main())
    assert script.ended_as_cancelled


def test_asyncio_an_exception_in_the_loop_cancels(script: Script) -> None:
    script.answers = [endless]

    async def main() -> None:
        async with AsyncClient(script.target) as client:

            async def consume() -> None:
                async with client.generate("hi") as stream:
                    async for _ in stream:
                        raise KeyError

            with pytest.raises(KeyError):
                await consume()
            assert await asyncio.to_thread(script.ended.wait, 1)

    asyncio.run(main())
    assert script.ended_as_cancelled


def test_asyncio_a_dropped_stream_cancels(script: Script) -> None:
    script.answers = [endless]

    async def main() -> None:
        async with AsyncClient(script.target) as client:
            stream = client.generate("hi")
            await aread_until_delta(stream)
            del stream
            gc.collect()
            assert await asyncio.to_thread(script.ended.wait, 1)

    asyncio.run(main())
    assert script.ended_as_cancelled


@pytest.mark.parametrize("script_of", [silent, endless])
def test_asyncio_cancelling_the_reader_cancels(script: Script, script_of: object) -> None:
    script.answers = [script_of]

    async def main() -> None:
        async with AsyncClient(script.target) as client:
            stream = client.generate("hi")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await stream.collect()
            assert await asyncio.to_thread(script.ended.wait, 1)

    asyncio.run(main())
    assert script.ended_as_cancelled


def test_asyncio_aclose_from_another_task_ends_a_waiting_read(script: Script) -> None:
    script.answers = [silent]

    async def main() -> None:
        async with AsyncClient(script.target) as client:
            stream = client.generate("hi")
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.2)
            await stream.aclose()
            with pytest.raises(RequestCancelledError):
                await reader

    asyncio.run(main())


@both_clients
def test_a_status_cancelled_of_the_server_is_an_error(script: Script, ask: Ask) -> None:
    def cancelled(_r: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield started()
        context.abort(grpc.StatusCode.CANCELLED, "by the proxy")

    script.answers = [cancelled]
    with pytest.raises(RequestCancelledError):
        ask(script.target)


def test_many_dropped_streams_leave_nothing_behind(script: Script) -> None:
    script.answers = [endless]
    with Client(script.target) as client:
        for _ in range(50):
            read_until_delta(client.generate("hi"))
        deadline_s = time.monotonic() + 2
        while script.running and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert script.running == 0


def test_a_page(script: Script) -> None:
    with Client(script.target) as client:
        completion = client.parse_page(Image(b"abc", "image/png")).collect()
    assert completion.text == "# Title"
    assert completion.page_info.source_width == 3


def test_a_document(script: Script) -> None:
    images = [Image(b"a"), Image(b"b"), Image(b"c")]
    with Client(script.target) as client:
        events = list(client.parse_document(images))
        document = client.parse_document(images).collect()
    assert isinstance(events[0], DocumentStarted)
    assert isinstance(events[1], PageEvent)
    assert events[1].page_index == 2
    assert isinstance(events[-1], DocumentFinished)
    assert [page.index for page in document.pages] == [0, 1, 2]
    assert [page.completion.text for page in document.pages] == ["page 0", "page 1", "page 2"]
    assert document.usage.total_tokens == 21


def test_asyncio_page_and_document(script: Script) -> None:
    async def main() -> None:
        async with AsyncClient(script.target) as client:
            page = await client.parse_page(Image(b"abc")).collect()
            document = await client.parse_document([Image(b"a"), Image(b"b")]).collect()
        assert page.text == "# Title"
        assert [page.completion.text for page in document.pages] == ["page 0", "page 1"]

    asyncio.run(main())


def test_a_document_with_a_missing_page_is_an_error(script: Script) -> None:
    response = documents_pb2.ParseDocumentResponse
    script.document_events = [
        response(document_started=documents_pb2.DocumentStarted(num_pages=1)),
        response(document_finished=documents_pb2.DocumentFinished(num_pages=1)),
    ]
    with Client(script.target) as client, pytest.raises(ProtocolError):
        client.parse_document([Image(b"a")]).collect()

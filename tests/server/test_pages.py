"""One page: its events, its refusals, its ends; pictures in chats."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import grpc
import pytest
from fakes.app import Details, Served, ask, error_of, on_loop, serving
from fakes.backend import SEES, FakeBackend, Script
from fakes.files import gif_header, pdf, png, png_bomb
from fakes.tokenizer import id_of, tokenizer_json
from tokenizers import Tokenizer as HfTokenizer

from deltaflash.v1 import control_pb2, documents_pb2, generation_pb2, inference_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PHASE = generation_pb2.ProgressPhase
LONG = Script(deltas=("tick ",) * 64, step_s=0.05)
PAD = id_of("<|image_pad|>")
CAPABILITY = control_pb2.Capability


def seeing(script: Script | None = None, **info: object) -> FakeBackend:
    return FakeBackend(script, replace(SEES, **info))


def ask_page(data: bytes | None = None, **fields: object) -> documents_pb2.ParsePageRequest:
    image = generation_pb2.Image(data=png() if data is None else data)
    return documents_pb2.ParsePageRequest(image=image, **fields)


def options(**fields: object) -> documents_pb2.ParsePageRequest:
    return ask_page(options=documents_pb2.PageOptions(**fields))


def ask_chat(*parts: str | bytes) -> inference_pb2.GenerateRequest:
    """One message of texts and pictures."""
    content = [
        inference_pb2.ContentPart(text=part)
        if isinstance(part, str)
        else inference_pb2.ContentPart(image=generation_pb2.Image(data=part))
        for part in parts
    ]
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=content)
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[message]))


def kinds(events: Sequence[documents_pb2.ParsePageResponse]) -> list[str]:
    return [event.WhichOneof("event") or "" for event in events]


@on_loop
async def test_events_of_a_page() -> None:
    async with serving(seeing()) as served:
        request = ask_page(png(200, 100), request_id="mine")
        events = [event async for event in served.documents.ParsePage(request)]
        without_progress = [kind for kind in kinds(events) if kind != "progress"]
        assert without_progress[:2] == ["started", "page_info"]
        assert without_progress[-1] == "finished"
        assert set(without_progress[2:-1]) == {"delta"}
        progress = [event.progress for event in events if event.HasField("progress")]
        assert [entry.phase for entry in progress] == [
            PHASE.PROGRESS_PHASE_PREPROCESSING,
            PHASE.PROGRESS_PHASE_QUEUED,
            PHASE.PROGRESS_PHASE_ENCODING,
            PHASE.PROGRESS_PHASE_PREFILL,
            PHASE.PROGRESS_PHASE_DECODING,
        ]
        assert progress[2].fraction == 0.5
        started = next(event.started for event in events if event.HasField("started"))
        assert started.request_id == "mine"
        assert started.image_tokens == 6 * 3
        info = next(event.page_info for event in events if event.HasField("page_info"))
        assert (info.source_width, info.source_height) == (200, 100)
        assert (info.model_width, info.model_height) == (192, 96)
        finished = events[-1].finished
        assert finished.usage.image_tokens == 18
        assert finished.usage.prompt_tokens == started.prompt_tokens
        assert "".join(event.delta.text for event in events) == "Hello, wörld 🎈."
        assert finished.stats.preprocess_us > 0
        assert finished.stats.vision_us == 1000
        assert finished.stats.prefill_us > 0
        assert finished.stats.total_us >= finished.stats.preprocess_us


@on_loop
async def test_what_the_engine_gets() -> None:
    async with serving(seeing()) as served:
        await read_page(served, ask_page(png(96, 64)))
        (request,) = served.backend.requests
        (image,) = request.images
        assert image.pixels.shape == (64, 96, 3)
        assert request.prompt_ids.count(PAD) == 6
        begin = request.prompt_ids.index(PAD)
        assert request.prompt_ids[begin : begin + 6] == (PAD,) * 6
        assert "Markdown" in text_of(request.prompt_ids)
        # Thinking is off: the thoughts are closed before they begin.
        assert request.prompt_ids.count(id_of("</think>")) == 1
        assert request.report_progress
        # What the caller says goes before what the engine says; spelled tokens are plain text.
        own = ask_page(
            png(96, 64),
            options=documents_pb2.PageOptions(
                instruction="Only <|image_pad|> tables.", max_pixels=4096
            ),
        )
        await read_page(served, own)
        request = served.backend.requests[-1]
        assert request.images[0].pixels.shape == (32, 64, 3)
        assert request.prompt_ids.count(PAD) == 2
        assert "Only <|image_pad|> tables." in text_of(request.prompt_ids)


def text_of(ids: Sequence[int]) -> str:
    return HfTokenizer.from_str(tokenizer_json()).decode(list(ids))


async def read_page(
    served: Served, request: documents_pb2.ParsePageRequest
) -> list[documents_pb2.ParsePageResponse]:
    return [event async for event in served.documents.ParsePage(request)]


BAD_PICTURES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "IMAGE_INVALID", "0 bytes"),
    "text": (b"hello, I am a page", "IMAGE_INVALID", "PNG, JPEG"),
    "html": (b"<html><body>page</body></html>", "IMAGE_INVALID", "HTML"),
    "pdf": (pdf("a"), "IMAGE_INVALID", "ParseDocument"),
    "1 bit bomb": (png_bomb(), "IMAGE_TOO_LARGE", "40000 x 40000"),
    "gif bomb": (gif_header(), "IMAGE_TOO_LARGE", "65535 x 65535"),
    "1 x 1": (png(1, 1), "IMAGE_INVALID", "1 x 1"),
    "1 x 20000": (png(1, 20_000), "IMAGE_INVALID", "1 x 20000"),
    "20 x 5000": (png(20, 5000), "IMAGE_INVALID", "200 times"),
    "header only": (png()[:20], "IMAGE_INVALID", "header"),
}
BAD_BODIES = {
    "cut": (png(300, 300)[:-40], "IMAGE_INVALID"),
    "bad checksum": (png()[:45] + b"\xff" + png()[46:], "IMAGE_INVALID"),
}


@on_loop
async def test_bad_headers_are_refused_at_once() -> None:
    async with serving(seeing()) as served:
        for name, (data, reason, words) in BAD_PICTURES.items():
            waits = []
            for _ in range(3):
                began = time.monotonic()
                error = await error_of(served.documents.ParsePage(ask_page(data)))
                waits.append(time.monotonic() - began)
            details = Details(error)
            assert (details.code, details.reason) == (INVALID, reason), name
            assert words in (error.details() or ""), (name, error.details())
            assert min(waits) < 0.1, (name, waits)
            if reason == "IMAGE_TOO_LARGE":
                assert int(details.metadata["value"]) > int(details.metadata["limit"])
        assert served.backend.requests == []


@on_loop
async def test_bad_bodies_are_refused_after_the_header() -> None:
    async with serving(seeing()) as served:
        for name, (data, reason) in BAD_BODIES.items():
            details = Details(await error_of(served.documents.ParsePage(ask_page(data))))
            assert (details.code, details.reason) == (INVALID, reason), name
        wrong = generation_pb2.Image(data=png(), mime_type="image/jpeg")
        error = await error_of(
            served.documents.ParsePage(documents_pb2.ParsePageRequest(image=wrong))
        )
        assert Details(error).reason == "IMAGE_INVALID"
        await served.until_idle()
        assert served.backend.requests == []
        assert served.app.context.live.held_bytes == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


@on_loop
async def test_50_bad_pictures_at_once_take_no_memory() -> None:
    async with serving(seeing()) as served:
        bad = [data for data, _, _ in BAD_PICTURES.values()]
        bad += [data for data, _ in BAD_BODIES.values()]
        requests = [ask_page(bad[index % len(bad)]) for index in range(50)]
        await asyncio.gather(*(error_of(served.documents.ParsePage(r)) for r in requests[:12]))
        before = resident_bytes()
        errors = await asyncio.gather(*(error_of(served.documents.ParsePage(r)) for r in requests))
        grown = resident_bytes() - before
        reasons = {Details(error).reason for error in errors}
        assert reasons <= {"IMAGE_INVALID", "IMAGE_TOO_LARGE", "QUEUE_FULL"}
        assert "IMAGE_TOO_LARGE" in reasons
        assert grown < 50 * 2**20, grown
        await served.until_idle()
        assert (await read_page(served, ask_page()))[-1].HasField("finished")


FIELDS: list[tuple[documents_pb2.ParsePageRequest, str]] = [
    (options(instruction=""), "options.instruction"),
    (options(instruction="ü" * 4097), "options.instruction"),
    (options(max_pixels=1023), "options.max_pixels"),
    (options(max_pixels=512 * 512 + 1), "options.max_pixels"),
    (options(min_pixels=1023), "options.min_pixels"),
    (options(min_pixels=8192, max_pixels=4096), "options.min_pixels"),
    (
        options(sampling=generation_pb2.SamplingOptions(temperature=-1)),
        "options.sampling.temperature",
    ),
    (options(stopping=generation_pb2.StoppingOptions(max_tokens=0)), "options.stopping.max_tokens"),
    (ask_page(priority=101), "priority"),
    (ask_page(request_id="a b"), "request_id"),
]


@on_loop
async def test_bad_fields_are_named() -> None:
    async with serving(seeing()) as served:
        for request, field in FIELDS:
            error = Details(await error_of(served.documents.ParsePage(request)))
            assert (error.code, error.reason, error.fields) == (INVALID, "INVALID_FIELD", [field])
        late = served.documents.ParsePage(ask_page(priority=1))
        assert Details(await error_of(late)).reason == "FEATURE_UNIMPLEMENTED"
        other = served.documents.ParsePage(ask_page(model="other"))
        assert Details(await error_of(other)).reason == "UNKNOWN_MODEL"
        assert served.backend.requests == []


@on_loop
async def test_picture_over_the_context_is_refused_before_it_is_decoded() -> None:
    async with serving(seeing(context_len=200)) as served:
        # Cut behind its header: a decoder would call it broken.
        request = ask_page(png(512, 512)[:60])
        error = Details(await error_of(served.documents.ParsePage(request)))
        assert (error.code, error.reason) == (INVALID, "PROMPT_TOO_LONG")
        assert int(error.metadata["prompt_tokens"]) > 256
        assert error.metadata["max_prompt_tokens"] == "199"


@on_loop
async def test_page_over_the_cache_says_what_it_needs() -> None:
    async with serving(seeing(kv_capacity_tokens=300)) as served:
        request = ask_page(
            png(512, 512),
            options=documents_pb2.PageOptions(
                stopping=generation_pb2.StoppingOptions(max_tokens=64)
            ),
        )
        error = Details(await error_of(served.documents.ParsePage(request)))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason == "CAPACITY_EXCEEDED"
        assert int(error.metadata["needed"]) > 300
        assert error.metadata["available"] == "300"


@on_loop
async def test_full_queue_and_full_memory_are_told_before_decoding() -> None:
    async with serving(seeing(LONG, max_batch_size=1, max_queued=1)) as served:
        calls = [served.documents.ParsePage(ask_page()) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in calls))
        began = time.monotonic()
        broken = ask_page(png(300, 300)[:-40])
        error = Details(await error_of(served.documents.ParsePage(broken)))
        assert error.reason == "QUEUE_FULL"
        assert error.metadata == {"queued": "1", "max_queued": "1"}
        assert time.monotonic() - began < 0.1
        for call in calls:
            call.cancel()
        await served.until_idle()
    page_bytes = len(ask_page(png(512, 512)).SerializeToString()) + 6 * 512 * 512
    async with serving(seeing(LONG), max_held_image_bytes=page_bytes) as served:
        call = served.documents.ParsePage(ask_page(png(512, 512)))
        await call.read()
        assert served.app.context.live.held_bytes == page_bytes
        error = Details(await error_of(served.documents.ParsePage(ask_page(png(512, 512)))))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.metadata["max_held_bytes"] == str(page_bytes)
        assert error.retry_ms == 1000
        # Text needs none of that memory.
        await served.collect(ask(stopping=generation_pb2.StoppingOptions(max_tokens=1)))
        call.cancel()
        await served.until_idle()
        assert served.app.context.live.held_bytes == 0


async def leave(call: grpc.aio.UnaryStreamCall, served: Served) -> None:
    del served
    call.cancel()


async def cancel_by_name(call: grpc.aio.UnaryStreamCall, served: Served) -> None:
    await served.control.Cancel(control_pb2.CancelRequest(request_id="mine"))
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    assert events[-1].finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("way", [leave, cancel_by_name])
@on_loop
async def test_every_way_to_leave_frees_the_page(
    way: Callable[[grpc.aio.UnaryStreamCall, Served], Awaitable[None]],
) -> None:
    async with serving(seeing(LONG)) as served:
        for num_events in (1, 2, 4, 9):
            call = served.documents.ParsePage(ask_page(request_id="mine"))
            for _ in range(num_events):
                await call.read()
            await way(call, served)
            await served.until_idle()
            assert served.app.context.live.held_bytes == 0
        served.backend.script = Script()
        assert (await read_page(served, ask_page(request_id="mine")))[-1].HasField("finished")


@on_loop
async def test_cancelled_while_decoding_has_no_prompt() -> None:
    async with serving(seeing(LONG)) as served:
        # The only worker is busy with a large picture: the second waits for it.
        large = served.documents.ParsePage(ask_page(png(6000, 6000)))
        await large.read()
        call = served.documents.ParsePage(ask_page(request_id="mine"))
        events = aiter(call)
        first = await anext(events)
        assert first.progress.phase == PHASE.PROGRESS_PHASE_PREPROCESSING
        began = time.monotonic()
        await served.control.Cancel(control_pb2.CancelRequest(request_id="mine"))
        events = [event async for event in events]
        assert time.monotonic() - began < 0.5
        assert kinds(events)[-2:] == ["started", "finished"]
        assert events[-2].started.prompt_tokens == 0
        assert events[-1].finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        large.cancel()


@on_loop
async def test_deadline_while_the_page_runs() -> None:
    async with serving(seeing(LONG)) as served:
        began = time.monotonic()
        error = await error_of(served.documents.ParsePage(ask_page(), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 1.5
        await served.until_idle()


@on_loop
async def test_pictures_in_a_chat() -> None:
    async with serving(seeing()) as served:
        request = ask_chat("first ", png(96, 64), " <|image_pad|> then ", png(64, 128), ".")
        events = [event async for event in served.generate(request)]
        (sent,) = served.backend.requests
        assert [image.pixels.shape for image in sent.images] == [(64, 96, 3), (128, 64, 3)]
        runs = "".join("x" if i == PAD else " " for i in sent.prompt_ids).split()
        assert [len(run) for run in runs] == [6, 8]
        started = next(event.started for event in events if event.HasField("started"))
        assert started.image_tokens == 14
        assert any(event.HasField("progress") for event in events)
        # Without pictures nothing but the answer is said.
        events = [event async for event in served.generate(ask_chat("hi"))]
        assert not any(event.HasField("progress") for event in events)


@on_loop
async def test_bad_pictures_in_a_chat_are_named() -> None:
    async with serving(seeing(), max_images=2) as served:
        for bad in (b"nothing", png(300, 300)[:-40]):
            error = await error_of(served.generate(ask_chat("a", png(), bad)))
            assert Details(error).reason == "IMAGE_INVALID"
            assert "chat.messages[0].content[2].image: " in (error.details() or "")
        error = await error_of(served.generate(ask_chat("a", *[png()] * 3)))
        assert Details(error).reason == "IMAGE_TOO_LARGE"
        assert Details(error).metadata == {"value": "3", "limit": "2"}
        await served.until_idle()


@on_loop
async def test_limits_and_capabilities_say_what_there_is() -> None:
    async with serving(seeing(max_batch_size=3), max_images=5) as served:
        info = (await served.control.GetServerInfo(control_pb2.GetServerInfoRequest())).server
        assert {
            CAPABILITY.CAPABILITY_IMAGE_INPUT,
            CAPABILITY.CAPABILITY_PARSE_PAGE,
            CAPABILITY.CAPABILITY_PARSE_DOCUMENT,
        } <= set(info.capabilities)
        limits = info.limits
        assert (limits.max_images, limits.max_parallel_pages) == (5, 2)
        assert (limits.max_image_side_ratio, limits.max_document_pages) == (200, 1000)
        assert 0 < limits.max_image_bytes <= limits.max_message_bytes
        assert limits.max_image_pixels > 0
    async with serving() as served:
        info = (await served.control.GetServerInfo(control_pb2.GetServerInfoRequest())).server
        assert CAPABILITY.CAPABILITY_PARSE_PAGE not in info.capabilities
        assert info.limits.max_image_pixels == info.limits.max_document_pages == 0

"""Pages through the whole service: real decode workers, the real executor, the SDK."""

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from fakes.app import on_loop
from fakes.files import encoded, pdf, png
from PIL import Image as Pillow
from real_server import RealServer, encode, serving, tokens
from server_process import started

from build_engine.pack import PackOptions, pack
from deltaflash_client import (
    AsyncClient,
    Capability,
    Chat,
    ChatMessage,
    ChatRole,
    Delta,
    ErrorReason,
    Finished,
    FinishReason,
    Image,
    InvalidArgumentError,
    PageEvent,
    PageFailed,
    PageOptions,
    Pdf,
    Progress,
    ProgressPhase,
    TokenIds,
)
from server.backend import GenerationRequest
from server.images import PreparedImage
from server.prompt import PAGE_INSTRUCTION

LENGTH = 24
OPTIONS = PageOptions(stopping=tokens(LENGTH))
SIZES = ((64, 64), (200, 90), (96, 224), (160, 160))


def noisy(width: int, height: int, seed: int) -> bytes:
    """A picture of smooth noise, which no two seeds have alike."""
    rng = np.random.default_rng(seed)
    small = Pillow.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return encoded(small.resize((width, height), Pillow.Resampling.BICUBIC), "PNG")


def prepared(data: bytes, width: int, height: int) -> PreparedImage:
    """The picture as the model reads it, without the workers."""
    picture = Pillow.open(io.BytesIO(data)).convert("RGB")
    pixels = np.asarray(picture.resize((width, height), Pillow.Resampling.BICUBIC))
    return PreparedImage(np.ascontiguousarray(pixels), picture.width, picture.height, b"")


def page_prompt(num_image_tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """What the template of the tiny checkpoint makes of pictures and a text."""
    pictures = "".join(
        "<|vision_start|>" + "<|image_pad|>" * n + "<|vision_end|>" for n in num_image_tokens
    )
    return tuple(
        encode(
            f"<|im_start|>user\n{pictures}{text}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
    )


async def ask_engine(
    server: RealServer, prompt_ids: tuple[int, ...], images: tuple[PreparedImage, ...]
) -> str:
    """The answer of the engine behind the server, asked without its services."""
    request = GenerationRequest("direct", prompt_ids, LENGTH, ignore_end_tokens=True, images=images)
    generation = server.engine.backend.submit(request)
    text = ""
    try:
        while (event := await generation.next_event()).finished is None:
            text += event.text
        return text + event.text
    finally:
        generation.close()


@on_loop
async def test_a_page_is_what_the_engine_says(engine_dir: Path) -> None:
    data = noisy(200, 90, 1)
    async with serving(engine_dir) as server:
        assert Capability.PARSE_PAGE in (await server.client.server_info()).capabilities
        stream = server.client.parse_page(Image(data), OPTIONS)
        events = [event async for event in stream]
        text = "".join(event.text for event in events if isinstance(event, Delta))
        page = await server.client.parse_page(Image(data), OPTIONS).collect()
        assert page.text == text
        assert page.page_info is not None
        width, height = page.page_info.model_width, page.page_info.model_height
        assert (page.page_info.source_width, page.page_info.source_height) == (200, 90)
        count = width * height // 1024
        ids = page_prompt([count], PAGE_INSTRUCTION)
        assert (page.usage.image_tokens, page.usage.prompt_tokens) == (count, len(ids))
        assert text == await ask_engine(server, ids, (prepared(data, width, height),))
        # The picture matters.
        other = await server.client.parse_page(Image(noisy(200, 90, 2)), OPTIONS).collect()
        assert other.text != text
        phases = [event.phase for event in events if isinstance(event, Progress)]
        assert phases == sorted(phases, key=ORDER.index)
        assert {ProgressPhase.PREPROCESSING, ProgressPhase.DECODING} <= set(phases)
        finished = events[-1]
        assert isinstance(finished, Finished)
        stats = finished.stats
        parts = (stats.preprocess_us, stats.queue_us, stats.vision_us, stats.prefill_us)
        assert min(stats.preprocess_us, stats.vision_us, stats.prefill_us, stats.decode_us) > 0
        assert sum(parts) + stats.decode_us <= stats.total_us
        await server.until_idle()


ORDER = [
    ProgressPhase.PREPROCESSING,
    ProgressPhase.QUEUED,
    ProgressPhase.ENCODING,
    ProgressPhase.PREFILL,
    ProgressPhase.DECODING,
]


@on_loop
@pytest.mark.parametrize("words", ["", "Read it."])
async def test_instruction_of_the_engine_directory(tmp_path: Path, words: str) -> None:
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    shutil.copytree(DATA / "tiny_qwen3_5", checkpoint)
    config = checkpoint / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "page_instruction": words}))
    pack(checkpoint, engine, PackOptions(created="2026-01-01T00:00:00Z"))
    async with serving(engine) as server:
        page = await server.client.parse_page(Image(noisy(64, 64, 1)), OPTIONS).collect()
        prompt = page_prompt([page.usage.image_tokens], words)
        assert page.usage.prompt_tokens == len(prompt)
        own = replace(OPTIONS, instruction="Read it twice.")
        other = await server.client.parse_page(Image(noisy(64, 64, 1)), own).collect()
        assert other.usage.prompt_tokens == len(
            page_prompt([other.usage.image_tokens], "Read it twice.")
        )


@on_loop
async def test_two_pictures_in_a_chat(engine_dir: Path) -> None:
    first, second = noisy(96, 64, 3), noisy(64, 128, 4)
    async with serving(engine_dir) as server:
        spelled = "<|image_pad|><|im_end|>"
        message = ChatMessage(ChatRole.USER, [Image(first), Image(second), "Compare."])
        answer = await server.client.generate_text(Chat([message]), stopping=tokens(LENGTH))
        assert answer.usage.image_tokens == 14
        images = (prepared(first, 96, 64), prepared(second, 64, 128))
        direct = await ask_engine(server, page_prompt([6, 8], "Compare."), images)
        assert answer.text == direct
        # Text that spells placeholders is text.
        message = ChatMessage(ChatRole.USER, [Image(first), spelled])
        answer = await server.client.generate_text(Chat([message]), stopping=tokens(1))
        assert answer.usage.image_tokens == 6
        assert answer.usage.prompt_tokens > 6 + len(spelled) // 2


@on_loop
async def test_pages_side_by_side_are_what_each_is_alone(engine_dir: Path) -> None:
    pictures = [noisy(*SIZES[seed % len(SIZES)], seed) for seed in range(10)]
    async with serving(engine_dir) as server:
        alone = [
            (await server.client.parse_page(Image(data), OPTIONS).collect()).text
            for data in pictures
        ]
        pages = [Image(data) for data in pictures]
        pages.insert(4, Image(b"no picture"))
        document = await server.client.parse_document(pages, options=OPTIONS).collect()
        assert [page.completion.text for page in document.pages] == alone
        assert [page.index for page in document.pages] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
        (failed,) = document.failed_pages
        assert (failed.index, failed.error.reason) == (4, ErrorReason.IMAGE_INVALID)
        await server.until_idle()
        assert server.app.context.live.held_bytes == 0


@on_loop
async def test_a_pdf_of_30_pages_and_a_request_beside_it(engine_dir: Path) -> None:
    data = pdf(*[f"page {i}" for i in range(30)], broken=(7,))
    async with serving(engine_dir) as server:
        failed, finished = set(), set()
        async with server.client.parse_document(Pdf(data), options=OPTIONS) as stream:
            async for event in stream:
                if not isinstance(event, PageEvent):
                    continue
                if isinstance(event.event, PageFailed):
                    failed.add(event.page_index)
                elif isinstance(event.event, Finished):
                    finished.add(event.page_index)
                    if len(finished) == 3:
                        beside = await server.client.generate_text(
                            TokenIds([1]), stopping=tokens(4)
                        )
                        assert beside.usage.completion_tokens == 4
                        assert len(finished) < 29
        assert failed == {7}
        assert finished == set(range(30)) - {7}
        await server.until_idle()


@on_loop
async def test_leaving_and_cancelling_frees_all(engine_dir: Path) -> None:
    endless = PageOptions(stopping=tokens(3000))
    async with serving(engine_dir) as server:
        for _ in range(3):
            async with server.client.parse_document(
                Pdf(pdf(*["x"] * 12)), options=endless, request_id="doc"
            ) as stream:
                async for event in stream:
                    if isinstance(event, PageEvent) and isinstance(event.event, Delta):
                        break
            await server.until_idle()
        stream = server.client.parse_page(Image(png()), endless, request_id="page")
        async for event in stream:
            if isinstance(event, Delta):
                await server.client.cancel("page")
            if isinstance(event, Finished):
                assert event.finish_reason is FinishReason.CANCELLED
        await server.until_idle()
        assert server.app.context.live.held_bytes == 0


@on_loop
async def test_a_strip_that_cannot_be_reduced_is_refused(engine_dir: Path) -> None:
    async with serving(engine_dir) as server:
        # The tiny model reads 65,536 pixels; 32 x 3616 are more.
        for document in (False, True):
            with pytest.raises(InvalidArgumentError, match="short side") as caught:  # noqa: PT012
                if document:
                    pages = server.client.parse_document([Image(png(20, 4000))])
                    (await pages.collect()).require_all()
                else:
                    await server.client.parse_page(Image(png(20, 4000))).collect()
            assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE
            assert int(caught.value.metadata["value"]) > int(caught.value.metadata["limit"])
        await server.until_idle()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@on_loop
async def test_no_decode_worker_outlives_the_server(engine_dir: Path, number: int) -> None:
    program = Path(sys.executable).parent / "deltaflash"
    words = ("serve", str(engine_dir), "--port", "0", "--threads", "1", "--decode-workers", "2")
    async with started(str(program), *words) as server:
        serving_record = await server.until("serving")
        pid = server.process.pid
        workers = [p for p in children_of(pid) if "server.images.worker" in command_of(p)]
        assert len(workers) == 2
        async with AsyncClient(serving_record["address"]) as client:
            page = await client.parse_page(Image(png()), OPTIONS).collect()
            assert page.usage.image_tokens > 0
        os.kill(pid, number)
        code = await server.end()
        assert code == (0 if number == signal.SIGTERM else -number)
        began = time.monotonic()
        while any("server.images.worker" in command_of(worker) for worker in workers):
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.02)


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal():
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""

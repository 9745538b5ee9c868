"""The transport of the real stack: pings of a client that waits, sizes of messages."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from fakes.app import Details, error_of, on_loop
from real_server import NO_RETRY, RealServer, end, endless, failure, serving, tokens

from deltaflash.v1 import inference_pb2
from deltaflash_client import (
    AsyncClient,
    ClientConfig,
    ErrorReason,
    Finished,
    InvalidArgumentError,
    Keepalive,
    ResourceExhaustedError,
    RetryPolicy,
    Started,
    TokenIds,
    UnavailableError,
)
from server.config import MIB

SILENT_S = 6.0


async def keep_busy(server: RealServer) -> None:
    """Leaves no seat free, as long as it is not cancelled, to requests that come later."""
    running: set[asyncio.Task[str]] = set()
    try:
        while True:
            while len(running) < 64:
                running.add(asyncio.ensure_future(endless(server.client, [1])))
            await asyncio.sleep(10)
    finally:
        await end(list(running))


@pytest.mark.parametrize("min_keepalive_ms", [1000, 20_000])
@on_loop
async def test_pings_of_a_client_that_waits_in_the_queue(
    engine_dir: Path, min_keepalive_ms: int
) -> None:
    """Known bug G1: at the documented rate a silent stream lives; a faster one is cut."""
    async with serving(
        engine_dir, {"max_batch_size": 1}, min_keepalive_ms=min_keepalive_ms
    ) as server:
        busy = asyncio.ensure_future(keep_busy(server))
        await server.until_load(lambda load: load.running + load.queued == 64, 5)
        limits = (await server.client.server_info()).limits
        assert limits.min_keepalive_ms == min_keepalive_ms
        config = ClientConfig(
            keepalive=Keepalive(time_s=1.0, timeout_s=5.0), retry=RetryPolicy(max_attempts=1)
        )
        async with AsyncClient(server.address, config) as client:
            began = time.monotonic()
            stream = client.generate(TokenIds([5]), stopping=tokens(3))
            assert isinstance(await anext(stream), Started)
            if min_keepalive_ms > 1000:
                error = await asyncio.wait_for(failure(stream.collect()), SILENT_S)
                assert isinstance(error, UnavailableError), error
                assert "too many pings" in str(error).lower()
                await server.until_load(lambda load: load.running + load.queued <= 64, 1)
                await end([busy])
            else:
                reading = asyncio.ensure_future(stream.collect())
                await asyncio.wait({reading}, timeout=SILENT_S)
                assert not reading.done(), reading
                await end([busy])
                got = await reading
                assert got.usage.completion_tokens == 3
                assert got.stats.queue_us >= (SILENT_S - 0.5) * 1e6
                assert time.monotonic() - began >= SILENT_S
        await server.until_idle()


@on_loop
async def test_sizes_of_messages(engine_dir: Path) -> None:
    """Known bug G2: 4 MiB is no limit, the limit is told, and its reason is not an overload's."""
    async with serving(engine_dir, max_message_bytes=8 * MIB) as server:
        wide = ClientConfig(max_message_bytes=32 * MIB, retry=RetryPolicy(max_attempts=1))
        limit = (await server.client.server_info()).limits.max_message_bytes
        assert limit == 8 * MIB
        async with AsyncClient(server.address, wide) as client:
            overhead = inference_pb2.GenerateRequest(text="a" * 4 * MIB).ByteSize() - 4 * MIB
            for size, reason in (
                (4 * MIB - 1, ErrorReason.PROMPT_TOO_LONG),
                (4 * MIB + 1, ErrorReason.PROMPT_TOO_LONG),
                (limit, ErrorReason.PROMPT_TOO_LONG),
                (limit + 1, ErrorReason.MESSAGE_TOO_LARGE),
                (limit + 2 * MIB, None),
            ):
                text = "a" * (size - overhead)
                request = inference_pb2.GenerateRequest(text=text)
                assert request.ByteSize() == size
                error = await failure(client.generate_text(text))
                assert error.reason is reason, (size, error)
                expected = (
                    InvalidArgumentError
                    if reason is ErrorReason.PROMPT_TOO_LONG
                    else ResourceExhaustedError
                )
                assert isinstance(error, expected)
                assert error.retry_delay_s is None
                plain = Details(await error_of(server.inference.Generate(request)))
                assert plain.reason == (reason or "")
            # The connection outlives them all.
            assert (await client.generate_text("hi", stopping=tokens(2))).text
        # The SDK does not even send what is over its own limit.
        small = ClientConfig(max_message_bytes=MIB, retry=RetryPolicy(max_attempts=1))
        async with AsyncClient(server.address, small) as client:
            with pytest.raises(ResourceExhaustedError) as caught:
                client.generate("a" * MIB)
            assert caught.value.reason is ErrorReason.MESSAGE_TOO_LARGE


@on_loop
async def test_many_streams_on_one_connection(engine_dir: Path) -> None:
    async with serving(engine_dir, {"max_batch_size": 8, "max_queue_size": 256}) as server:
        async with AsyncClient(server.address, NO_RETRY) as client:
            streams = [client.generate(TokenIds([i + 1]), stopping=tokens(8)) for i in range(200)]
            texts = await asyncio.gather(*(stream.collect() for stream in streams))
        assert {text.usage.completion_tokens for text in texts} == {8}
        alone = await server.client.generate(TokenIds([200]), stopping=tokens(8)).collect()
        assert texts[-1].text == alone.text
        last = [event async for event in server.client.generate(TokenIds([200]))][-1]
        assert isinstance(last, Finished)


@on_loop
async def test_error_before_and_after_the_first_event(engine_dir: Path) -> None:
    """Known bug S13: the status arrives in 1 s either way."""
    async with serving(engine_dir, {"max_batch_size": 1}, grace_s=0.0) as server:
        began = time.monotonic()
        assert isinstance(await failure(server.client.generate_text("")), InvalidArgumentError)
        assert time.monotonic() - began < 1
        streams = [
            server.inference.Generate(
                inference_pb2.GenerateRequest(
                    text="hi", stopping={"max_tokens": 3900, "ignore_eos": True}
                )
            )
            for _ in range(6)
        ]
        for stream in streams:
            await stream.read()
        began = time.monotonic()
        server.app.request_stop()
        error = await error_of(streams[-1])
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert Details(error).reason == "DRAINING"
        assert time.monotonic() - began < 1

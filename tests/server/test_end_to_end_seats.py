"""Seats of the real engine: who waits, who leaves early, and what is held afterwards."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fakes.app import on_loop
from real_server import (
    NO_RETRY,
    RealServer,
    decode,
    end,
    failure,
    fresh_random,
    read_all,
    recorded,
    serving,
    tokens,
)

from deltaflash_client import (
    AsyncClient,
    CancelStatus,
    Client,
    DeadlineExceededError,
    ErrorReason,
    FinishReason,
    NotFoundError,
    ResourceExhaustedError,
    Started,
    TokenIds,
)

LONG = tokens(3900)
ONE_SEAT = {"max_batch_size": 1}
MB = 1_000_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


CLIENT = """
import sys
import threading
from deltaflash_client import Client, StoppingOptions, TokenIds
client = Client(sys.argv[1])
def read(index):
    stopping = StoppingOptions(max_tokens=3900, ignore_eos=True)
    for event in client.generate(TokenIds([index + 1]), stopping=stopping):
        print(index, flush=True)
for index in range(6):
    threading.Thread(target=read, args=[index]).start()
"""


@pytest.mark.parametrize("seats", [1, 6])
@on_loop
async def test_killed_client_frees_its_seats(engine_dir: Path, seats: int) -> None:
    """Known bug S1: SIGKILL in mid-stream, with streams that run and streams that wait."""
    async with serving(engine_dir, {"max_batch_size": seats}) as server:
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(CLIENT),
            server.address,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        seen: set[bytes] = set()
        async with asyncio.timeout(20):
            while len(seen) < 6:
                seen.add(await client.stdout.readline())
        client.send_signal(signal.SIGKILL)
        await client.wait()
        await server.until_idle(1.0)
        gone = server.outcomes.counts["CLIENT_GONE"]
        # Six answers take a while; a slow machine may see one or the other end before the signal.
        assert gone >= 1, server.outcomes.counts
        assert sum(server.outcomes.counts.values()) == 6


async def by_closing(server: RealServer) -> None:
    async with server.client.generate(TokenIds([1]), stopping=LONG) as stream:
        await anext(stream)


async def by_dropping(server: RealServer) -> None:
    stream = server.client.generate(TokenIds([1]), stopping=LONG)
    await anext(stream)


async def by_cancelling_the_task(server: RealServer) -> None:
    task = asyncio.ensure_future(server.client.generate_text(TokenIds([1]), stopping=LONG))
    await asyncio.sleep(0.05)
    await end([task])


async def by_deadline(server: RealServer) -> None:
    asked = server.client.generate_text(TokenIds([1]), stopping=LONG, timeout_s=0.1)
    error = await failure(asked)
    assert isinstance(error, DeadlineExceededError), error


async def by_closing_the_client(server: RealServer) -> None:
    client = AsyncClient(server.address, NO_RETRY)
    await anext(client.generate(TokenIds([1]), stopping=LONG))
    await client.close()


async def by_leaving_a_blocking_loop(server: RealServer) -> None:
    def leave() -> None:
        with Client(server.address, NO_RETRY) as client:
            for _ in client.generate(TokenIds([1]), stopping=LONG).text():
                break

    await asyncio.to_thread(leave)


WAYS = [
    by_closing,
    by_dropping,
    by_cancelling_the_task,
    by_deadline,
    by_closing_the_client,
    by_leaving_a_blocking_loop,
]


@pytest.mark.parametrize("way", WAYS)
@on_loop
async def test_every_way_to_leave_frees_the_seat(
    engine_dir: Path, way: Callable[[RealServer], Awaitable[None]]
) -> None:
    async with serving(engine_dir, {"max_batch_size": 3}) as server:
        await asyncio.gather(*(way(server) for _ in range(8)))
        await server.until_idle(1.0)
        # None came to the end of its answer; one may not have come to the engine.
        ends = server.outcomes.counts
        assert set(ends) <= {"CLIENT_GONE", "DEADLINE_PASSED"}, ends
        assert 1 <= sum(ends.values()) <= 8
        got = await server.client.generate_text(TokenIds([1]), stopping=tokens(3))
        assert got.usage.completion_tokens == 3


@on_loop
async def test_deadline_in_the_queue_never_reaches_prefill(engine_dir: Path) -> None:
    """Known bug Q5: the engine prefills no token of a request that nobody waits for any more."""
    async with serving(engine_dir, ONE_SEAT) as server:
        context_tokens = 0

        async def count() -> None:
            nonlocal context_tokens
            while True:
                context_tokens += sum(step.num_context_tokens for step in server.steps())
                await asyncio.sleep(0.02)

        server.steps()
        fillers = await server.fill(4)
        counting = asyncio.ensure_future(count())
        began = time.monotonic()
        late = [
            failure(
                server.client.generate_text(
                    TokenIds([9] * 500), stopping=tokens(5), timeout_s=0.2, request_id=f"late{i}"
                )
            )
            for i in range(5)
        ]
        for error in await asyncio.gather(*late):
            assert isinstance(error, DeadlineExceededError)
        assert time.monotonic() - began < 2
        await server.until_load(lambda load: load.running + load.queued <= 4, 1)
        await asyncio.gather(*fillers)
        await server.until_idle()
        await asyncio.sleep(0.05)
        await end([counting])
        # Those of the fillers, two each.
        assert context_tokens == 2 * 4
        got = await server.client.generate_text(TokenIds([9] * 500), stopping=tokens(5))
        assert got.usage.completion_tokens == 5


@on_loop
async def test_ten_times_the_limit_is_refused(engine_dir: Path) -> None:
    """Known bug Q3: the queue is bounded, and says when to come again."""
    sizes = {"max_batch_size": 2, "max_queue_size": 3}
    async with serving(engine_dir, sizes) as server:
        fillers = await server.fill(5)
        asked = [
            failure(server.client.generate_text(TokenIds([1]), stopping=tokens(1)))
            for _ in range(45)
        ]
        for error in await asyncio.gather(*asked):
            assert isinstance(error, ResourceExhaustedError), error
            assert error.reason is ErrorReason.QUEUE_FULL
            assert error.retry_delay_s == pytest.approx(1)
        await end(fillers)
        await server.until_idle()
        await server.client.generate_text(TokenIds([1]), stopping=tokens(1))


@on_loop
async def test_waiting_request_is_cancelled_by_name(engine_dir: Path) -> None:
    async with serving(engine_dir, ONE_SEAT) as server:
        fillers = await server.fill(4)
        stream = server.client.generate(TokenIds([5]), stopping=LONG, request_id="mine")
        assert isinstance(await anext(stream), Started)
        assert await server.client.cancel("mine") is CancelStatus.CANCELLING
        last = await asyncio.wait_for(anext(stream), 1)
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.usage.completion_tokens == 0
        assert last.stats.time_to_first_token_us is None
        assert await server.client.cancel("mine") is CancelStatus.ALREADY_FINISHED
        await end(fillers)
        await server.until_idle()


@on_loop
async def test_waiting_counts_in_the_time_to_the_first_token(engine_dir: Path) -> None:
    """Known bug X4: the clock starts when the request arrives, not when it is scheduled."""
    async with serving(engine_dir, ONE_SEAT) as server:
        fillers = await server.fill(6)
        began = time.monotonic()
        asked = asyncio.ensure_future(server.client.generate_text(TokenIds([5]), stopping=LONG))
        await asyncio.sleep(0.3)
        await end(fillers)
        freed_us = (time.monotonic() - began) * 1e6
        got = await asked
        assert got.stats.queue_us >= 250_000
        assert got.stats.queue_us < freed_us + 500_000
        assert got.stats.time_to_first_token_us is not None
        assert got.stats.time_to_first_token_us >= got.stats.queue_us
        assert got.stats.total_us >= got.stats.time_to_first_token_us + got.stats.decode_us - 1000


@on_loop
async def test_cancel_storm_leaves_nothing(engine_dir: Path) -> None:
    """Known bugs S4, S6 and S12: no table entry, no seat, and the next answer is right.

    Memory, that of the clients too, which share the process, is bounded and not flat: grpc.aio
    itself loses some 200 bytes when a cancel meets a write under way (grpc/grpc#43360).
    """
    rng = fresh_random()
    async with serving(engine_dir, {"max_batch_size": 8}) as server:

        async def cancel_some(number: int) -> None:
            for index in range(number):
                name = f"storm-{rng.getrandbits(64)}"
                prompt = TokenIds([index % 490] * rng.randint(1, 64))
                stream = server.client.generate(prompt, stopping=LONG, request_id=name)
                num_read = rng.randint(0, 3)
                for _ in range(num_read):
                    await anext(stream)
                if num_read and rng.random() < 0.1:
                    await server.client.cancel(name)
                    async for _ in stream:
                        pass
                    assert await server.client.cancel(name) is CancelStatus.ALREADY_FINISHED
                await stream.aclose()
                if rng.random() < 0.05:
                    with pytest.raises(NotFoundError):
                        await server.client.cancel("nobody")

        async def storm(number: int) -> None:
            await asyncio.gather(*(cancel_some(number // 16) for _ in range(16)))
            await server.until_idle()
            gc.collect()

        await storm(1600)
        before = resident_bytes()
        await storm(2000)
        grown = resident_bytes() - before
        assert grown < 10 * MB, f"{grown / MB:.1f} MB"
        prompt, answer = recorded("tiny_qwen3_5", "text")
        began = time.monotonic()
        got = await server.client.generate_text(TokenIds(prompt), stopping=tokens(16))
        assert time.monotonic() - began < 1
        assert got.text == decode(answer)
        await server.client.wait_until_ready(1)


def test_twenty_lives_in_one_process(engine_dir: Path) -> None:
    """Started and stopped again and again, with requests in the house, a server leaves nothing."""

    @on_loop
    async def live() -> None:
        async with serving(engine_dir, {"num_threads": 2}, grace_s=0.0) as server:
            await read_all(server.client.generate(TokenIds([1, 2]), stopping=tokens(4)))
            stream = server.client.generate(TokenIds([3]), stopping=LONG)
            await anext(stream)

    def held() -> tuple[int, int, int]:
        gc.collect()
        return (
            len(list(Path("/proc/self/fd").iterdir())),
            threading.active_count(),
            len(list(Path("/proc/self/task").iterdir())),
        )

    for _ in range(3):  # what is made once and kept: gRPC's threads and descriptors
        live()
    before, memory = held(), resident_bytes()
    for _ in range(20):
        live()
    deadline = time.monotonic() + 2
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, f"fds, Python threads, threads: {before}, {held()}"
        time.sleep(0.05)
    grown = resident_bytes() - memory
    assert grown < 40 * MB, f"{grown / MB:.1f} MB"

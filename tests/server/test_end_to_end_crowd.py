"""Many answers at once: each is what it is alone, and none holds up the others."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from fakes.app import on_loop
from real_server import (
    RealServer,
    decode,
    end,
    fresh_random,
    recorded,
    serving,
    tokens,
)

from deltaflash_client import (
    Completion,
    DeadlineExceededError,
    Delta,
    SamplingOptions,
    TokenIds,
)


@on_loop
async def test_seeds_hold_in_any_company(engine_dir: Path) -> None:
    rng = fresh_random()
    prompt = TokenIds([rng.randrange(490) for _ in range(30)])
    seeds = [0, 2**64 - 1, *(rng.getrandbits(64) for _ in range(4))]

    def sampling(seed: int | None, **fields: object) -> SamplingOptions:
        return SamplingOptions(temperature=1.2, top_k=40, top_p=0.95, seed=seed, **fields)

    async with serving(engine_dir, {"max_batch_size": 4}) as server:
        client = server.client

        async def answer(chosen: SamplingOptions, length: int = 40) -> Completion:
            return await client.generate_text(prompt, sampling=chosen, stopping=tokens(length))

        alone = {seed: await answer(sampling(seed)) for seed in seeds}
        assert len({got.text for got in alone.values()}) == len(seeds)
        order = seeds * 3
        rng.shuffle(order)
        lengths = [rng.randint(20, 40) for _ in order]
        crowd = await asyncio.gather(
            *(answer(sampling(s), n) for s, n in zip(order, lengths, strict=True))
        )
        for seed, got in zip(order, crowd, strict=True):
            assert got.seed == seed
            assert alone[seed].text.startswith(got.text.rstrip("\ufffd"))
        # The seed that the server made up is told, and is good for the same answer.
        unseeded = await asyncio.gather(*(answer(sampling(None)) for _ in range(3)))
        assert len({got.text for got in unseeded}) == 3
        for got in unseeded:
            assert got.seed is not None
            assert (await answer(sampling(got.seed))).text == got.text
        greedy = await answer(SamplingOptions())
        for temperature in (0.0, 1e-3):
            for seed in (1, 2):
                cold = await answer(SamplingOptions(temperature=temperature, seed=seed))
                assert cold.text == greedy.text
        assert (await answer(SamplingOptions(temperature=5.0, top_k=1))).text == greedy.text


@on_loop
async def test_batch_that_grows_and_shrinks(engine_dir: Path) -> None:
    """Known bug K6: batches of 8, 3, 8 and 1 give each what it gets alone."""
    rng = fresh_random()
    prompts = [TokenIds([rng.randrange(490) for _ in range(rng.randint(1, 90))]) for _ in range(8)]
    async with serving(engine_dir, {"max_batch_size": 8}) as server:

        async def answers(chosen: Sequence[TokenIds]) -> list[str]:
            asked = (server.client.generate_text(p, stopping=tokens(24)) for p in chosen)
            return [got.text for got in await asyncio.gather(*asked)]

        alone = [(await answers([prompt]))[0] for prompt in prompts]
        for size in (8, 3, 8, 1, 8, 3, 8, 1):
            chosen = rng.sample(range(8), size)
            assert await answers([prompts[i] for i in chosen]) == [alone[i] for i in chosen]


def random_options(rng: random.Random) -> dict[str, Any]:
    sampling = None
    if rng.random() < 0.5:
        sampling = SamplingOptions(
            temperature=rng.uniform(0.3, 1.5),
            top_k=rng.choice([0, 5, 40]),
            top_p=rng.choice([1.0, 0.8]),
            seed=rng.getrandbits(64),
        )
    return {
        "prompt": TokenIds([rng.randrange(490) for _ in range(rng.randint(1, 200))]),
        "sampling": sampling,
        "stopping": tokens(rng.randint(1, 60)),
    }


@asynccontextmanager
async def crowded(engine_dir: Path) -> AsyncIterator[RealServer]:
    """A server with few seats and few pages: requests wait, and seats change hands."""
    sizes = {"max_batch_size": 5, "max_num_tokens": 160, "max_kv_tokens": 1400, "num_threads": 2}
    async with serving(engine_dir, sizes) as server:
        yield server


@on_loop
async def test_each_of_32_gets_what_it_gets_alone(engine_dir: Path) -> None:
    """Known bugs M4 and M6: and when they are gone nothing is held, and every end is counted."""
    rng = fresh_random()
    wanted = [random_options(rng) for _ in range(32)]
    ways = dict.fromkeys(rng.sample(range(32), 12))
    for index in ways:
        ways[index] = rng.choice(["close", "control", "deadline", "task"])
    async with crowded(engine_dir) as server:
        alone = [(await server.client.generate_text(**options)).text for options in wanted]
        server.outcomes.counts.clear()
        server.steps()

        async def read(index: int, seen: list[str]) -> None:
            way = ways.get(index)
            options = {**wanted[index], "request_id": f"r{index}"}
            if way == "deadline":
                options["timeout_s"] = rng.uniform(0.001, 0.1)
            patience = rng.randint(1, 12)
            async with server.client.generate(options.pop("prompt"), **options) as stream:
                async for event in stream:
                    seen.append(event.text if isinstance(event, Delta) else "")
                    if len(seen) == patience and way == "close":
                        break
                    if len(seen) == patience and way == "control":
                        await server.client.cancel(f"r{index}")

        async def one(index: int) -> str:
            await asyncio.sleep(rng.uniform(0, 0.3))
            seen: list[str] = []
            reader = asyncio.ensure_future(read(index, seen))
            if ways.get(index) == "task":
                await asyncio.sleep(rng.uniform(0, 0.1))
                await end([reader])
            else:
                with suppress(DeadlineExceededError):
                    await reader
            return "".join(seen)

        texts = await asyncio.gather(*(one(index) for index in range(32)))
        await server.until_idle()
        for index, (text, expected) in enumerate(zip(texts, alone, strict=True)):
            if index in ways:
                assert expected.startswith(text.rstrip("\ufffd")), (index, ways[index])
            else:
                assert text == expected, index
        ends = server.outcomes.counts
        assert sum(ends.values()) <= 32
        # What never reached the engine has no end in the log: its reader had left on the way.
        assert 32 - sum(ends.values()) <= sum(way in {"deadline", "task"} for way in ways.values())
        assert ends["LENGTH"] >= 20
        assert set(ends) <= {"LENGTH", "CANCELLED", "TIMED_OUT", "CLIENT_GONE", "DEADLINE_PASSED"}
        completed = sum(step.num_completed for step in server.steps())
        assert completed == sum(ends.values())
        # Nothing of the storm is left: the next answer is the recorded one.
        prompt, answer = recorded("tiny_qwen3_5", "text")
        got = await server.client.generate_text(TokenIds(prompt), stopping=tokens(16))
        assert got.text == decode(answer)


@on_loop
async def test_running_streams_go_on_while_a_long_prompt_is_prefilled(engine_dir: Path) -> None:
    """Known bug Q1: no gap of a running stream comes near the time of the whole prefill."""
    sizes = {"max_batch_size": 5, "max_num_tokens": 128, "max_prefill_chunk": 64}
    async with serving(engine_dir, sizes) as server:
        loop = asyncio.get_running_loop()
        attempts = []
        for _ in range(3):
            arrivals: list[list[float]] = [[] for _ in range(4)]

            async def watch(index: int, times: list[float]) -> None:
                stream = server.client.generate(TokenIds([index + 1, 7]), stopping=tokens(3000))
                async with stream:
                    async for _ in stream:
                        times.append(loop.time())

            watchers = [asyncio.ensure_future(watch(i, t)) for i, t in enumerate(arrivals)]
            while min(map(len, arrivals)) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            prompt = TokenIds([index % 490 for index in range(3000)])
            began = loop.time()
            await server.client.generate_text(prompt, stopping=tokens(1))
            ended = loop.time()
            running = [not watcher.done() for watcher in watchers]
            await end(watchers)
            gaps = []
            for times in arrivals:
                inside = [began, *(time for time in times if began < time < ended), ended]
                gaps += [later - earlier for earlier, later in pairwise(inside)]
            median = sorted(gaps)[len(gaps) // 2]
            attempts.append((max(gaps) / (ended - began), max(gaps) / median, len(gaps)))
            assert all(running), "the streams were too short for the prefill"
            # 3000 tokens are 47 chunks; a stream that waits for all of them has a share of 1.
            if max(gaps) < 0.2 * (ended - began) and max(gaps) < 12 * median:
                assert len(gaps) >= 4 * 30
                break
        else:
            raise AssertionError(f"(worst gap: share of the prefill, medians; gaps): {attempts}")

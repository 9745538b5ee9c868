"""The real server over a packed engine, in the test's own event loop, and its clients."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from conftest import DATA, load_expected
from tokenizers import Tokenizer

from deltaflash.v1 import inference_pb2_grpc
from deltaflash_client import (
    AsyncClient,
    ClientConfig,
    Completion,
    Delta,
    DeltaFlashError,
    Finished,
    GenerationEvent,
    LoadInfo,
    RetryPolicy,
    Started,
    StoppingOptions,
    TokenIds,
)
from server.app import Application, ExitCode
from server.backend import IterationStats
from server.backends.executor import load_engine
from server.config import EngineConfig, ServerConfig
from server.service_context import Engine

NO_RETRY = ClientConfig(retry=RetryPolicy(max_attempts=1))
UNTIL_LENGTH = 3900
"""Tokens of an answer that nearly fills the context: half a second of work and more."""


class Outcomes(logging.Handler):
    """Counts the ends of requests in the server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "request ended":
            self.counts[vars(record)["outcome"]] += 1


class RealServer:
    """A running server over a real executor, and a client of it."""

    def __init__(self, app: Application, outcomes: Outcomes) -> None:
        self.app = app
        self.outcomes = outcomes
        self.running: asyncio.Task[ExitCode] = asyncio.ensure_future(app.run())
        self.client: AsyncClient
        self.channel: grpc.aio.Channel
        self.inference: inference_pb2_grpc.InferenceServiceStub

    @property
    def address(self) -> str:
        return self.app.address

    def connect(self) -> None:
        self.client = AsyncClient(self.address, NO_RETRY)
        self.channel = grpc.aio.insecure_channel(self.address)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def engine(self) -> Engine:
        assert self.app.context.engine is not None
        return self.app.context.engine

    def steps(self) -> list[IterationStats]:
        """The steps of the engine since the last call."""
        return self.engine.backend.iteration_stats()

    async def until_load(self, good: Callable[[LoadInfo], bool], limit_s: float) -> LoadInfo:
        """Asks for the load until it is good; returns it."""
        began = time.monotonic()
        while not good(load := await self.client.load()):
            assert time.monotonic() - began < limit_s, load
            await asyncio.sleep(0.01)
        return load

    async def until_idle(self, limit_s: float = 2.0) -> None:
        """Waits until GetLoad says idle and the server's tables are empty (known bug M4)."""

        def is_idle(load: LoadInfo) -> bool:
            held = (load.running, load.queued, load.slots_used, load.kv_pages_used)
            tables = (len(self.app.context.live), self.engine.backend.num_open)
            return not any((*held, *tables, load.running_tokens, load.queued_tokens))

        await self.until_load(is_idle, limit_s)

    async def fill(self, count: int) -> list[asyncio.Task[str]]:
        """Starts so many answers that fill the context; returns when they hold all seats."""
        seats = self.engine.backend.info.max_batch_size
        assert count >= seats
        tasks = [
            asyncio.ensure_future(endless(self.client, [index + 1, 7])) for index in range(count)
        ]
        await self.until_load(lambda load: load.running + load.queued == count, 5)
        await self.until_load(lambda load: load.running == seats, 5)
        return tasks


async def endless(client: AsyncClient, ids: Sequence[int]) -> str:
    """An answer as long as the context allows."""
    return (await client.generate_text(TokenIds(ids), stopping=tokens(UNTIL_LENGTH))).text


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    engine_dir: Path,
    engine: dict[str, Any] | None = None,
    load: Callable[[], Engine] | None = None,
    **config: object,
) -> AsyncIterator[RealServer]:
    """Serves an engine directory from load to drain; with `load` does not wait for SERVING."""
    engine_config = EngineConfig(**{"num_threads": 1, **(engine or {})})
    app = Application(
        ServerConfig(**{"port": 0, "grace_s": 5.0, **config}),
        load or (lambda: load_engine(engine_dir, engine_config, 2)),
    )
    outcomes = Outcomes()
    logger = logging.getLogger("server")
    level = logger.level
    logger.addHandler(outcomes)
    logger.setLevel(logging.INFO)
    server = RealServer(app, outcomes)
    ready = asyncio.ensure_future(app.serving.wait())
    try:
        async with asyncio.timeout(30):
            if load is None:
                await asyncio.wait({server.running, ready}, return_when=asyncio.FIRST_COMPLETED)
            while app.port == 0 and not server.running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if server.running.done():
            server.running.result()
            raise AssertionError("the server ended before it served")
        server.connect()
        yield server
        await server.client.close()
        await server.channel.close()
    finally:
        ready.cancel()
        app.request_stop()
        async with asyncio.timeout(15):
            await server.running
        logger.removeHandler(outcomes)
        logger.setLevel(level)


def tokens(max_tokens: int, **fields: object) -> StoppingOptions:
    """Stopping after so many tokens and, unless told otherwise, not at end tokens."""
    return StoppingOptions(**{"max_tokens": max_tokens, "ignore_eos": True, **fields})


@cache
def _tokenizer(checkpoint: str) -> Tokenizer:
    return Tokenizer.from_file(str(DATA / checkpoint / "tokenizer.json"))


def encode(text: str, checkpoint: str = "tiny_qwen3_5") -> list[int]:
    """The tokens of a text; special tokens count where they are spelled."""
    return _tokenizer(checkpoint).encode(text, add_special_tokens=False).ids


def decode(ids: Sequence[int], checkpoint: str = "tiny_qwen3_5") -> str:
    """The text of tokens as the tokenizers library decodes it."""
    return _tokenizer(checkpoint).decode(list(ids), skip_special_tokens=True)


def recorded(checkpoint: str, case: str) -> tuple[list[int], list[int]]:
    """Prompt and greedy answer of a recorded case."""
    entry = load_expected(checkpoint)["cases"][case]
    return entry["input_ids"], entry["fp32"]["greedy"]


async def read_all(stream: AsyncIterator[GenerationEvent]) -> tuple[Started, list[str], Finished]:
    """A whole stream: its first event, the text of each delta, its last event."""
    events = [event async for event in stream]
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    deltas = [event.text for event in events[1:-1] if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 2
    return started, deltas, finished


async def failure(answer: Awaitable[Completion]) -> DeltaFlashError:
    """The error of an answer that has to fail."""
    try:
        result = await answer
    except DeltaFlashError as error:
        return error
    raise AssertionError(f"the request did not fail: {result}")


def fresh_random() -> random.Random:
    """A generator with a new seed; pytest shows what was printed when the test fails."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    return random.Random(seed)

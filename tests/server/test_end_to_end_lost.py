"""The real engine's loop fails under a server: what callers, health and supervisors see."""

import asyncio
import functools
from pathlib import Path

import pytest
from fakes.app import on_loop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from real_server import UNTIL_LENGTH, failure, serving, tokens

import runtime
from deltaflash_client import ErrorReason, Started, TokenIds, UnavailableError
from server.app import ExitCode
from server.backends.executor import ExecutorBackend

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def hooks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the test take test hooks, which no option of a server turns on."""
    config = functools.partial(runtime.ExecutorConfig, max_scripted_tokens=UNTIL_LENGTH)
    monkeypatch.setattr(runtime, "ExecutorConfig", config)


@pytest.mark.usefixtures("hooks_on")
@on_loop
async def test_failed_loop_ends_streams_health_and_process(engine_dir: Path) -> None:
    """Known bug Q7."""
    async with serving(engine_dir, {"max_batch_size": 3}) as server:
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        long = tokens(UNTIL_LENGTH)
        running = [server.client.generate(TokenIds([1, 2]), stopping=long) for _ in range(2)]
        for stream in running:
            assert isinstance(await anext(stream), Started)
        backend = server.engine.backend
        assert isinstance(backend, ExecutorBackend)
        # The last seat is the failing request's; these wait behind it.
        backend._executor.enqueue_request(
            runtime.Request([3], UNTIL_LENGTH, ignore_end_ids=True, fail_after_tokens=2000)
        )
        waiting = [
            asyncio.ensure_future(
                failure(server.client.generate_text(TokenIds([4]), stopping=long))
            )
            for _ in range(3)
        ]
        await server.until_load(lambda load: load.queued == 3, 5)
        for stream in running:
            with pytest.raises(UnavailableError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.reason is ErrorReason.ENGINE_LOST
        for error in await asyncio.gather(*waiting):
            assert isinstance(error, UnavailableError)
            assert error.reason is ErrorReason.ENGINE_LOST
        assert (await watch.read()).status == NOT_SERVING
        assert await server.running is ExitCode.ENGINE_LOST
    assert ExitCode.ENGINE_LOST == 5
    assert backend.num_open == 0
    assert "made the loop fail" in (backend._executor.engine_error() or "")

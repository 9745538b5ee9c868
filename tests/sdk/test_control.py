"""Control calls and readiness, through both clients."""

import asyncio
import threading
import time

import pytest
from grpc_health.v1 import health_pb2
from sdk.scripted_server import Script

from deltaflash_client import (
    AsyncClient,
    CancelStatus,
    Capability,
    Client,
    DeadlineExceededError,
    DrainState,
    ErrorReason,
    NotFoundError,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_control_calls(script: Script) -> None:
    with Client(script.target) as client:
        server = client.server_info()
        assert server.version == "1.2"
        assert server.capabilities == {Capability.CHAT, Capability.UNSPECIFIED}
        assert server.limits.max_tokens == 4096
        assert server.limits.max_request_ms is None
        assert client.model_info().end_token_ids == (1, 2)
        assert client.load().slots_total == 8
        assert client.cancel("live") is CancelStatus.CANCELLING
        assert client.drain(wait_ms=5) == DrainState(running=5, queued=1)
        assert client.swap_engine("next").name == "next"
        with pytest.raises(NotFoundError) as caught:
            client.cancel("gone")
        assert caught.value.reason is ErrorReason.UNKNOWN_REQUEST
        with pytest.raises(NotFoundError) as caught:
            client.model_info("other")
        assert caught.value.reason is ErrorReason.UNKNOWN_MODEL


def test_asyncio_control_calls(script: Script) -> None:
    async def main() -> None:
        async with AsyncClient(script.target) as client:
            await client.wait_until_ready(timeout_s=2)
            assert (await client.server_info()).version == "1.2"
            assert (await client.model_info()).has_drafter
            assert (await client.load()).running == 2
            assert await client.cancel("live") is CancelStatus.CANCELLING
            assert (await client.drain()).running == 0
            assert (await client.swap_engine("next")).name == "next"
            with pytest.raises(NotFoundError):
                await client.cancel("gone")

    asyncio.run(main())


def test_wait_until_ready_waits_for_serving(script: Script) -> None:
    script.health.set("", NOT_SERVING)
    timer = threading.Timer(0.3, script.health.set, args=("", SERVING))
    timer.start()
    before_s = time.monotonic()
    with Client(script.target) as client:
        client.wait_until_ready(timeout_s=5)
    assert 0.25 < time.monotonic() - before_s < 2
    timer.join()


def test_wait_until_ready_ends(script: Script) -> None:
    script.health.set("", NOT_SERVING)
    with Client(script.target) as client:
        with pytest.raises(DeadlineExceededError, match="NOT_SERVING"):
            client.wait_until_ready(timeout_s=0.3)
        with pytest.raises(NotFoundError):
            client.wait_until_ready(timeout_s=5, service="nobody")
    unreachable = pytest.raises(DeadlineExceededError, match="unreachable")
    with Client("127.0.0.1:1") as client, unreachable:
        client.wait_until_ready(timeout_s=0.3)


def test_asyncio_wait_until_ready_ends(script: Script) -> None:
    script.health.set("", NOT_SERVING)

    async def main() -> None:
        async with AsyncClient(script.target) as client:
            with pytest.raises(DeadlineExceededError, match="NOT_SERVING"):
                await client.wait_until_ready(timeout_s=0.3)

    asyncio.run(main())

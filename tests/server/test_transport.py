"""Limits of the transport: keep-alive pings, message sizes, a second server on the port."""

import asyncio
import time

import grpc
import pytest
from fakes.app import Details, ask, error_of, fake_engine, on_loop, serving
from fakes.backend import FakeBackend, Script

from deltaflash.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from server.app import Application, BindError, join_address
from server.config import MIB, ServerConfig

SILENT_S = 7.0


@pytest.mark.parametrize(
    ("min_keepalive_ms", "survives"), [(1000, True), (20_000, False)], ids=["minimum", "faster"]
)
@on_loop
async def test_pings_on_a_silent_stream(min_keepalive_ms: int, survives: bool) -> None:
    backend = FakeBackend(Script(deltas=("x",), step_s=SILENT_S))
    async with serving(backend, min_keepalive_ms=min_keepalive_ms) as served:
        await served.channel.close()
        await served.connect(
            grpc__keepalive_time_ms=1000,
            grpc__keepalive_timeout_ms=5000,
            grpc__http2__max_pings_without_data=0,
        )
        began = time.monotonic()
        call = served.generate()
        if survives:
            last = None
            while (event := await call.read()) is not grpc.aio.EOF:
                last = event
            assert last is not None
            assert last.HasField("finished")
            assert time.monotonic() - began >= SILENT_S
        else:
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "too many pings" in (error.details() or "").lower()
            assert time.monotonic() - began < SILENT_S


def sized(num_bytes: int) -> inference_pb2.GenerateRequest:
    """A request of exactly this many serialised bytes that fails for its model alone."""
    request = ask(model="other")
    overhead = request.ByteSize() + len(
        generation_pb2.Grammar(regex="x" * 2**20).SerializeToString()
    )
    request.grammar.regex = "x" * (num_bytes - overhead + 2**20 - 64)
    request.grammar.regex += "x" * (num_bytes - request.ByteSize())
    assert request.ByteSize() == num_bytes
    return request


@pytest.mark.parametrize(
    ("num_bytes", "reason"),
    [
        (4 * MIB - 1, "UNKNOWN_MODEL"),
        (4 * MIB + 1, "UNKNOWN_MODEL"),
        (8 * MIB - 1, "UNKNOWN_MODEL"),
        (8 * MIB, "UNKNOWN_MODEL"),
        (8 * MIB + 1, "MESSAGE_TOO_LARGE"),
        (10 * MIB, ""),
    ],
)
@on_loop
async def test_message_sizes(num_bytes: int, reason: str) -> None:
    async with serving(max_message_bytes=8 * MIB) as served:
        error = Details(await error_of(served.generate(sized(num_bytes))))
        assert error.reason == reason
        if reason != "UNKNOWN_MODEL":
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if reason == "MESSAGE_TOO_LARGE":
            assert error.metadata == {"bytes": str(num_bytes), "max_bytes": str(8 * MIB)}
            assert error.retry_ms is None


@on_loop
async def test_second_server_on_the_port_fails_and_loads_nothing() -> None:
    async with serving() as served:
        loaded = []
        config = ServerConfig(port=served.app.port)
        second = Application(config, lambda: loaded.append(1) or fake_engine(FakeBackend()))
        with pytest.raises(BindError, match=str(served.app.port)):
            await second.run()
        assert not loaded
        await served.collect()


@on_loop
async def test_blocking_client_works_too() -> None:
    async with serving() as served:

        def call() -> int:
            with grpc.insecure_channel(f"127.0.0.1:{served.app.port}") as channel:
                return len(list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())))

        assert await asyncio.to_thread(call) >= 3


def test_addresses() -> None:
    assert join_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert join_address("::1", 1) == "[::1]:1"
    assert join_address("[::1]", 1) == "[::1]:1"


@pytest.mark.parametrize(
    "values",
    [
        {"port": 65536},
        {"port": -1},
        {"max_message_bytes": 0},
        {"max_message_bytes": 2**31},
        {"grace_s": float("nan")},
        {"grace_s": -1.0},
        {"write_timeout_s": 0.0},
        {"warmup_timeout_s": float("inf")},
        {"write_timeout_s": 1e300},
        {"grace_s": 1e300},
        {"max_request_ms": 0},
        {"log_level": "LOUD"},
    ],
)
def test_configuration_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        ServerConfig(**values)

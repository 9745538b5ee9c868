"""The life of a server process: start, signals, loss, and the exit codes of each end."""

import asyncio
import json
import signal
import socket
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
from fakes.app import Details, ask, error_of, on_loop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import Process, started

from deltaflash.v1 import generation_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]


def process(*options: str) -> AbstractAsyncContextManager[Process]:
    """A running server over the fake backend."""
    return started(sys.executable, "-m", "fakes.serve", *options, paths=(ROOT, ROOT / "tests"))


@on_loop
async def test_sigterm_while_loading_and_while_warming_up() -> None:
    async def stop_at(event: str, *options: str) -> None:
        async with process(*options) as server:
            await server.until(event)
            await asyncio.sleep(0.3)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await server.end() == 0
            assert time.monotonic() - began < 5
            assert not any(record["event"] == "serving" for record in server.records)

    await asyncio.gather(
        stop_at("listening", "--load-s", "60"),
        stop_at("listening", "--warmup-s", "20"),
    )


@on_loop
async def test_sigterm_drains() -> None:
    async with process("--steps", "60", "--step-s", "0.02") as server:
        port = (await server.until("serving"))["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            running = stub.Generate(ask())
            await running.read()
            server.process.send_signal(signal.SIGTERM)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = Details(await error_of(stub.Generate(ask())))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            events = []
            while (event := await running.read()) is not grpc.aio.EOF:
                events.append(event)
            ended = time.monotonic()
            assert len([e for e in events if e.HasField("delta")]) >= 50
            assert events[-1].finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH
            assert await running.code() is grpc.StatusCode.OK
            assert await server.end() == 0
            assert time.monotonic() - ended < 2


@on_loop
async def test_grace_that_is_over_ends_streams_with_a_status() -> None:
    async with process("--steps", "64", "--step-s", "1", "--grace-s", "0.3") as server:
        port = (await server.until("serving"))["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            running = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())
            await running.read()
            server.process.send_signal(signal.SIGTERM)
            error = Details(await error_of(running))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert await server.end() == 0


@on_loop
async def test_second_signal_ends_at_once() -> None:
    async with process("--steps", "64", "--step-s", "1") as server:
        port = (await server.until("serving"))["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            running = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())
            await running.read()
            server.process.send_signal(signal.SIGINT)
            await server.until("draining")
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await server.end() == 128 + signal.SIGTERM
            assert time.monotonic() - began < 1


@on_loop
async def test_lost_engine_ends_the_process_even_when_its_close_hangs() -> None:
    options = ("--lose-after-s", "0.8", "--steps", "64", "--step-s", "1", "--stuck")
    async with process(*options) as server:
        port = (await server.until("serving"))["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            running = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())
            error = Details(await error_of(running))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
            assert await server.end() == 5


@on_loop
async def test_refused_engine_and_taken_port_say_one_line() -> None:
    async with process("--refuse") as server:
        assert await server.end() == 3
        last = server.lines[-1]
        assert last == "deltaflash: nowhere: found nothing; needed: an engine; fix: pack one"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with process("--port", str(port), "--load-s", "60") as server:
            assert await server.end() == 4
            assert f"127.0.0.1:{port}" in server.lines[-1]
            assert server.lines[-1].startswith("deltaflash: cannot listen")


@on_loop
async def test_ready_file_holds_the_bound_address(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    async with process("--ready-file", str(path)) as server:
        port = (await server.until("serving"))["port"]
        ready = json.loads(path.read_text())
        assert ready["port"] == port
        assert ready["pid"] == server.process.pid
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert not path.exists()


@on_loop
async def test_ready_file_is_that_of_the_server_on_the_port(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("of a server that was killed")
    async with process("--ready-file", str(path), "--load-s", "0.5") as server:
        await server.until("listening")
        assert not path.exists()
        port = (await server.until("serving"))["port"]
        async with process("--ready-file", str(path), "--port", str(port)) as second:
            assert await second.end() == 4
        assert path.exists()

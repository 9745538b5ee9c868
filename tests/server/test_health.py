"""Health follows the phase of the server; reflection lists what it serves."""

import asyncio
import threading

import grpc
import pytest
from fakes.app import Details, ask, error_of, fake_engine, on_loop, serving
from fakes.backend import FakeBackend, Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deltaflash.v1 import control_pb2
from server.app import CONTROL, DOCUMENTS, HEALTH, INFERENCE, ExitCode
from server.service_context import Engine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", INFERENCE, CONTROL, DOCUMENTS)


async def statuses(channel: grpc.aio.Channel) -> set[int]:
    stub = health_pb2_grpc.HealthStub(channel)
    checks = [stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in NAMES]
    return {(await check).status for check in checks}


@on_loop
async def test_serving_only_after_load_and_warm_up() -> None:
    backend = FakeBackend()
    backend.warmup_script = Script(step_s=0.1)
    loaded = threading.Event()

    def load() -> Engine:
        loaded.wait(5)
        return fake_engine(backend)

    async with serving(backend, load=load) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        assert await statuses(served.channel) == {NOT_SERVING}
        error = Details(await error_of(served.generate()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOADING")
        assert error.retry_ms == 1000
        call = served.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert Details(await error_of(call)).reason == "ENGINE_LOADING"
        loaded.set()
        while not backend.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await statuses(served.channel) == {NOT_SERVING}
        assert (await watch.read()).status == SERVING
        assert await statuses(served.channel) == {SERVING}
        assert backend.requests[0].request_id == "warm-up"


@on_loop
async def test_drain_call_turns_health_off_and_finishes_what_runs() -> None:
    async with serving(FakeBackend(Script(deltas=("x",) * 10, step_s=0.05))) as served:
        running = served.generate()
        await running.read()
        answer = await served.control.Drain(control_pb2.DrainRequest())
        assert (answer.running, answer.queued) == (1, 0)
        assert await statuses(served.channel) == {NOT_SERVING}
        error = Details(await error_of(served.generate()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        answer = await served.control.Drain(control_pb2.DrainRequest(wait_ms=5000))
        assert (answer.running, answer.queued) == (0, 0)
        last = None
        while (event := await running.read()) is not grpc.aio.EOF:
            last = event
        assert last is not None
        assert last.HasField("finished")
        load = await served.control.GetLoad(control_pb2.GetLoadRequest())
        assert load.load.draining


@pytest.mark.parametrize("script", [Script(throw_after=2, step_s=0.1), Script(hang_after=2)])
@on_loop
async def test_lost_engine_ends_streams_health_and_process(script: Script) -> None:
    async with serving(FakeBackend(script)) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        calls = [served.generate() for _ in range(3)]
        await asyncio.gather(*(call.read() for call in calls))
        if script.hang_after is None:
            served.backend.may_throw.set()
        else:
            served.backend.lose("no progress")
        assert (await watch.read()).status == NOT_SERVING
        for call in calls:
            error = Details(await error_of(call))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
        assert await served.running is ExitCode.ENGINE_LOST
        assert served.backend.closed


@on_loop
async def test_engine_that_fails_its_warm_up_never_serves() -> None:
    backend = FakeBackend()
    backend.warmup_script = Script(hang_after=1)
    async with serving(backend, load=lambda: fake_engine(backend), warmup_timeout_s=0.2) as served:
        assert await served.running is ExitCode.ENGINE_LOST
        assert not served.app.serving.is_set()


@on_loop
async def test_unknown_service_is_not_found() -> None:
    async with serving() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        call = stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert (await error_of(call)).code() is grpc.StatusCode.NOT_FOUND


@on_loop
async def test_reflection_lists_the_services() -> None:
    async with serving() as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
        assert {INFERENCE, CONTROL, DOCUMENTS, HEALTH} <= names
        assert "grpc.reflection.v1alpha.ServerReflection" in names


@on_loop
async def test_fault_of_the_server_is_internal_and_says_nothing() -> None:
    backend = FakeBackend()
    async with serving(backend) as served:
        backend.submit = lambda request: 1 / 0  # type: ignore[assignment,misc]
        raw = await error_of(served.generate(ask(request_id="mine")))
        error = Details(raw)
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_FAULT")
        assert "division" not in str(raw.details())
        del backend.submit
        await served.collect(ask(request_id="mine"))

"""Who is let in, who is refused, and how a request is ended by its name."""

import asyncio
import time
from dataclasses import replace

import grpc
from fakes.app import Details, Served, ask, error_of, on_loop, serving
from fakes.backend import INFO, FakeBackend, Script

from deltaflash.v1 import control_pb2, generation_pb2

LONG = Script(deltas=("tick ",) * 64, step_s=0.05)
STATUS = control_pb2.CancelStatus


@on_loop
async def test_ten_times_the_limit_is_refused_at_once() -> None:
    info = replace(INFO, max_batch_size=1, max_queued=3)
    async with serving(FakeBackend(LONG, info)) as served:
        bursts = [await burst(served) for _ in range(3)]
        # Callers and server share this process, and the process its cores with others: 50 ms of its
        # own time, and of the clock no more than a busy machine explains.
        assert min(cpu_s for cpu_s, _ in bursts) < 0.05, bursts
        assert min(clock_s for _, clock_s in bursts) < 0.25, bursts
        await served.collect(ask(stopping=generation_pb2.StoppingOptions(max_tokens=1)))


async def burst(served: Served) -> tuple[float, float]:
    """Sends ten times the limit.

    Returns:
        The longest wait of a refused call: seconds of this process's time, and of the clock.
    """
    limit = served.backend.info.max_batch_size + served.backend.info.max_queued
    cpu_s: list[float] = []
    clock_s: list[float] = []
    calls = []

    async def one() -> None:
        began = time.process_time(), time.monotonic()
        call = served.generate()
        calls.append(call)
        try:
            await call.read()
        except grpc.aio.AioRpcError as refused:
            cpu_s.append(time.process_time() - began[0])
            clock_s.append(time.monotonic() - began[1])
            error = Details(refused)
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.reason == "QUEUE_FULL"
            assert error.metadata == {"queued": "3", "max_queued": "3"}
            assert error.retry_ms == 1000

    await asyncio.gather(*(one() for _ in range(10 * limit)))
    assert len(clock_s) == 9 * limit
    assert len(served.backend.open) == limit
    for call in calls:
        call.cancel()
    await served.until_idle()
    return max(cpu_s), max(clock_s)


@on_loop
async def test_a_single_refusal_takes_no_time() -> None:
    async with serving(FakeBackend(LONG)) as served:
        calls = [served.generate() for _ in range(12)]
        await asyncio.gather(*(call.read() for call in calls))
        waits = []
        for _ in range(3):
            began = time.monotonic()
            assert Details(await error_of(served.generate())).reason == "QUEUE_FULL"
            waits.append(time.monotonic() - began)
        assert min(waits) < 0.05, waits
        for call in calls:
            call.cancel()


@on_loop
async def test_live_name_is_refused_and_free_afterwards() -> None:
    async with serving(FakeBackend(LONG)) as served:
        first = served.generate(ask(request_id="mine"))
        await first.read()
        error = Details(await error_of(served.generate(ask(request_id="mine"))))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert error.reason == "REQUEST_ID_IN_USE"
        assert error.metadata == {"request_id": "mine"}
        first.cancel()
        await served.until_idle()
        again = served.generate(ask(request_id="mine"))
        assert (await again.read()).started.request_id == "mine"
        again.cancel()


@on_loop
async def test_cancel_by_name_ends_with_a_finished_event() -> None:
    async with serving(FakeBackend(LONG)) as served:
        call = served.generate()
        name = (await call.read()).started.request_id
        assert name
        answer = await served.control.Cancel(control_pb2.CancelRequest(request_id=name))
        assert answer.status == STATUS.CANCEL_STATUS_CANCELLING
        last = None
        while (event := await call.read()) is not grpc.aio.EOF:
            last = event
        assert last is not None
        assert last.finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        assert await call.code() is grpc.StatusCode.OK
        await served.until_idle()
        answer = await served.control.Cancel(control_pb2.CancelRequest(request_id=name))
        assert answer.status == STATUS.CANCEL_STATUS_ALREADY_FINISHED


@on_loop
async def test_waiting_request_is_cancelled_too() -> None:
    async with serving(FakeBackend(LONG)) as served:
        running = [served.generate() for _ in range(4)]
        await asyncio.gather(*(call.read() for call in running))
        waiting = served.generate(ask(request_id="waits"))
        await waiting.read()
        await served.control.Cancel(control_pb2.CancelRequest(request_id="waits"))
        event = await waiting.read()
        assert event.finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        assert event.finished.usage.completion_tokens == 0
        for call in running:
            call.cancel()


@on_loop
async def test_ended_names_are_forgotten_in_the_end() -> None:
    async with serving(FakeBackend(Script(deltas=("x",)))) as served:
        live = served.app.context.live
        for index in range(1100):
            with live.admit(f"r{index}", 4, 8):
                pass
        assert len(live) == 0
        answer = await served.control.Cancel(control_pb2.CancelRequest(request_id="r1099"))
        assert answer.status == STATUS.CANCEL_STATUS_ALREADY_FINISHED
        unknown = served.control.Cancel(control_pb2.CancelRequest(request_id="r0"))
        assert Details(await error_of(unknown)).reason == "UNKNOWN_REQUEST"


@on_loop
async def test_load_and_infos() -> None:
    async with serving(FakeBackend(LONG)) as served:
        calls = [served.generate() for _ in range(6)]
        await asyncio.gather(*(call.read() for call in calls))
        load = (await served.control.GetLoad(control_pb2.GetLoadRequest())).load
        assert (load.running, load.queued, load.slots_total) == (4, 2, 4)
        assert not load.draining
        server = (await served.control.GetServerInfo(control_pb2.GetServerInfoRequest())).server
        assert server.limits.max_prompt_tokens == 4095
        assert server.limits.max_queued == 8
        assert server.limits.max_logit_biases == 256
        assert server.limits.max_top_logprobs == 20
        assert server.limits.min_keepalive_ms == 1000
        assert not server.limits.HasField("max_request_ms")
        capability = control_pb2.Capability
        assert list(server.capabilities) == [
            capability.CAPABILITY_TEXT_PROMPT,
            capability.CAPABILITY_TOKEN_PROMPT,
            capability.CAPABILITY_CHAT,
            capability.CAPABILITY_TOKEN_RECORDS,
            capability.CAPABILITY_LOGPROBS,
        ]
        model = (await served.control.GetModelInfo(control_pb2.GetModelInfoRequest())).model
        assert (model.name, model.context_length, model.has_drafter) == ("fake", 4096, False)
        for call in calls:
            call.cancel()

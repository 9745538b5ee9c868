"""Streams over real sockets: what arrives, and what is free again however a stream ends."""

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import time

import grpc
import pytest
from fakes.app import Details, ask, error_of, on_loop, serving
from fakes.backend import FakeBackend, Script

from deltaflash.v1 import generation_pb2
from deltaflash_client import AsyncClient, Finished
from server.backend import EndCause
from server.write_watch import WriteWatch

LONG = Script(deltas=("tick ",) * 2000, step_s=0.005)


@pytest.mark.parametrize(
    ("script", "reason", "match"),
    [
        (Script(), generation_pb2.FINISH_REASON_LENGTH, None),
        (
            Script(cause=EndCause.END_TOKEN, end_token_id=258, final_text="last"),
            generation_pb2.FINISH_REASON_STOP,
            generation_pb2.StopMatch(end_token_id=258),
        ),
        (
            Script(cause=EndCause.STOP_STRING, stop_string="END"),
            generation_pb2.FINISH_REASON_STOP,
            generation_pb2.StopMatch(stop_string="END"),
        ),
        (
            Script(cause=EndCause.END_TOKEN, end_token_id=7),
            generation_pb2.FINISH_REASON_STOP,
            generation_pb2.StopMatch(stop_token_id=7),
        ),
        (Script(cause=EndCause.REPETITION), generation_pb2.FINISH_REASON_REPETITION, None),
        (Script(deltas=(), final_text=""), generation_pb2.FINISH_REASON_LENGTH, None),
    ],
    ids=["length", "end-token", "stop-string", "stop-token", "repetition", "nothing"],
)
@on_loop
async def test_deltas_joined_are_the_text(
    script: Script,
    reason: generation_pb2.FinishReason.ValueType,
    match: generation_pb2.StopMatch | None,
) -> None:
    whole = "".join(script.deltas) + script.final_text
    async with serving(FakeBackend(script)) as served:
        stopping = generation_pb2.StoppingOptions(stop_token_ids=[7])
        texts, finished = await served.collect(ask(stopping=stopping))
        assert "".join(texts) == whole
        assert sum(map(len, texts)) == len(whole)
        assert all(texts)
        assert finished.finish_reason == reason
        assert (finished.stop_match if finished.HasField("stop_match") else None) == match
        assert finished.usage.completion_tokens == len(script.deltas)
        assert finished.usage.total_tokens == 2 + len(script.deltas)
        async with AsyncClient(served.app.address) as client:
            assert (await client.generate_text("hi")).text == whole
        await served.until_idle()


@on_loop
async def test_started_tells_the_limits_that_hold() -> None:
    async with serving() as served:
        sampling = generation_pb2.SamplingOptions(temperature=0.7)
        call = served.generate(ask(request_id="mine", sampling=sampling))
        started = (await call.read()).started
        assert (started.request_id, started.model) == ("mine", "fake")
        assert (started.prompt_tokens, started.max_tokens) == (2, 64)
        assert started.HasField("seed")
        seed = served.backend.requests[-1].sampling.seed
        assert started.seed == seed
        assert not (await served.generate().read()).started.HasField("seed")


@on_loop
async def test_max_tokens_ends_with_the_context_and_default_with_the_cache() -> None:
    async with serving() as served:
        stopping = generation_pb2.StoppingOptions(max_tokens=4095)
        error = Details(await error_of(served.generate(ask(stopping=stopping))))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason == "CAPACITY_EXCEEDED"
        assert error.metadata == {"needed": "4096", "available": "2048"}
        started = (await served.generate(ask("x" * 2040)).read()).started
        assert started.max_tokens == 8


@on_loop
async def test_times_and_counts() -> None:
    async with serving(FakeBackend(Script(step_s=0.02))) as served:
        _, finished = await served.collect()
        stats = finished.stats
        assert stats.steps == 5
        assert stats.total_us >= stats.time_to_first_token_us + stats.decode_us - 1000
        assert stats.time_to_first_token_us >= 20_000
        assert stats.decode_us >= 70_000


@on_loop
async def test_late_reader_gets_one_merged_delta() -> None:
    script = Script(deltas=("x" * 65536,) * 400)
    async with serving(FakeBackend(script)) as served:
        stopping = generation_pb2.StoppingOptions(max_tokens=400)
        call = served.generate(ask(stopping=stopping))
        await asyncio.sleep(0.5)
        texts = [e.delta.text async for e in call if e.HasField("delta")]
        assert sum(map(len, texts)) == 400 * 65536
        assert len(texts) < 300


@on_loop
async def test_cancelled_call_frees_the_seat() -> None:
    async with serving(FakeBackend(LONG)) as served:
        call = served.generate()
        for _ in range(3):
            await call.read()
        assert served.backend.open
        call.cancel()
        await served.until_idle()
        assert served.backend.num_cancelled == 1


@on_loop
async def test_deadline_frees_the_seat_and_reaches_the_engine() -> None:
    async with serving(FakeBackend(LONG)) as served:
        began = time.monotonic()
        error = await error_of(served.generate(timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 1
        await served.until_idle()
        assert served.backend.num_cancelled == 1
        allotted = served.backend.requests[-1].allotted_time_ms
        assert allotted is not None
        assert 200 < allotted <= 300


@pytest.mark.parametrize("timeout_s", [None, 1e7, 1e9])
@on_loop
async def test_no_deadline_and_a_far_one_are_alike(timeout_s: float | None) -> None:
    async with serving() as served:
        assert [e async for e in served.generate(timeout=timeout_s)]
        assert served.backend.requests[-1].allotted_time_ms is None


@on_loop
async def test_timed_out_by_the_engine_is_a_deadline_status() -> None:
    async with serving(FakeBackend(Script(cause=EndCause.TIMED_OUT))) as served:
        error = Details(await error_of(served.generate()))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.reason == "DEADLINE_PASSED"


@on_loop
async def test_timed_out_by_the_servers_limit_is_a_finish_reason() -> None:
    backend = FakeBackend(Script(cause=EndCause.TIMED_OUT))
    async with serving(backend, max_request_ms=500) as served:
        _, finished = await served.collect()
        assert finished.finish_reason == generation_pb2.FINISH_REASON_DEADLINE
        assert backend.requests[-1].allotted_time_ms == 500


CLIENT = """
import sys
import grpc
from deltaflash.v1 import inference_pb2, inference_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = inference_pb2_grpc.InferenceServiceStub(channel)
for event in stub.Generate(inference_pb2.GenerateRequest(text="hi")):
    print(event.WhichOneof("event"), flush=True)
"""


@on_loop
async def test_caller_that_leaves_in_the_middle_of_a_write_is_no_fault() -> None:
    with pytest.raises(asyncio.CancelledError), WriteWatch(1):
        raise grpc.aio.InternalError('Failed "execute_batch"')


@on_loop
async def test_killed_client_frees_the_seat() -> None:
    async with serving(FakeBackend(LONG)) as served:
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(CLIENT),
            f"127.0.0.1:{served.app.port}",
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        for _ in range(5):
            assert await client.stdout.readline()
        client.send_signal(signal.SIGKILL)
        await client.wait()
        await served.until_idle()
        assert served.backend.num_cancelled == 1


@on_loop
async def test_cancelled_streams_leave_nothing() -> None:
    async with serving(FakeBackend(LONG)) as served:

        async def cancel_some(number: int) -> None:
            for index in range(number):
                call = served.generate()
                if index % 3:
                    await call.read()
                call.cancel()

        async def storm(number: int) -> None:
            await asyncio.gather(*(cancel_some(number // 4) for _ in range(4)))
            await served.until_idle(5)
            served.backend.requests.clear()
            gc.collect()

        await storm(400)
        before = len(gc.get_objects())
        await storm(2000)
        grown = len(gc.get_objects()) - before
        # Nothing per stream; NUM_REMEMBERED plain strings are not objects of the collector.
        assert grown < 500, grown
        texts, _ = await served.collect(ask(stopping=generation_pb2.StoppingOptions(max_tokens=3)))
        assert texts


@on_loop
async def test_reader_that_stalls_is_ended() -> None:
    script = Script(deltas=("x" * 262144,) * 200, step_s=0.001)
    async with serving(FakeBackend(script), write_timeout_s=0.5) as served:
        stopping = generation_pb2.StoppingOptions(max_tokens=200)
        call = served.generate(ask(stopping=stopping))
        await call.read()
        await served.until_idle(4)
        error = Details(await error_of(call))
        assert error.code is grpc.StatusCode.ABORTED
        assert error.reason == "SLOW_READER"


@on_loop
async def test_status_arrives_before_and_after_the_first_message() -> None:
    async with serving(FakeBackend(Script(throw_after=3, step_s=0.02))) as served:
        began = time.monotonic()
        assert Details(await error_of(served.generate(ask("")))).reason == "EMPTY_PROMPT"
        call = served.generate()
        text = ""
        while text != "Hello, wörld":
            text += (await call.read()).delta.text
        served.backend.may_throw.set()
        assert Details(await error_of(call)).reason == "ENGINE_LOST"
        assert time.monotonic() - began < 1


@on_loop
async def test_sdk_reads_events_in_order() -> None:
    async with serving() as served, AsyncClient(served.app.address) as client:
        events = [event async for event in client.generate("hi")]
        assert isinstance(events[-1], Finished)

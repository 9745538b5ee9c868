"""Many requests with cancels of every kind: memory, tables and counters of a server process.

    PYTHONPATH=tests python tests/bench/bench_soak.py [N]

A server process with the tiny engine and one process with all clients; then, to tell whose memory
it is, the same clients on an empty `grpc.aio` server and as many requests on the executor alone.
Memory is looked at ten times, each time when all is quiet; then no table may hold anything, and at
the end every counter has to add up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from conftest import DATA
from executor_client import wait_idle
from real_server import Outcomes

from build_engine.pack import PackOptions, pack
from deltaflash.v1 import control_pb2, control_pb2_grpc, generation_pb2, inference_pb2
from deltaflash.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from runtime import Executor, ExecutorConfig, RepetitionLimits, Request
from server.app import Application, write_whole
from server.backends.executor import load_engine
from server.commands.serve import run_loop
from server.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from server.backend import Generation, GenerationRequest
    from server.backends.executor import ExecutorBackend
    from server.service_context import Engine

Answer = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

Call = grpc.aio.ServicerContext[Any, Any]
State = dict[str, Any]
NUM_LOOKS = 10
NUM_CLIENTS = 40
SEATS, QUEUE = 8, 28  # some find the queue full
SAME_ENDS = {  # what a client saw, and the log calls so; a client may have left before it saw it
    "FINISH_REASON_CANCELLED": ["CANCELLED"],
    "FINISH_REASON_LENGTH": ["LENGTH"],
    "FINISH_REASON_REPETITION": ["REPETITION"],
    "FINISH_REASON_STOP": ["END_TOKEN", "STOP_STRING"],
}


def resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


class Counted:
    """Counts what the engine takes and what it completes."""

    def __init__(self, backend: ExecutorBackend) -> None:
        self.backend, self.num_taken, self.num_completed = backend, 0, 0
        self._submit, backend.submit = backend.submit, self.submit  # type: ignore[method-assign]

    def submit(self, request: GenerationRequest) -> Generation:
        generation = self._submit(request)
        self.num_taken += 1
        return generation

    async def watch(self) -> None:
        while True:
            self.num_completed += sum(s.num_completed for s in self.backend.iteration_stats())
            await asyncio.sleep(0.05)


async def serve(engine_dir: Path, ready_file: Path) -> None:
    """The server process; says how it is for each line on stdin."""
    counted: list[Counted] = []

    def load() -> Engine:
        config = EngineConfig(max_batch_size=SEATS, max_queue_size=QUEUE, num_threads=1)
        engine = load_engine(engine_dir, config, 1)
        counted.append(Counted(engine.backend))  # type: ignore[arg-type]
        return engine

    app = Application(ServerConfig(port=0, ready_file=ready_file), load)
    outcomes = Outcomes()
    logging.getLogger("server").addHandler(outcomes)
    logging.getLogger("server").setLevel(logging.INFO)

    def report() -> None:
        gc.collect()
        backend = counted[0].backend
        held = backend.load()
        tables = {
            "live requests": len(app.context.live),
            "open generations": backend.num_open,
            "running": held.num_running,
            "queued": held.num_queued,
            "queued tokens": held.num_queued_tokens,
            "slots": held.slots_used,
            "pages": held.pages_used,
        }
        counters = {"taken": counted[0].num_taken, "completed": counted[0].num_completed}
        state = {"tables": tables, "outcomes": outcomes.counts, "rss_mb": resident_mb()}
        print(json.dumps({**state, **counters}), flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, lambda: (sys.stdin.readline(), report()))
    running = asyncio.ensure_future(app.run())
    await app.serving.wait()
    watch = asyncio.ensure_future(counted[0].watch())
    await running
    watch.cancel()


class EmptyServicer(InferenceServiceServicer):
    """Streams of nothing, as long as the requests want them."""

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Call
    ) -> None:
        response, limit = inference_pb2.GenerateResponse, request.stopping.max_tokens
        if limit == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no tokens")
        await context.write(response(started=generation_pb2.Started()))
        for _ in range(limit):
            await asyncio.sleep(0.001)
            await context.write(response(delta=generation_pb2.Delta(text="text")))
        await context.write(response(finished=generation_pb2.Finished()))


class EmptyControl(control_pb2_grpc.ControlServiceServicer):
    async def Cancel(  # type: ignore[override]  # noqa: N802
        self, request: control_pb2.CancelRequest, context: Call
    ) -> control_pb2.CancelResponse:
        return control_pb2.CancelResponse()


async def serve_empty(ready_file: Path) -> None:
    """The process of the empty server; says how it is as the other does."""

    def report() -> None:
        gc.collect()
        print(json.dumps({"tables": {}, "rss_mb": resident_mb()}), flush=True)

    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(EmptyServicer(), server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(EmptyControl(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: (sys.stdin.readline(), report()))
    write_whole(ready_file, json.dumps({"port": port}))
    await server.wait_for_termination()


class Clients:
    """Asks in all the ways that end a request, and counts how each ended."""

    def __init__(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.inference = InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        self.rng = rng
        self.ends: Counter[str] = Counter()
        self.num_asked = 0

    async def ask(self, count: int, bar: Bar) -> None:
        """Sends so many requests, NUM_CLIENTS at once."""
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                self.ends[await self.one()] += 1
                bar.add()

        await asyncio.gather(*(one_after_the_other() for _ in range(NUM_CLIENTS)))

    async def one(self) -> str:
        rng = self.rng
        self.num_asked += 1
        name, patience = f"soak-{self.num_asked}", rng.randint(1, 4)
        way = rng.choices(
            ["read", "leave", "leave at once", "cancel by name", "deadline", "bad field"],
            [40, 20, 5, 15, 15, 5],
        )[0]
        request = inference_pb2.GenerateRequest(
            request_id=name,
            token_ids={"ids": [rng.randrange(490) for _ in range(rng.randint(1, 60))]},
            sampling={"temperature": rng.choice([0.0, 1.0]), "top_k": rng.choice([0, 20])},
            stopping={"max_tokens": rng.randint(1, 24), "stop_strings": rng.choice([[], ["e"]])},
        )
        if rng.random() < 0.2:
            guard = {"max_period": 4, "min_repeats": 2, "min_repeated_tokens": 0}
            request.stopping.repetition_guard.CopyFrom(generation_pb2.RepetitionGuard(**guard))
        if way == "bad field":
            request.stopping.max_tokens = 0
        timeout_s = rng.uniform(0.001, 0.04) if way == "deadline" else None
        call = self.inference.Generate(request, timeout=timeout_s)
        if way == "leave at once":
            call.cancel()
            return "left"
        try:
            return await self._read(call, name, way, patience)
        except grpc.aio.AioRpcError as error:
            return error.code().name

    async def _read(self, call: Answer, name: str, way: str, patience: int) -> str:
        num_read = 0
        while (event := await call.read()) is not grpc.aio.EOF:
            num_read += 1
            if event.HasField("finished"):
                return generation_pb2.FinishReason.Name(event.finished.finish_reason)
            if num_read == patience and way == "leave":
                call.cancel()
                return "left"
            if num_read == patience and way == "cancel by name":
                await self.control.Cancel(control_pb2.CancelRequest(request_id=name))
        raise AssertionError("a stream ended without an end")


class Bar:
    """How far it is, on stderr."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.count, self.began = title, total, 0, time.monotonic()

    def add(self, count: int = 1) -> None:
        self.count += count
        if self.count % max(1, self.total // 1000) == 0 or self.count == self.total:
            rate = self.count / (time.monotonic() - self.began)
            filled = 40 * self.count // self.total
            end = "\n" if self.count == self.total else ""
            bar = f"[{'#' * filled:40}] {self.count:,} of {self.total:,}, {rate:,.0f}/s"
            print(f"\r{self.title} {bar}", end=end, file=sys.stderr, flush=True)


async def soak(
    process: subprocess.Popen[str], port: int, total: int, who: str
) -> tuple[State, State, Counter[str]]:
    """Returns the server's first and last state and the ends that the clients saw."""
    assert process.stdin is not None
    assert process.stdout is not None

    def look() -> State:
        process.stdin.write("\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    async def when_quiet() -> State:
        deadline = time.monotonic() + 5
        while True:
            state = look()
            if not any(state["tables"].values()) and state.get("taken") == state.get("completed"):
                return state
            assert time.monotonic() < deadline, f"still held: {state}"
            await asyncio.sleep(0.1)

    before = look()  # the warm-up is taken, and none of the clients'
    print(f"\n| requests | RSS of {who} | held in all tables |\n|---|---|---|")
    print(f"| 0 | {before['rss_mb']:.1f} MB | {sum(before['tables'].values())} |")
    bar = Bar(who, total)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        clients = Clients(channel, random.Random(7))
        for index in range(NUM_LOOKS):
            upto = total * (index + 1) // NUM_LOOKS
            await clients.ask(upto - clients.num_asked, bar)
            state = await when_quiet()
            print(f"| {upto:,} | {state['rss_mb']:.1f} MB | {sum(state['tables'].values())} |")
    return before, state, clients.ends


def add_up(before: State, state: State, ends: Counter[str], total: int) -> None:
    """Holds the counters of clients, log and engine against each other."""
    outcomes = dict(state["outcomes"])
    full = outcomes.pop("QUEUE_FULL", 0)  # refused by the engine's own queue
    ended, taken = sum(outcomes.values()), state["taken"] - before["taken"]
    refused = ends["INVALID_ARGUMENT"] + ends["RESOURCE_EXHAUSTED"]
    # What was asked and has no end in the log was refused, or its caller had left by then.
    gone = total - ended - refused
    show("ends that the clients saw", ends, total)
    show("ends in the server's log", outcomes, ended)
    print(
        f"\n{total:,} asked = {ended:,} ended + {refused:,} refused ({full:,} of them by the "
        f"engine's queue) + {gone:,} that left before they were admitted. The engine took "
        f"{taken:,} and completed {state['completed'] - before['completed']:,}."
    )
    assert 0 <= gone <= ends["left"] + ends["DEADLINE_EXCEEDED"], "requests are missing"
    assert taken <= ended, "the engine took a request that has no end"
    for seen, logged in SAME_ENDS.items():
        assert ends[seen] <= sum(outcomes.get(name, 0) for name in logged), seen


def show(title: str, counts: dict[str, int], total: int) -> None:
    assert sum(counts.values()) == total
    print(f"\n| {title} | |\n|---|---|")
    for name, count in sorted(counts.items()):
        print(f"| {name} | {count:,} |")
    print(f"| together | {total:,} |")


def soak_executor(engine_dir: Path, total: int) -> None:
    """The same without server: one thread that asks, cancels and reads."""
    executor = Executor(
        engine_dir,
        ExecutorConfig(max_batch_size=SEATS, max_queue_size=QUEUE, num_threads=1),
    )
    rng, live, ends, num_asked, num_final = random.Random(7), set[int](), Counter[str](), 0, 0
    bar = Bar("the executor", total)
    print("\n| requests | RSS of the executor alone | held |\n|---|---|---|")
    print(f"| 0 | {resident_mb():.1f} MB | 0 |")
    while num_final < total:
        upto = total * (num_final * NUM_LOOKS // total + 1) // NUM_LOOKS
        while len(live) < SEATS + QUEUE and num_asked < upto:
            request = Request(
                [rng.randrange(490) for _ in range(rng.randint(1, 60))],
                rng.randint(1, 24),
                stop_strings=rng.choice([[], ["e"]]),
                allotted_time_ms=rng.randint(1, 40) if rng.random() < 0.15 else None,
                repetition_guard=RepetitionLimits(
                    max_period=4, min_repeats=2, min_repeated_tokens=0
                )
                if rng.random() < 0.2
                else None,
            )
            live.add(executor.enqueue_request(request))
            num_asked += 1
        if rng.random() < 0.5:
            executor.cancel_request(rng.choice(sorted(live)))
        for response in executor.await_responses(0.1):
            if response.is_final:
                live.remove(response.request_id)
                ends[response.finish_reason.name] += 1
                num_final += 1
                bar.add()
        executor.get_latest_iteration_stats()
        if num_final == upto:
            wait_idle(executor)
            print(f"| {upto:,} | {resident_mb():.1f} MB | {len(live)} |", flush=True)
    show("ends of the executor alone", ends, total)
    executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=int, nargs="?", default=100_000)
    parser.add_argument("--serve", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-empty", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--executor", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        run_loop(lambda: serve(*options.serve))
    elif options.serve_empty:
        run_loop(lambda: serve_empty(options.serve_empty))
    elif options.executor:
        soak_executor(options.executor, options.requests)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), options.requests)


def drive(words: list[str], ready_file: Path, total: int, who: str) -> Any:  # noqa: ANN401
    """Runs a server process and all clients; returns what `soak` does."""
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while not ready_file.exists():
            assert process.poll() is None, "the server ended"
            time.sleep(0.05)
        port = json.loads(ready_file.read_text())["port"]
        return run_loop(lambda: soak(process, port, total, who))
    finally:
        process.terminate()
        process.wait(10)


def run(folder: Path, total: int) -> None:
    engine_dir, ready_file, empty = folder / "engine", folder / "ready", folder / "empty"
    pack(DATA / "tiny_qwen3_5", engine_dir, PackOptions(created="2026-01-01T00:00:00Z"))
    seen = drive(["--serve", str(engine_dir), str(ready_file)], ready_file, total, "the server")
    add_up(*seen, total)
    drive(["--serve-empty", str(empty)], empty, total, "an empty grpc.aio server")
    sys.stdout.flush()
    words = [sys.executable, __file__, str(total), "--executor", str(engine_dir)]
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()

"""Streams of a server with an engine without time: what a message costs on one core.

    PYTHONPATH=tests python tests/bench/bench_transport.py [--rounds N] [--plot FILE.svg]

Two processes on a core each: the server, and one with all its clients. The floor is an empty
`grpc.aio` server that writes the same bytes over and over. A stream counts when all its text and
its last event have come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
from bar_chart import bar_chart
from fakes.app import fake_engine
from fakes.instant import WORD, InstantBackend

from deltaflash.v1 import inference_pb2
from server.commands.serve import run_loop, serve_engine
from server.config import ServerConfig

GENERATE = "/deltaflash.v1.InferenceService/Generate"
SERVER_CORE, CLIENT_CORE = 0, 1
WARM_UP_MESSAGES = 200
TARGET = 25_000  # messages/s
NAMES = {"floor": "empty grpc.aio server", "server": "the server"}
Send = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]


@dataclass(frozen=True)
class Case:
    name: str  # "floor" or "server"
    tokens: int  # of a message


@dataclass(frozen=True)
class Result:
    case: Case
    num_messages: int
    wall_s: float
    cpu_s: float  # of the server process, all its threads


CASES = [Case(name, tokens) for tokens in (1, 8) for name in ("floor", "server")]


def serve(case: Case, num_messages: int, ready_file: Path) -> NoReturn:
    """The server process."""
    os.sched_setaffinity(0, {SERVER_CORE})
    if case.name == "floor":
        run_loop(lambda: serve_floor(case, num_messages, ready_file))
        sys.exit()
    serve_engine(
        lambda: fake_engine(InstantBackend(case.tokens)),
        ServerConfig(port=0, ready_file=ready_file),
    )


async def serve_floor(case: Case, num_messages: int, ready_file: Path) -> None:
    response = inference_pb2.GenerateResponse
    message = response(delta={"text": WORD * case.tokens}).SerializeToString()
    usage = {"completion_tokens": num_messages * case.tokens}
    last = response(finished={"usage": usage}).SerializeToString()

    async def generate(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        tokens = inference_pb2.GenerateRequest.FromString(request).stopping.max_tokens
        for _ in range(tokens // case.tokens):
            await context.write(message)
        await context.write(last)

    server = grpc.aio.server()
    service, method = GENERATE.strip("/").split("/")
    handler = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready_file.write_text(json.dumps({"port": port}))
    await server.wait_for_termination()


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, as the scheduler counts it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def read_stream(send: Send, case: Case, num_messages: int) -> list[bytes]:
    request = inference_pb2.GenerateRequest(
        text="hi", stopping={"max_tokens": case.tokens * num_messages}
    )
    call = send(request.SerializeToString())
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def check(messages: list[bytes], case: Case, num_messages: int) -> None:
    """Fails unless the stream is complete and has a message for each step."""
    events = [inference_pb2.GenerateResponse.FromString(message) for message in messages]
    deltas = [event.delta.text for event in events if event.HasField("delta")]
    assert deltas == [WORD * case.tokens] * num_messages, "a stream is not complete"
    assert events[-1].HasField("finished"), "a stream has no end"


async def drive(
    case: Case, port: int, pid: int, num_streams: int, num_messages: int, num_rounds: int
) -> list[Result]:
    """All clients, on one connection; the first round warms up."""
    results = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        send = channel.unary_stream(GENERATE)
        for number in range(num_rounds + 1):
            count = num_messages if number else WARM_UP_MESSAGES
            cpu, begin = cpu_s(pid), time.perf_counter()
            streams = await asyncio.gather(
                *(read_stream(send, case, count) for _ in range(num_streams))
            )
            wall, cpu = time.perf_counter() - begin, cpu_s(pid) - cpu
            for messages in streams:
                check(messages, case, count)
            if number:
                results.append(Result(case, sum(map(len, streams)), wall, cpu))
    return results


def measure(case: Case, num_streams: int, num_messages: int, num_rounds: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready"
        words = ["--serve", case.name, str(case.tokens), str(num_messages), str(ready_file)]
        process = subprocess.Popen([sys.executable, __file__, *words], stderr=subprocess.DEVNULL)
        try:
            while not (ready_file.exists() and ready_file.read_text()):
                assert process.poll() is None, "the server ended"
                time.sleep(0.02)
            port = json.loads(ready_file.read_text())["port"]
            os.sched_setaffinity(0, {CLIENT_CORE})
            return run_loop(
                lambda: drive(case, port, process.pid, num_streams, num_messages, num_rounds)
            )
        finally:
            process.kill()
            process.wait()


def row(result: Result) -> str:
    tokens = result.case.tokens
    rate, cost = result.num_messages / result.wall_s, result.cpu_s / result.num_messages
    return (
        f"| {NAMES[result.case.name]} | {tokens} | {rate:,.0f} | {rate * tokens:,.0f} "
        f"| {cost * 1e6:.1f} us | {1 / cost:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--messages", type=int, default=1000, help="of a stream")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")
    parser.add_argument("--only", choices=list(NAMES))
    parser.add_argument("--plot", type=Path, help="gets the messages/s as SVG")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, tokens, num_messages, ready_file = options.serve
        serve(Case(name, int(tokens)), int(num_messages), Path(ready_file))
    print(f"{options.streams} streams of {options.messages} messages, best of {options.rounds}\n")
    print("| | tokens a message | messages/s | tokens/s | CPU a message | messages/s of CPU time |")
    print("|---|---|---|---|---|---|")
    bars = []
    for case in CASES:
        if options.only in {None, case.name}:
            results = measure(case, options.streams, options.messages, options.rounds)
            best = min(results, key=lambda result: result.wall_s)
            print(row(best), flush=True)
            label = f"{NAMES[case.name]}, {case.tokens} a message"
            bars.append((label, best.num_messages / best.wall_s))
    if options.plot is not None:
        mark = (f"target: {TARGET:,}", TARGET)
        options.plot.write_text(bar_chart("messages/s, server on one core", bars, mark))


if __name__ == "__main__":
    main()

"""`deltaflash` as a process over a packed engine: signals, exit codes, its three commands."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import pytest
from checkpoints import assert_one_line, edit_json
from fakes.app import on_loop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from real_server import NO_RETRY, decode, encode, failure, fresh_random, recorded, serving, tokens
from server_process import Process, started

from deltaflash_client import (
    AsyncClient,
    DeadlineExceededError,
    Delta,
    ErrorReason,
    Finished,
    FinishReason,
    TokenIds,
    UnavailableError,
)
from runtime.engine_directory import engine_id

DELTAFLASH = str(Path(sys.executable).with_name("deltaflash"))
LONG = tokens(3900)
PROMPT = "The quick brown fox"


def serve(engine_dir: Path, *options: str) -> AbstractAsyncContextManager[Process]:
    words = ("serve", str(engine_dir), "--port", "0", "--threads", "1", *options)
    return started(DELTAFLASH, *words)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DELTAFLASH, *words], capture_output=True, text=True, timeout=30, check=False
    )


@on_loop
async def test_serves_logs_and_ends(engine_dir: Path, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    prompt, answer = recorded("tiny_qwen3_5", "text")
    async with serve(engine_dir, "--ready-file", str(ready_file)) as server:
        record = await server.until("serving")
        assert json.loads(ready_file.read_text())["address"] == record["address"]
        async with AsyncClient(record["address"], NO_RETRY) as client:
            await client.wait_until_ready(1)
            got = await client.generate_text(
                TokenIds(prompt), stopping=tokens(16), request_id="the-first"
            )
            assert got.text == decode(answer)
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
        assert not ready_file.exists()
    ended = [json.loads(line) for line in server.lines if "request ended" in line]
    assert [(one["request_id"], one["outcome"]) for one in ended] == [("the-first", "LENGTH")]
    assert not any(record["level"] in {"WARNING", "ERROR"} for record in server.records)


@on_loop
async def test_signal_at_any_time_of_the_start(engine_dir: Path) -> None:
    """Known bug Q8: whatever it interrupts, the process ends soon, and says nothing odd."""
    rng = fresh_random()

    async def stop(number: int, delay_s: float | None) -> None:
        async with serve(engine_dir) as server:
            if delay_s is None:
                await server.until("listening")
            else:
                await asyncio.sleep(delay_s)
            began = time.monotonic()
            server.process.send_signal(number)
            code = await server.end(5)
            assert time.monotonic() - began < 5
            # Before Python has its handlers the signal ends the process by itself.
            allowed = {0} if delay_s is None else {0, -number}
            assert code in allowed, (number, delay_s, code, server.lines)
            assert not any("Traceback" in line for line in server.lines), server.lines

    for number in (signal.SIGTERM, signal.SIGINT):
        await stop(number, None)
    # Python itself turns an early SIGINT into a traceback; SIGTERM is what supervisors send.
    for _ in range(3):
        delays = [rng.uniform(0, 1.2) for _ in range(2)]
        await asyncio.gather(*(stop(signal.SIGTERM, delay) for delay in delays))


@on_loop
async def test_sigterm_lets_running_and_waiting_answers_end(engine_dir: Path) -> None:
    """Known bug Q9: health turns first, new calls are refused, what is in the house is finished."""
    async with serve(engine_dir, "--max-batch-size", "1") as server:
        address = (await server.until("serving"))["address"]
        async with (
            AsyncClient(address, NO_RETRY) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            alone = await client.generate_text(TokenIds([1]), stopping=LONG)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            streams = [client.generate(TokenIds([1]), stopping=LONG) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            server.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await failure(client.generate_text(TokenIds([1]), stopping=LONG))
            assert isinstance(error, UnavailableError), error
            assert error.reason is ErrorReason.DRAINING
            for stream in streams:
                events = [event async for event in stream]
                text = "".join(event.text for event in events if isinstance(event, Delta))
                assert text == alone.text
                assert isinstance(events[-1], Finished)
                assert events[-1].finish_reason is FinishReason.LENGTH
            ended = time.monotonic()
            assert await server.end() == 0
            assert time.monotonic() - ended < 2


@on_loop
async def test_second_signal_ends_at_once(engine_dir: Path) -> None:
    async with serve(engine_dir, "--max-batch-size", "1") as server:
        address = (await server.until("serving"))["address"]
        async with AsyncClient(address, NO_RETRY) as client:
            streams = [client.generate(TokenIds([1]), stopping=LONG) for _ in range(8)]
            for stream in streams:
                await anext(stream)
            server.process.send_signal(signal.SIGTERM)
            await server.until("draining")
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await server.end() == 128 + signal.SIGTERM
            assert time.monotonic() - began < 1
            error = await failure(streams[-1].collect())
            assert isinstance(error, UnavailableError), error


@on_loop
async def test_grace_that_is_over_ends_what_still_runs(engine_dir: Path) -> None:
    async with serve(engine_dir, "--max-batch-size", "1", "--grace-s", "0.2") as server:
        address = (await server.until("serving"))["address"]
        async with AsyncClient(address, NO_RETRY) as client:
            streams = [client.generate(TokenIds([1]), stopping=LONG) for _ in range(8)]
            for stream in streams:
                await anext(stream)
            server.process.send_signal(signal.SIGTERM)
            error = await failure(streams[-1].collect())
            assert isinstance(error, UnavailableError), error
            assert error.reason is ErrorReason.DRAINING
            assert await server.end() == 0


@on_loop
async def test_port_in_use(engine_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with started(DELTAFLASH, "serve", str(engine_dir), "--port", port) as server:
            assert await server.end() == 4
            assert server.lines[-1].startswith(f"deltaflash: cannot listen on 127.0.0.1:{port}")
            assert not any("serving" in line for line in server.lines)


def damage(engine: Path) -> None:
    weights = engine / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def truncate(engine: Path) -> None:
    weights = engine / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])


def make_newer(engine: Path) -> None:
    edit_json(engine / "manifest.json", lambda manifest: manifest.update(schema_version=2))


def retarget(engine: Path) -> None:
    def edit(manifest: dict[str, object]) -> None:
        manifest["target_arch"] = "sm_90"
        manifest["engine_id"] = engine_id(manifest)

    edit_json(engine / "manifest.json", edit)


def make_foreign(engine: Path) -> None:
    shutil.rmtree(engine)
    engine.mkdir()
    (engine / "rank0.engine").write_bytes(b"ftrt")


REFUSED = [
    (damage, "damaged"),
    (truncate, "bytes"),
    (make_newer, "schema_version 2"),
    (retarget, "sm_90"),
    (make_foreign, "an engine of another program"),
    (shutil.rmtree, "nothing"),
]


@pytest.mark.parametrize(("spoil", "found"), REFUSED, ids=[pair[1] for pair in REFUSED])
def test_engine_that_cannot_be_served(
    engine_dir: Path, tmp_path: Path, spoil: Callable[[Path], None], found: str
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(engine_dir, engine)
    spoil(engine)
    commands = [
        ("serve", str(engine), "--port", "0"),
        ("info", str(engine)),
        ("generate", str(engine), "--prompt", "hi"),
    ]
    # All of them for the fault that only digests show.
    for words in commands if spoil is damage else commands[:1]:
        ran = run(*words)
        assert ran.returncode == 3, ran
        assert not ran.stdout
        # Beside the log, which is JSON and says no more than that a port was taken.
        lines = [line for line in ran.stderr.splitlines() if not line.startswith("{")]
        assert len(lines) == 1, ran.stderr
        assert lines[0].startswith("deltaflash: ")
        assert_one_line(lines[0], found)
        assert "serving" not in ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-num-tokens", "10"], "max_num_tokens"),
        (["--max-batch-size", "600"], "max_num_tokens"),
        (["--max-draft-tokens", "16"], "max_draft_tokens"),
        (["--max-batch-size", "3000000000"], "max_batch_size"),
        (["--max-kv-tokens", str(2**63)], "max_kv_tokens"),
    ],
)
def test_option_that_the_engine_refuses_is_a_usage_error(
    engine_dir: Path, words: list[str], named: str
) -> None:
    """The engine is fine, so no repacking helps: exit code 2, as for any option out of range."""
    commands = [
        ["serve", str(engine_dir), "--port", "0"],
        ["generate", str(engine_dir), "--prompt", "x"],
    ]
    for command in commands if named == "max_draft_tokens" else commands[:1]:
        ran = run(*command, *words)
        assert ran.returncode == 2, ran
        assert named in ran.stderr.splitlines()[-1]
        assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["no/x", "", "pipe", "x" * 300])
def test_ready_file_that_cannot_be_written_is_a_usage_error(
    engine_dir: Path, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")  # as a device: what is no file is neither replaced nor removed
    ran = run("serve", str(engine_dir), "--port", "0", "--ready-file", str(tmp_path / name))
    assert ran.returncode == 2, ran
    assert "ready_file" in ran.stderr.splitlines()[-1]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("closed", ["1", "2", "0 1 2"])
def test_closed_standard_streams(engine_dir: Path, tmp_path: Path, closed: str) -> None:
    ready_file = tmp_path / "ready.json"
    redirections = " ".join(f"{number}>&-" for number in closed.split())
    words = [DELTAFLASH, "serve", str(engine_dir), "--port", "0", "--ready-file", str(ready_file)]
    server = subprocess.Popen(["/bin/sh", "-c", f"exec {shlex.join(words)} {redirections}"])
    try:
        began = time.monotonic()
        while not ready_file.exists():
            assert server.poll() is None
            assert time.monotonic() - began < 20
            time.sleep(0.02)
        server.terminate()
        assert server.wait(10) == 0
    finally:
        server.kill()


def test_info(engine_dir: Path) -> None:
    shown = run("info", str(engine_dir))
    assert shown.returncode == 0, shown
    names = {line.split("  ")[0] for line in shown.stdout.splitlines()}
    read = run("info", "--json", str(engine_dir))
    assert read.returncode == 0, read
    facts = json.loads(read.stdout)
    assert set(facts) == names
    assert facts["model"] == "tiny_qwen3_5"
    assert facts["end_token_ids"] == [504]
    assert (facts["context_length"], facts["vocab_size"]) == (4096, 512)
    assert shown.stderr + read.stderr == ""


@on_loop
async def test_generate_here_and_there(engine_dir: Path) -> None:
    raw = ("generate", "--prompt", PROMPT, "--no-template", "--max-tokens", "20", "--ignore-eos")
    async with serving(engine_dir) as server:
        got = await server.client.generate_text(TokenIds(encode(PROMPT)), stopping=tokens(20))
        here, there, stopped, refused = await asyncio.gather(
            asyncio.to_thread(run, *raw, str(engine_dir), "--threads", "1"),
            asyncio.to_thread(run, *raw, "--target", server.address, "--stats"),
            asyncio.to_thread(run, *raw, "--target", server.address, "--stop", got.text[:2]),
            asyncio.to_thread(
                run, "generate", "--target", server.address, "--prompt", "x", "--max-tokens", "0"
            ),
        )
        for ran in (here, there, stopped):
            assert ran.returncode == 0, ran
        assert here.stdout == there.stdout == got.text + "\n"
        assert here.stderr == ""
        assert f"{len(encode(PROMPT))} + 20 tokens" in there.stderr
        assert stopped.stdout == "\n"
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
        assert refused.stderr.count("stopping.max_tokens") == 1, refused.stderr
        chat = await asyncio.to_thread(
            run, "generate", str(engine_dir), "--prompt", PROMPT, "--max-tokens", "5"
        )
        assert chat.returncode == 0, chat
        await server.until_idle()


@on_loop
async def test_killed_server_ends_streams_and_a_new_one_takes_the_port(engine_dir: Path) -> None:
    async with serve(engine_dir, "--max-batch-size", "1") as server:
        record = await server.until("serving")
        async with AsyncClient(record["address"], NO_RETRY) as client:
            streams = [client.generate(TokenIds([1]), stopping=LONG) for _ in range(6)]
            for stream in streams:
                await anext(stream)
            server.process.kill()
            error = await asyncio.wait_for(failure(streams[-1].collect()), 2)
            assert isinstance(error, UnavailableError), error
            async with serve(engine_dir, "--port", str(record["port"])) as again:
                await again.until("serving")
                await client.wait_until_ready(5)
                asked = client.generate_text(TokenIds([1]), stopping=LONG, timeout_s=0.02)
                assert isinstance(await failure(asked), DeadlineExceededError)

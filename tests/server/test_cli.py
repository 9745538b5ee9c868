"""The command line: options to configurations, exit codes, and answers on stdout."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.app import fake_engine, on_loop, serving
from fakes.backend import FakeBackend

from deltaflash_client import SamplingOptions, StoppingOptions
from server import cli
from server.app import ExitCode
from server.backend import EngineRefusedError
from server.commands.generate import GenerateCommand, answer, generate_with
from server.commands.info import readable
from server.config import MIB
from server.logs import JsonFormatter
from server.service_context import Engine

HELLO = GenerateCommand("hi", SamplingOptions(), StoppingOptions(max_tokens=5), show_stats=True)


@pytest.fixture(autouse=True)
def root_logging() -> Iterator[None]:
    """A command sends all records to the stderr of its test; later tests have another."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_options_reach_the_configurations() -> None:
    words = [
        *("serve", "DIR", "--host", "::1", "--port", "0", "--max-batch-size", "3"),
        *("--max-queue-size", "5", "--max-num-tokens", "99", "--threads", "2"),
        *("--max-rounds-in-flight", "2"),
        *("--max-message-mib", "7", "--grace-s", "4", "--log-level", "DEBUG"),
        *("--max-request-s", "1.5", "--ready-file", "r"),
    ]
    options = cli.make_parser().parse_args(words)
    engine, server = cli.engine_config(options), cli.server_config(options)
    assert (engine.max_batch_size, engine.max_queue_size, engine.max_num_tokens) == (3, 5, 99)
    assert (engine.num_threads, engine.max_rounds_in_flight) == (2, 2)
    assert (server.host, server.port, server.max_message_bytes) == ("::1", 0, 7 * MIB)
    assert (server.grace_s, server.max_request_ms, server.ready_file) == (4, 1500, Path("r"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["serve"],
        ["serve", "DIR", "--port", "99999"],
        ["serve", "DIR", "--max-batch-size", "0"],
        ["serve", "DIR", "--max-kv-tokens", "0"],
        ["serve", "DIR", "--max-request-s", "nan"],
        ["serve", "DIR", "--max-request-s", "1e300"],
        ["serve", "DIR", "--stall-s", "0"],
        ["serve", "DIR", "--stall-s", "1e300"],
        ["serve", "DIR", "--port", "x"],
        ["serve", "DIR", "--max-rounds-in-flight", "3"],
        ["generate", "--prompt", "x"],
        ["generate", "DIR", "--target", "x:1", "--prompt", "x"],
        ["generate", "DIR", "--prompt", "x", "--threads", "-1"],
        ["generate", "--target", "localhost", "--prompt", "x"],
        ["generate", "--target", ":50051", "--prompt", "x"],
        ["generate", "--target", "x:0", "--prompt", "x"],
        ["generate", "--target", "::1:50051", "--prompt", "x"],
    ],
)
def test_usage_errors_have_their_own_exit_code(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("target", ["localhost:50051", "127.0.0.1:1", "[::1]:65535"])
def test_targets(target: str) -> None:
    words = ["generate", "--target", target, "--prompt", "x"]
    assert cli.make_parser().parse_args(words).target == target


def test_generate_from_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    assert generate_with(HELLO, lambda: fake_engine(backend)) is ExitCode.OK
    out, err = capsys.readouterr()
    assert out == "Hello, wörld 🎈.\n"
    assert "5 tokens" in err
    assert backend.closed
    # Laid out as a chat that does not think.
    assert backend.requests[-1].prompt_ids[0] == 256


@on_loop
async def test_generate_from_a_server() -> None:
    async with serving() as served:
        assert await answer(HELLO, served.app.address) is ExitCode.OK
        refused = GenerateCommand("", SamplingOptions(), StoppingOptions(), use_template=False)
        assert await answer(refused, served.app.address) is ExitCode.FAILED


def test_generate_from_a_refused_engine(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Engine:
        raise EngineRefusedError("x: found nothing; needed: an engine; fix: pack one")

    assert generate_with(HELLO, load) is ExitCode.ENGINE_REFUSED
    assert capsys.readouterr() == (
        "",
        "deltaflash: x: found nothing; needed: an engine; fix: pack one\n",
    )


@pytest.mark.parametrize("words", [["info"], ["generate", "--prompt", "x"]])
def test_no_engine_directory_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main([words[0], str(tmp_path / "none"), *words[1:]])
    out, err = capsys.readouterr()
    assert code == ExitCode.ENGINE_REFUSED
    assert (out, err.count("\n")) == ("", 1)


def test_readable() -> None:
    assert readable({"a": None, "b": [1, 2000], "c": True}) == "a -, b 1, 2,000, c yes"


def test_log_records_are_json_lines() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "msg": "request ended", "levelname": "INFO", "request_id": "a\nb", "n": 3}
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["event"], read["request_id"], read["n"]) == ("request ended", "a\nb", 3)


@on_loop
async def test_prompts_stay_out_of_the_log() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(JsonFormatter())
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("server")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        async with serving() as served:
            await served.collect()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    ended = [json.loads(line) for line in lines if "request ended" in line]
    assert len(ended) == 1
    assert ended[0]["outcome"] == "LENGTH"
    assert ended[0]["completion_tokens"] == 5
    assert not any("wörld" in line or '"hi"' in line for line in lines)

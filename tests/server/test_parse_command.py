"""`deltaflash parse`: order, files, exit codes and what people read."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes.app import fake_engine, on_loop, serving
from fakes.backend import SEES, FakeBackend, Script
from fakes.files import encrypted_pdf, pdf, png

from deltaflash_client import PageOptions, StoppingOptions
from server import cli
from server.app import ExitCode
from server.backend import EndCause
from server.commands.local_server import ask_locally
from server.commands.parse import ParseCommand, parse
from server.config import ServerConfig

TEXT = "Hello, wörld 🎈."


@pytest.fixture(autouse=True)
def root_logging() -> Iterator[None]:
    """A command sends all records to the stderr of its test; later tests have another."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "scan.png").write_bytes(png())
    (tmp_path / "two.pdf").write_bytes(pdf("a", "b"))
    (tmp_path / "broken.pdf").write_bytes(pdf("a", "b", "c", broken=(1,)))
    (tmp_path / "locked.pdf").write_bytes(encrypted_pdf())
    (tmp_path / "note.png").write_bytes(b"no picture")
    return tmp_path


async def run(files: Path, *names: str, script: Script | None = None, **fields: object) -> ExitCode:
    command = ParseCommand(tuple(files / name for name in names), PageOptions(), **fields)
    stop = script or Script(cause=EndCause.END_TOKEN, end_token_id=258)
    async with serving(FakeBackend(stop, SEES)) as served:
        return await parse(command, served.app.address)


@on_loop
async def test_one_picture_is_its_text_alone(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(files, "scan.png") is ExitCode.OK
    out, err = capsys.readouterr()
    assert (out, err) == (TEXT + "\n", "")


@on_loop
async def test_pages_come_in_order_with_their_names(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(files, "two.pdf", "scan.png") is ExitCode.OK
    out, err = capsys.readouterr()
    names = [f"{files}/two.pdf, page 1", f"{files}/two.pdf, page 2", f"{files}/scan.png"]
    assert out == "\n".join(f"<!-- {name} -->\n\n{TEXT}\n" for name in names)
    assert err == ""


@on_loop
async def test_a_file_for_each_page(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = files / "new" / "out"
    code = await run(files, "broken.pdf", "scan.png", output_dir=to)
    assert code is ExitCode.PAGES_FAILED
    assert sorted(path.name for path in to.iterdir()) == [
        "broken-0001.md",
        "broken-0003.md",
        "scan.md",
    ]
    assert {path.read_text() for path in to.iterdir()} == {TEXT + "\n"}
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"deltaflash: {files}/broken.pdf, page 2: INVALID_ARGUMENT DOCUMENT_")


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["scan.png", "note.png"], ExitCode.PAGES_FAILED),
        (["scan.png", "locked.pdf"], ExitCode.PAGES_FAILED),
        (["scan.png", "absent.png"], ExitCode.PAGES_FAILED),
        (["note.png", "locked.pdf", "absent.png"], ExitCode.BAD_INPUT),
    ],
)
@on_loop
async def test_exit_codes(
    files: Path, capsys: pytest.CaptureFixture[str], names: list[str], code: ExitCode
) -> None:
    assert await run(files, *names) is code
    out, err = capsys.readouterr()
    assert (TEXT in out) == ("scan.png" in names)
    for name in names[1:]:
        assert f"deltaflash: {files}/{name}: " in err


@on_loop
async def test_a_range_of_pages_and_what_was_cut(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await run(files, "two.pdf", script=Script(), first_page=1, show_stats=True)
    assert code is ExitCode.OK
    out, err = capsys.readouterr()
    assert out == TEXT + "\n"
    cut, stats = err.splitlines()
    assert cut.startswith(f"deltaflash: {files}/two.pdf, page 2: ended by length after 5 tokens")
    assert "vision 1 ms" in stats


@on_loop
async def test_no_server(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ParseCommand((files / "scan.png",), PageOptions())
    assert await parse(command, "127.0.0.1:1") is ExitCode.UNREACHABLE
    assert "UNAVAILABLE" in capsys.readouterr().err


@on_loop
async def test_an_engine_without_vision_says_so(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ParseCommand((files / "scan.png",), PageOptions())
    async with serving() as served:
        assert await parse(command, served.app.address) is ExitCode.FAILED
    assert "FEATURE_UNIMPLEMENTED" in capsys.readouterr().err


@on_loop
async def test_output_that_cannot_be_written_is_named(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = files / "out"
    (to / "scan.md").mkdir(parents=True)
    assert await run(files, "scan.png", output_dir=to) is ExitCode.FAILED
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(to / "scan.md") in err
    assert "scan.png" not in err


def test_interrupt_of_a_local_engine(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ParseCommand((files / "scan.png", files / "two.pdf"), PageOptions())
    stall = Script(step_s=60)
    with pytest.raises(KeyboardInterrupt):
        ask_locally(
            partial(interrupted_parse, command),
            lambda: fake_engine(FakeBackend(stall, SEES)),
            ServerConfig(port=0, grace_s=0),
        )
    assert capsys.readouterr() == ("", "")


async def interrupted_parse(command: ParseCommand, target: str) -> ExitCode:
    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)
    return await parse(command, target)


def test_a_local_engine(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ParseCommand(
        (files / "two.pdf",), PageOptions(stopping=StoppingOptions(max_tokens=1))
    )
    backend = FakeBackend(info=replace(SEES, max_batch_size=2))
    code = ask_locally(
        partial(parse, command), lambda: fake_engine(backend), ServerConfig(port=0, grace_s=0)
    )
    assert code is ExitCode.OK
    assert backend.closed
    assert capsys.readouterr().out.count("Hello\n") == 2


@pytest.mark.parametrize(
    ("text", "pages"),
    [("1", (0, 1)), ("3-7", (2, 5)), ("3-", (2, None)), ("4-4", (3, 1))],
)
def test_ranges(text: str, pages: tuple[int, int | None]) -> None:
    assert cli.page_range(text) == pages


@pytest.mark.parametrize(
    "words",
    [
        ["parse", "x.png"],
        ["parse", "--target", "x:1"],
        ["parse", "--target", "x:1", "--engine", "DIR", "x.png"],
        *(
            ["parse", "--target", "x:1", "x.pdf", "--pages", text]
            for text in ("0", "7-3", "-3", "")
        ),
        ["parse", "--target", "x:1", "a/x.png", "b/x.jpg", "--output-dir", "out"],
        ["parse", "--target", "x:1", "-", "-"],
        ["serve", "DIR", "--decode-workers", "0"],
        ["serve", "DIR", "--max-image-mib", "0"],
        ["serve", "DIR", "--decode-timeout-s", "0"],
        ["serve", "DIR", "--max-parallel-pages", "65"],
    ],
)
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == ExitCode.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1

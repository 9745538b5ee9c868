"""`deltaflash parse`: pictures and PDFs to Markdown, through a server or a local engine."""

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from deltaflash_client import (
    AsyncClient,
    ClientConfig,
    Delta,
    DeltaFlashError,
    DocumentStarted,
    Finished,
    FinishReason,
    GenerationEvent,
    Image,
    InvalidArgumentError,
    PageEvent,
    PageFailed,
    PageOptions,
    Pdf,
    Progress,
    UnavailableError,
)
from server.app import ExitCode, write_whole
from server.backends.executor import load_engine
from server.commands.local_server import ask_locally
from server.commands.serve import run_loop
from server.config import MIB, EngineConfig, ServerConfig

MAX_MESSAGE_BYTES = 512 * MIB
FILES_AT_ONCE = 4
PDF_SIGNATURE_BYTES = 1024
"""Readers of PDF look for its signature among so many bytes."""


@dataclass(frozen=True, slots=True)
class ParseCommand:
    """What to parse.

    Attributes:
        files: The files in the order of the output; "-" reads stdin.
        options: How pages are read.
        output_dir: Gets a file for each page; None writes to stdout.
        first_page: First page of PDFs, from 0.
        num_pages: Pages of PDFs to read; None reads to the end.
        dpi: Resolution of PDFs; None is the server's.
        timeout_s: Longest time for one file; None has no limit.
        show_stats: Write tokens and times of each page to stderr.
    """

    files: tuple[Path, ...]
    options: PageOptions
    output_dir: Path | None = None
    first_page: int = 0
    num_pages: int | None = None
    dpi: int | None = None
    timeout_s: float | None = None
    show_stats: bool = False

    def __post_init__(self) -> None:
        """Refuses stdin twice, and files whose pages would be written to the same file."""
        if self.files.count(Path("-")) > 1:
            raise ValueError("FILE: stdin can be read once, got - more than once")
        if self.output_dir is None:
            return
        stems = Counter(path.stem for path in self.files)
        doubled = [str(path) for path in self.files if stems[path.stem] > 1]
        if doubled:
            raise ValueError(f"--output-dir: {', '.join(doubled)} would write the same files")


def parse_remote(command: ParseCommand, target: str) -> ExitCode:
    """Asks a server."""
    return run_loop(partial(parse, command, target))


def parse_local(command: ParseCommand, engine_dir: Path, engine_config: EngineConfig) -> ExitCode:
    """Loads an engine directory for these files."""
    config = ServerConfig(
        port=0, grace_s=0, max_message_bytes=MAX_MESSAGE_BYTES, max_parallel_pages=8
    )
    load = partial(load_engine, engine_dir, engine_config, 1)
    return ask_locally(partial(parse, command), load, config)


@dataclass(slots=True)
class PageText:
    """A page on its way to its reader."""

    path: Path
    index: int | None
    parts: list[str]
    phase: str = ""
    ended: bool = False
    last: str = ""

    @property
    def name(self) -> str:
        """The page as people call it: counted from 1."""
        name = "stdin" if str(self.path) == "-" else str(self.path)
        return name if self.index is None else f"{name}, page {self.index + 1}"


class Output:
    """Where pages go: each to its file once it is whole, or all to stdout in their order.

    On stdout the page whose turn it is streams; those behind it wait.
    """

    def __init__(self, output_dir: Path | None, num_files: int) -> None:
        """Takes the folder, None for stdout, and how many files there are."""
        self._output_dir = output_dir
        self._pages: list[list[PageText]] = [[] for _ in range(num_files)]
        self._ended_files = [False] * num_files
        self._with_names = num_files > 1
        self._at = (0, 0)
        self._num_written = 0
        to_terminal = output_dir is None and sys.stdout.isatty()
        # Text and bar on one terminal would write over each other.
        self._bar = tqdm(
            unit="page",
            total=0,
            disable=to_terminal or not sys.stderr.isatty(),
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def say(self, line: str) -> None:
        """Writes a line to stderr, above the bar."""
        tqdm.write(f"deltaflash: {line}", file=sys.stderr)

    def begin(self, number: int, pages: list[PageText]) -> None:
        """Takes the pages of a file; `number` is its place among the files."""
        self._pages[number] = pages
        self._with_names |= len(pages) > 1
        self._bar.total = (self._bar.total or 0) + len(pages)
        self._bar.refresh()

    def add(self, page: PageText, text: str) -> None:
        """Takes text of a page."""
        page.parts.append(text)
        self._flush()

    def show(self, page: PageText, progress: Progress) -> None:
        """Takes what a page is doing."""
        page.phase = progress.phase.value
        phases = Counter(
            other.phase
            for pages in self._pages
            for other in pages
            if other.phase and not other.ended
        )
        self._bar.set_postfix_str(", ".join(f"{n} {phase}" for phase, n in phases.items()))

    def end(self, page: PageText, *, whole: bool) -> None:
        """Ends a page; one that failed leaves no file."""
        page.ended = True
        self._bar.update()
        if self._output_dir is not None and whole:
            number = "" if page.index is None else f"-{page.index + 1:04d}"
            name = "stdin" if str(page.path) == "-" else page.path.stem
            text = "".join(page.parts)
            write_whole(self._output_dir / f"{name}{number}.md", text.rstrip("\n") + "\n")
            page.parts.clear()
        self._flush()

    def end_file(self, number: int) -> None:
        """Ends a file: what of its pages has no end yet gets none."""
        for page in self._pages[number]:
            page.ended = True
        self._ended_files[number] = True
        self._flush()

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()

    def _flush(self) -> None:
        if self._output_dir is not None:
            return
        number, place = self._at
        while number < len(self._pages):
            pages = self._pages[number]
            if place == len(pages):
                if not self._ended_files[number]:
                    break
                number, place = number + 1, 0
                continue
            page = pages[place]
            self._write(page)
            if not page.ended:
                break
            if page.last not in {"", "\n"}:
                sys.stdout.write("\n")
            place += 1
        self._at = (number, place)
        sys.stdout.flush()

    def _write(self, page: PageText) -> None:
        text = "".join(page.parts)
        if not text:
            return
        if not page.last:
            if self._num_written:
                sys.stdout.write("\n")
            if self._with_names:
                sys.stdout.write(f"<!-- {page.name} -->\n\n")
            self._num_written += 1
        sys.stdout.write(text)
        page.last = text[-1]
        page.parts.clear()


class Run:
    """The files of one command on their way through a server."""

    def __init__(self, command: ParseCommand, client: AsyncClient, output: Output) -> None:
        """Takes what to parse, who does it, and where it goes."""
        self._command = command
        self._client = client
        self._output = output
        self._turn = asyncio.Semaphore(FILES_AT_ONCE)
        self.num_read = 0
        self.num_failed = 0
        self.errors: list[DeltaFlashError] = []

    async def all(self) -> None:
        """Parses every file."""
        files = self._command.files
        tasks = [
            asyncio.ensure_future(self._file(number, path)) for number, path in enumerate(files)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _file(self, number: int, path: Path) -> None:
        try:
            async with self._turn:
                try:
                    data = await asyncio.to_thread(read_file, path)
                except OSError as error:
                    self._fail(f"{path}: {error.strerror or error}")
                    return
                if b"%PDF" in data[:PDF_SIGNATURE_BYTES]:
                    await self._pdf(number, path, data)
                else:
                    await self._picture(number, path, data)
        except DeltaFlashError as error:
            self.errors.append(error)
            self._fail(f"{path}: {error}")
        finally:
            self._output.end_file(number)

    def _fail(self, line: str) -> None:
        self.num_failed += 1
        self._output.say(line)

    async def _picture(self, number: int, path: Path, data: bytes) -> None:
        page = PageText(path, None, [])
        self._output.begin(number, [page])
        async with self._client.parse_page(
            Image(data), self._command.options, timeout_s=self._command.timeout_s
        ) as stream:
            async for event in stream:
                self._page_event(page, event)

    async def _pdf(self, number: int, path: Path, data: bytes) -> None:
        command = self._command
        pdf = Pdf(data, command.first_page, command.num_pages, command.dpi)
        async with self._client.parse_document(
            pdf, options=command.options, timeout_s=command.timeout_s
        ) as stream:
            pages: list[PageText] = []
            async for event in stream:
                if isinstance(event, DocumentStarted):
                    begin = command.first_page
                    pages = [
                        PageText(path, index, []) for index in range(begin, begin + event.num_pages)
                    ]
                    self._output.begin(number, pages)
                elif isinstance(event, PageEvent):
                    self._page_event(pages[event.page_index - command.first_page], event.event)

    def _page_event(self, page: PageText, event: GenerationEvent | PageFailed) -> None:
        match event:
            case Delta():
                self._output.add(page, event.text)
            case Progress():
                self._output.show(page, event)
            case PageFailed(error):
                self.errors.append(error)
                self._output.end(page, whole=False)
                self._fail(f"{page.name}: {error}")
            case Finished():
                self._output.end(page, whole=True)
                self.num_read += 1
                if event.finish_reason in {FinishReason.LENGTH, FinishReason.REPETITION}:
                    tokens = event.usage.completion_tokens
                    self._output.say(
                        f"{page.name}: ended by {event.finish_reason} after {tokens} tokens, "
                        "the text may be incomplete"
                    )
                if self._command.show_stats:
                    self._output.say(f"{page.name}: {page_summary(event)}")

    def exit_code(self) -> ExitCode:
        """Returns how the command ends."""
        if any(isinstance(error, UnavailableError) for error in self.errors):
            return ExitCode.UNREACHABLE
        if not self.num_failed:
            return ExitCode.OK
        if self.num_read:
            return ExitCode.PAGES_FAILED
        if all(isinstance(error, InvalidArgumentError) for error in self.errors):
            return ExitCode.BAD_INPUT
        return ExitCode.FAILED


async def parse(command: ParseCommand, target: str) -> ExitCode:
    """Parses the files of a command through a server."""
    output = Output(command.output_dir, len(command.files))
    try:
        if command.output_dir is not None:
            command.output_dir.mkdir(parents=True, exist_ok=True)
        config = ClientConfig(max_message_bytes=MAX_MESSAGE_BYTES)
        async with AsyncClient(target, config) as client:
            run = Run(command, client, output)
            await run.all()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Of the output: those of the input are told file by file.
        where = error.filename2 or error.filename or command.output_dir or "stdout"
        output.say(f"{where}: {error.strerror or error}")
        return ExitCode.FAILED
    finally:
        output.close()
    return run.exit_code()


def read_file(path: Path) -> bytes:
    """Returns a file's bytes; "-" is stdin.

    Raises:
        OSError: It cannot be read.
    """
    return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()


def page_summary(finished: Finished) -> str:
    """Returns tokens and times of a page in one line."""
    usage, stats = finished.usage, finished.stats
    times = {
        "queue": stats.queue_us,
        "preprocess": stats.preprocess_us,
        "vision": stats.vision_us,
        "prefill": stats.prefill_us,
        "decode": stats.decode_us,
        "total": stats.total_us,
    }
    spent = ", ".join(f"{name} {us / 1000:.0f} ms" for name, us in times.items())
    return (
        f"{usage.image_tokens} of {usage.prompt_tokens} prompt tokens are picture, "
        f"{usage.completion_tokens} tokens; {spent}"
    )

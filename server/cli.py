"""The command line, `deltaflash`."""

import argparse
import dataclasses
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import server
from deltaflash_client import PageOptions, SamplingOptions, StoppingOptions
from server.app import ExitCode
from server.commands.generate import GenerateCommand, generate_local, generate_remote
from server.commands.info import show_info
from server.commands.parse import ParseCommand, parse_local, parse_remote
from server.commands.serve import serve
from server.config import DEVICES, MAX_INT32, MAX_TIME_S, MIB, EngineConfig, ServerConfig
from server.images.limits import ImageLimits

INTERRUPTED = 130
MAX_PORT = 65535

EXIT_CODES = """\
exit codes:
  0  done, or stopped by a signal
  1  failed: the request, or a fault of the program
  2  usage: an option that does not parse or is out of range
  3  the engine directory cannot be served; stderr names what was found, what is needed, the fix
  4  the address cannot be listened on
  5  the engine was lost; a supervisor should start the server again
  6  parse: some pages were read, others were not; stderr names each
  7  parse: no page was read, and the files are at fault
  8  parse: the server cannot be reached, or ended
"""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the words."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        line = " ".join(message.split())
        self.exit(ExitCode.USAGE, f"{self.prog}: {line}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words after the program's name; None takes those of the process.

    Returns:
        The exit code. `serve` does not return: it ends the process itself.
    """
    open_standard_streams()
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        # A frozen configuration refused a value.
        parser.error(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; keep the exit from flushing into it.
        sys.stderr.close()
        return ExitCode.FAILED


def open_standard_streams() -> None:
    """Gives stdin, stdout and stderr that were closed a reader and writer of nothing.

    Else the next sockets get their numbers, which uvloop refuses to close.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command.

    Raises:
        ValueError: An option is out of range.
    """
    if options.command == "serve":
        serve(options.engine_dir, engine_config(options), server_config(options))
    if options.command == "info":
        return show_info(options.engine_dir, as_json=options.json)
    if options.command == "parse":
        parse_command = make_parse_command(options)
        if options.target is not None:
            return parse_remote(parse_command, options.target)
        return parse_local(parse_command, options.engine, engine_config(options))
    command = generate_command(options)
    if options.target is not None:
        return generate_remote(command, options.target)
    return generate_local(command, options.engine_dir, engine_config(options))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog="deltaflash",
        description="Serves an engine directory over gRPC.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"deltaflash {server.VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_serve(commands.add_parser("serve", help="serve an engine directory"))
    add_generate(commands.add_parser("generate", help="generate one answer"))
    add_parse(commands.add_parser("parse", help="turn pictures and PDFs into Markdown"))
    info = commands.add_parser("info", help="show what an engine directory holds")
    info.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `serve`; each is named after a field of a configuration."""
    default = ServerConfig()
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    add = parser.add_argument
    add("--host", default=default.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=default.port, help="0 lets the system choose (%(default)s)")
    add_engine_options(parser)
    add(
        "--max-message-mib",
        type=int,
        default=default.max_message_bytes // MIB,
        help="largest request or response (%(default)s)",
    )
    add(
        "--max-request-s",
        type=float,
        help="longest time of one request, waiting included (no limit)",
    )
    add(
        "--grace-s",
        type=float,
        default=default.grace_s,
        help="time for running requests after SIGTERM (%(default)s)",
    )
    add(
        "--write-timeout-s",
        type=float,
        default=default.write_timeout_s,
        help="time after which a stream that nobody reads is ended (%(default)s)",
    )
    add(
        "--warmup-timeout-s",
        type=float,
        default=default.warmup_timeout_s,
        help="time for the first generation (%(default)s)",
    )
    add(
        "--repetition-guard",
        action="store_true",
        help="end answers that repeat themselves, where a request does not say",
    )
    add(
        "--min-keepalive-ms",
        type=int,
        default=default.min_keepalive_ms,
        help="shortest time between pings of a client (%(default)s)",
    )
    add_image_options(parser)
    add(
        "--log-level",
        default=default.log_level,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="(%(default)s)",
    )
    add("--ready-file", type=Path, help="gets the address as JSON once the server serves")


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `serve` allows pictures and documents."""
    default = ServerConfig()
    limits = default.images
    for name, value, text in (
        ("--max-image-mib", limits.max_bytes // MIB, "largest file of a picture"),
        ("--max-source-pixels", limits.max_pixels, "most pixels of a picture as it is sent"),
        ("--max-images", default.max_images, "most pictures of a chat"),
        ("--max-document-mib", limits.max_document_bytes // MIB, "largest file of a PDF"),
        ("--max-document-pages", limits.max_pages, "most pages of a document"),
        ("--max-parallel-pages", default.max_parallel_pages, "most pages of one in the engine"),
        ("--decode-workers", default.decode_workers, "processes that decode pictures"),
        ("--decode-memory-mib", limits.memory_bytes // MIB, "address space of each"),
        (
            "--max-held-images-mib",
            default.max_held_image_bytes // MIB,
            "memory for the pictures of all requests",
        ),
    ):
        parser.add_argument(name, type=int, default=value, help=f"{text} (%(default)s)")
    parser.add_argument(
        "--decode-timeout-s",
        type=float,
        default=limits.decode_timeout_s,
        help="time to decode a picture or render a page (%(default)s)",
    )


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `generate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("engine_dir", type=Path, nargs="?", metavar="ENGINE_DIR")
    source.add_argument(
        "--target",
        type=target_address,
        metavar="HOST:PORT",
        help="a server, in place of an engine directory",
    )
    add = parser.add_argument
    add("--prompt", required=True, help='the prompt; "-" reads stdin')
    add("--max-tokens", type=int, help="most tokens to generate")
    add("--temperature", type=float, help="0, the default, is greedy")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--seed", type=int, help="makes sampling repeatable")
    add("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="end tokens do not end the answer")
    add("--no-template", action="store_true", help="the prompt as it is, not laid out as a chat")
    add("--thinking", action="store_true", help="let the model think before it answers")
    add("--timeout-s", type=float, help="longest time for the answer")
    add("--stats", action="store_true", help="finish reason, tokens and times on stderr")
    add_engine_options(parser)


def add_parse(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `parse`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine", type=Path, metavar="ENGINE_DIR", help="an engine directory")
    source.add_argument("--target", type=target_address, metavar="HOST:PORT", help="a server")
    add = parser.add_argument
    add(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help='PNG, JPEG, WebP, TIFF, BMP, GIF or PDF; "-" reads stdin',
    )
    add(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="one file a page, NAME.md or NAME-0001.md, in place of stdout",
    )
    add("--pages", type=page_range, default=(0, None), help="of PDFs: 3, 3-7 or 3- (all)")
    add("--dpi", type=int, help="resolution of PDFs, 36 to 600 (144)")
    add("--max-tokens", type=int, help="most tokens of a page")
    add("--max-pixels", type=int, help="pictures are reduced to so many pixels")
    add("--instruction", help="what the model is told to do with a page (the engine's)")
    add("--timeout-s", type=float, help="longest time for one file")
    add("--stats", action="store_true", help="tokens and times of each page on stderr")
    add_engine_options(parser)


def page_range(value: str) -> tuple[int, int | None]:
    """Returns the first page, from 0, and the number of pages, None for all that follow.

    Raises:
        ArgumentTypeError: It is no range of pages, which count from 1.
    """
    first, dash, last = value.partition("-")
    numbers = [first, last] if last else [first]
    if not all(n.isascii() and n.isdecimal() and 0 < int(n) <= MAX_INT32 for n in numbers):
        raise argparse.ArgumentTypeError(f"expected pages such as 3, 3-7 or 3-, got {value!r}")
    begin = int(first)
    end = int(last) if last else begin
    if end < begin:
        raise argparse.ArgumentTypeError(f"the last page comes before the first: {value!r}")
    return begin - 1, None if dash and not last else end - begin + 1


def make_parse_command(options: argparse.Namespace) -> ParseCommand:
    """Returns what to parse.

    Raises:
        ValueError: Two files would be written to one.
    """
    first_page, num_pages = options.pages
    return ParseCommand(
        files=tuple(options.files),
        options=PageOptions(
            instruction=options.instruction,
            max_pixels=options.max_pixels,
            stopping=StoppingOptions(max_tokens=options.max_tokens),
        ),
        output_dir=options.output_dir,
        first_page=first_page,
        num_pages=num_pages,
        dpi=options.dpi,
        timeout_s=options.timeout_s,
        show_stats=options.stats,
    )


def target_address(value: str) -> str:
    """Returns the address of a server as it is; an IPv6 one has brackets.

    Raises:
        ArgumentTypeError: It has no host or no port.
    """
    host, _, port = value.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    good = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    if not host or bare or not good:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {value!r}")
    return value


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `EngineConfig`; only a local engine heeds them."""
    default = EngineConfig()
    parser.add_argument(
        "--device", choices=DEVICES, default=default.device, help="where it runs (%(default)s)"
    )
    helps = {
        "max_batch_size": "requests that run at once",
        "max_queue_size": "requests that may wait beyond those",
        "max_num_tokens": "token budget of one step",
        "max_prefill_chunk": "longest piece of a prompt in one step",
        "max_kv_tokens": "size of the KV pool, tokens",
        "default_max_tokens": "length of an answer that names none",
        "max_draft_tokens": "draft tokens in one round, 0 drafts nothing",
        "max_rounds_in_flight": "rounds launched before the first is read, 1 or 2",
        "threads": "threads of the CPU backend, 0 takes all cores",
        "max_image_pixels": "largest picture that the model reads, pixels",
    }
    for name, text in helps.items():
        value = getattr(default, "num_threads" if name == "threads" else name)
        shown = "the executor's choice" if value is None else "%(default)s"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=value, help=f"{text} ({shown})")
    parser.add_argument(
        "--encoder-cache-mib",
        type=int,
        default=0,
        help="memory for encoded pictures that come again (%(default)s)",
    )
    parser.add_argument(
        "--stall-s",
        type=float,
        default=default.stall_s,
        help="an engine without progress for so long counts as lost (%(default)s)",
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Returns the engine's configuration.

    Raises:
        ValueError: A value is out of range.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    names -= {"num_threads", "encoder_cache_bytes"}
    values = {name: getattr(options, name) for name in names}
    return EngineConfig(
        num_threads=options.threads,
        encoder_cache_bytes=options.encoder_cache_mib * MIB,
        **values,
    )


def server_config(options: argparse.Namespace) -> ServerConfig:
    """Returns the server's configuration.

    Raises:
        ValueError: A value is out of range.
    """
    limit_s: float | None = options.max_request_s
    if limit_s is not None and not 0 < limit_s <= MAX_TIME_S:
        raise ValueError(
            f"max_request_s: expected more than 0 and at most 1e9 seconds, got {limit_s}"
        )
    if options.ready_file is not None:
        check_ready_file(options.ready_file)
    return ServerConfig(
        host=options.host,
        port=options.port,
        max_message_bytes=options.max_message_mib * MIB,
        min_keepalive_ms=options.min_keepalive_ms,
        grace_s=options.grace_s,
        write_timeout_s=options.write_timeout_s,
        warmup_timeout_s=options.warmup_timeout_s,
        repetition_guard=options.repetition_guard,
        max_request_ms=None if limit_s is None else max(1, round(limit_s * 1000)),
        images=ImageLimits(
            max_bytes=options.max_image_mib * MIB,
            max_pixels=options.max_source_pixels,
            max_document_bytes=options.max_document_mib * MIB,
            max_pages=options.max_document_pages,
            decode_timeout_s=options.decode_timeout_s,
            memory_bytes=options.decode_memory_mib * MIB,
        ),
        decode_workers=options.decode_workers,
        max_images=options.max_images,
        max_parallel_pages=options.max_parallel_pages,
        max_held_image_bytes=options.max_held_images_mib * MIB,
        log_level=options.log_level,
        ready_file=options.ready_file,
    )


def check_ready_file(path: Path) -> None:
    """Refuses a ready file that cannot be one; a device must be neither replaced nor removed.

    Raises:
        ValueError: The folder does not exist, or something other than a file has the name.
    """
    try:
        good = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        good = path.parent.is_dir()
    except OSError:
        good = False
    if not good:
        raise ValueError(f"ready_file: expected a file in a folder that exists, got {path}")


def generate_command(options: argparse.Namespace) -> GenerateCommand:
    """Returns what to generate."""
    return GenerateCommand(
        prompt=sys.stdin.read() if options.prompt == "-" else options.prompt,
        sampling=SamplingOptions(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        ),
        stopping=StoppingOptions(
            max_tokens=options.max_tokens,
            stop_strings=options.stop,
            ignore_eos=options.ignore_eos or None,
        ),
        use_template=not options.no_template,
        thinking=options.thinking,
        timeout_s=options.timeout_s,
        show_stats=options.stats,
    )

"""The command `build_engine`.

Exit codes: 0 done, 2 wrong usage, 3 the checkpoint cannot be used, 4 the output cannot be written
(disk, permissions, lock, what stands there), 130 interrupted. An error is one line on stderr.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from build_engine.errors import CheckpointError, OutputError
from build_engine.pack import PackedEngine, PackOptions, is_valid_name, pack
from runtime.errors import refusal

EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_OUTPUT = 4
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        The exit code.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        created = _created(os.environ.get("SOURCE_DATE_EPOCH"))
    except ValueError as error:
        parser.error(str(error))
    try:
        with _Bar() as bar:
            options = PackOptions(created, name=arguments.name, force=arguments.force)
            engine = pack(arguments.hf_dir, arguments.out, options, bar.update)
    except CheckpointError as error:
        return _fail(EXIT_CHECKPOINT, str(error))
    except OutputError as error:
        return _fail(EXIT_OUTPUT, str(error))
    except OSError as error:
        parent = shlex.quote(str(arguments.out.absolute().parent))
        line = refusal(
            arguments.out,
            f"{error.strerror or error} (the target is as it was)",
            "a disk that takes the engine",
            f"df -h {parent}, then run again",
        )
        return _fail(EXIT_OUTPUT, line)
    except KeyboardInterrupt:
        return _fail(EXIT_INTERRUPTED, f"{arguments.out}: interrupted; the target is as it was")
    sys.stdout.write(_summary(engine))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="build_engine", description="Makes engine directories for DeltaFlash.")
    parser.add_argument(
        "--version", action="version", version=f"build_engine {metadata.version('deltaflash')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    packing = commands.add_parser(
        "pack",
        help="make an engine directory from a Hugging Face checkpoint",
        description="Makes an engine directory for the CPU backend. The target appears whole or "
        "not at all.",
        epilog="exit codes: 0 done, 2 wrong usage, 3 the checkpoint cannot be used, 4 the output "
        "cannot be written. SOURCE_DATE_EPOCH sets the time of creation in the manifest.",
    )
    packing.add_argument("hf_dir", metavar="HF_DIR", type=Path, help="checkpoint directory")
    packing.add_argument("out", metavar="OUT", type=Path, help="engine directory to make")
    packing.add_argument("--name", type=_name, help="name of the model (default: that of HF_DIR)")
    packing.add_argument("--force", action="store_true", help="replace an engine that is there")
    return parser


def _name(value: str) -> str:
    if not is_valid_name(value):
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a name of letters, digits, dots, dashes and underscores"
        )
    return value


def _created(epoch: str | None) -> str:
    if epoch is None:
        return datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return datetime.fromtimestamp(int(epoch), UTC).isoformat()
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"SOURCE_DATE_EPOCH must be seconds since 1970, got {epoch!r}") from error


class _Bar:
    """A progress bar on stderr where that is a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._bar = tqdm(
            total=0, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False
        )

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)


def _fail(code: int, message: str) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"build_engine: {line}\n")
    return code


def _summary(engine: PackedEngine) -> str:
    manifest, config = engine.manifest, engine.program.config
    files = manifest.files
    lines = [
        ("engine", str(engine.path)),
        ("engine_id", f"sha256:{manifest.engine_id}"),
        (
            "model",
            f"{manifest.model.name} ({manifest.model.architecture}): {config.num_layers} layers, "
            f"{config.num_gdn_layers} GDN + {config.num_attention_layers} attention, vocabulary "
            f"{config.vocab_size}, context {config.context_len}",
        ),
        *(
            [("vision", f"{vision.depth} blocks, pictures of at most {vision.max_pixels} pixels")]
            if (vision := config.vision)
            else []
        ),
        ("target", f"{manifest.target_arch}, KV cache {manifest.kv_dtype}"),
        ("files", f"{len(files)}, {_size(sum(entry.bytes for entry in files.values()))}"),
        *((path, _size(entry.bytes)) for path, entry in files.items()),
        *(
            ("left out", f"{group}: {dropped.tensors} tensors, {_size(dropped.bytes)}")
            for group, dropped in manifest.dropped.items()
        ),
        *(("note", note) for note in engine.notes),
    ]
    width = max(len(label) for label, _ in lines)
    return "".join(f"{label:<{width}}  {value}\n" for label, value in lines)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"

"""`build_engine pack`: a Hugging Face checkpoint becomes an engine directory."""

import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from build_engine.checkpoint import INDEX, Checkpoint, open_checkpoint
from build_engine.errors import CheckpointError, OutputError
from build_engine.program import build_program, program_faults
from build_engine.staging import StagedFile, Target
from build_engine.tokenizer import TextFiles, read_text_files
from build_engine.weights import (
    PackedTensor,
    converted_sources,
    packed_tensors,
    weights_bytes,
    weights_chunks,
)
from runtime.engine_directory import (
    CHAT_TEMPLATE,
    GENERATION,
    MANIFEST,
    PREPROCESSOR,
    PROGRAM,
    SCHEMA_VERSION,
    TOKENIZER,
    VOCABULARY,
    WEIGHTS,
    FileEntry,
    Manifest,
    engine_id,
    hash_file,
    open_engine,
)
from runtime.errors import EngineError, refusal
from runtime.program import Program
from runtime.vocabulary import write_vocabulary

TARGET = "cpu"
KV_DTYPE = "float32"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ENTRIES = {MANIFEST, PROGRAM, "weights", TOKENIZER, VOCABULARY, CHAT_TEMPLATE, PREPROCESSOR,
            GENERATION}  # fmt: skip
_SMALL_FILES_BYTES = 64 << 20  # room for everything but the weights

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class PackOptions:
    """What else `pack` is told.

    Attributes:
        created: Time of creation, ISO 8601; goes into the manifest as it is.
        name: The model's name; that of the checkpoint directory if None.
        force: Replace an engine that is there.
    """

    created: str
    name: str | None = None
    force: bool = False


@dataclass(frozen=True)
class PackedEngine:
    """What `pack` made.

    Attributes:
        path: The engine directory.
        manifest: Its manifest.
        program: Its program.
        notes: What a reader of the build log should know.
    """

    path: Path
    manifest: Manifest
    program: Program
    notes: tuple[str, ...]


def is_valid_name(name: str) -> bool:
    """Whether a model may have this name: letters, digits, dot, dash, underscore; 128 at most."""
    return _NAME.fullmatch(name) is not None


def pack(
    checkpoint_dir: Path,
    out: Path,
    options: PackOptions,
    progress: Progress | None = None,
) -> PackedEngine:
    """Makes an engine directory for the CPU backend.

    Args:
        checkpoint_dir: A Hugging Face checkpoint of the qwen3_5 family.
        out: Where the engine shall appear.
        options: The rest of the command line.
        progress: Called while weights are written, sources are hashed and the result is verified.

    Returns:
        What was made.

    Raises:
        CheckpointError: No engine can be made from the checkpoint.
        OutputError: The directory cannot be written.
        OSError: The disk failed or is full; the target is as it was before.
    """
    target = Target(out)
    source = checkpoint_dir.resolve()
    if source == target.path.resolve() or target.path.resolve() in source.parents:
        raise OutputError(
            refusal(out, "the checkpoint itself", "another place", "name a directory outside of it")
        )
    with target.locked():
        _check_replaceable(target, force=options.force)
        checkpoint = open_checkpoint(checkpoint_dir)
        text = read_text_files(checkpoint_dir, checkpoint.config)
        with target.staging() as staging:
            packer = _Packer(checkpoint, text, staging, progress)
            packer.check_room()
            manifest = packer.write(options.name or default_name(checkpoint_dir), options.created)
            engine = _verified(staging, packer)
            target.publish(staging)
    return PackedEngine(target.path, manifest, engine, packer.notes())


def default_name(checkpoint_dir: Path) -> str:
    """The directory's name, other characters than a model's name may have replaced by dashes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", checkpoint_dir.resolve().name).lstrip("._-")[:128]
    return name or "model"


def _check_replaceable(target: Target, *, force: bool) -> None:
    path = target.path
    if not path.exists():
        return
    if not path.is_dir():
        raise OutputError(refusal(path, "a file", "a free path", "name another path or remove it"))
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return
    if not (names <= _ENTRIES or _has_manifest(path)):
        raise OutputError(
            refusal(path, "a directory that is no engine", "a free path", "name another path")
        )
    if not force:
        raise OutputError(
            refusal(
                path,
                "an engine",
                "a free path",
                f"build_engine pack HF_DIR {shlex.quote(str(path))} --force",
            )
        )


def _has_manifest(path: Path) -> bool:
    try:
        raw = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and "engine_id" in raw


def _verified(staging: Path, packer: "_Packer") -> Program:
    """Opens what was written, as the server will; a fault here is one of build_engine."""
    try:
        engine = open_engine(staging, "digest", packer.verified)
    except EngineError as error:
        raise OutputError(f"the engine does not open: {error}") from error
    weights = {tensor.name: tensor.info for tensor in packer.tensors}
    faults = program_faults(engine.program, weights)
    if faults:
        raise OutputError(f"the program does not fit the weights: {'; '.join(faults[:4])}")
    return engine.program


class _Packer:
    def __init__(
        self, checkpoint: Checkpoint, text: TextFiles, staging: Path, progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.text = text
        self.staging = staging
        self.tensors: list[PackedTensor] = packed_tensors(checkpoint.config)
        self._files: dict[str, FileEntry] = {}
        self._progress = progress
        self._done = 0
        self._sources = ["config.json", *text.sources, *checkpoint.files]
        if (checkpoint.path / INDEX).exists():
            self._sources.append(INDEX)
        source_bytes = sum((checkpoint.path / name).stat().st_size for name in self._sources)
        # the weights are written once and read once more by the verification
        self._total = source_bytes + 2 * weights_bytes(self.tensors)

    def check_room(self) -> None:
        needed = weights_bytes(self.tensors) + _SMALL_FILES_BYTES
        free = shutil.disk_usage(self.staging).free
        if free < needed:
            raise OutputError(
                refusal(
                    self.staging.parent,
                    f"{free} bytes free",
                    f"{needed} bytes for the engine",
                    f"df -h {shlex.quote(str(self.staging.parent))}, then free some space",
                )
            )

    def write(self, name: str, created: str) -> Manifest:
        sources = self._hash_sources()
        (self.staging / WEIGHTS).parent.mkdir()
        self._write_weights()
        self._write(
            PROGRAM, _json_bytes(build_program(self.checkpoint.config, self.text.preprocessor))
        )
        self._write(TOKENIZER, self.text.tokenizer)
        self._write_vocabulary()
        self._write(GENERATION, _json_bytes(self.text.generation))
        if self.text.chat_template is not None:
            self._write(CHAT_TEMPLATE, self.text.chat_template.encode())
        if self.text.preprocessor is not None:
            self._write(PREPROCESSOR, _json_bytes(self.text.preprocessor.model_dump()))
        return self._write_manifest(name, created, sources)

    def verified(self, done: int, total: int) -> None:
        if self._progress is not None:
            share = weights_bytes(self.tensors) * done // total
            self._progress(self._done + share, self._total)

    def notes(self) -> tuple[str, ...]:
        converted = converted_sources(self.checkpoint, self.tensors)
        return (
            *self.checkpoint.notes,
            *(
                f"{count} {dtype} matrices were rounded to BF16 (to nearest, ties to even)"
                for dtype, count in sorted(converted.items())
            ),
        )

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _hash_sources(self) -> dict[str, FileEntry]:
        entries = {}
        for name in sorted(self._sources):
            path = self.checkpoint.path / name
            try:
                num_bytes = path.stat().st_size
                entries[name] = FileEntry(sha256=hash_file(path, self._advance), bytes=num_bytes)
            except OSError as error:
                found = str(error.strerror or error)
                raise CheckpointError(
                    refusal(path, found, "a readable file", "download the checkpoint again")
                ) from error
        return entries

    def _write_weights(self) -> None:
        with StagedFile(self.staging / WEIGHTS) as file:
            for chunk in weights_chunks(self.checkpoint, self.tensors):
                file.write(chunk.data)
                self._advance(len(chunk))
        self._files[WEIGHTS] = file.entry()

    def _write(self, name: str, data: bytes) -> None:
        with StagedFile(self.staging / name) as file:
            file.write(data)
        self._files[name] = file.entry()

    def _write_vocabulary(self) -> None:
        path = self.staging / VOCABULARY
        table = self.text.vocabulary
        write_vocabulary(path, table.tokens, table.special_ids, table.unused_ids)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        self._files[VOCABULARY] = FileEntry(sha256=hash_file(path), bytes=path.stat().st_size)

    def _write_manifest(self, name: str, created: str, sources: dict[str, FileEntry]) -> Manifest:
        config = self.checkpoint.config
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "architecture": config.architecture,
                "name": name,
                "config": config.raw,
                "sources": {path: entry.model_dump() for path, entry in sources.items()},
            },
            "precision": _precision(self.checkpoint),
            "kv_dtype": KV_DTYPE,
            "target_arch": TARGET,
            "dropped": {
                group: {
                    "prefix": prefix,
                    "tensors": len(tensors),
                    "bytes": sum(tensor.num_bytes for tensor in tensors),
                }
                for group, (prefix, tensors) in self.checkpoint.dropped.items()
            },
            "files": {path: entry.model_dump() for path, entry in sorted(self._files.items())},
            "evaluation": None,
            "tools": {
                "build_engine": _version("deltaflash"),
                "numpy": _version("numpy"),
                "python": platform.python_version(),
                "tokenizers": _version("tokenizers"),
            },
            "created": created,
        }
        content = {"engine_id": engine_id(content), **content}
        data = _json_bytes(content)
        with StagedFile(self.staging / MANIFEST) as file:
            file.write(data)
        return Manifest.model_validate_json(data)


def _precision(checkpoint: Checkpoint) -> dict[str, str]:
    config = checkpoint.config
    groups = {"embedding": "bfloat16", "mlp": "bfloat16", "vectors": "float32"}
    if not config.tied:
        groups["lm_head"] = "bfloat16"
    if config.num_gdn_layers:
        groups["gdn"] = "bfloat16"
    if config.num_attention_layers:
        groups["attention"] = "bfloat16"
    if config.vision is not None:
        groups["vision"] = "bfloat16"
    return dict(sorted(groups.items()))


def _json_bytes(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "source"

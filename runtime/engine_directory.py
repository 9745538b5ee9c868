"""The engine directory: the models of its files and the check that runs before it is loaded."""

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import EngineError, refusal
from runtime.preprocessor import Preprocessor
from runtime.program import Program

SCHEMA_VERSION = 1
TARGETS = ("cpu",)
MAX_END_IDS = 8  # kMaxEndIds of plugins/common/slot_table.h

MANIFEST = "manifest.json"
PROGRAM = "program.json"
WEIGHTS = "weights/model.safetensors"
TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.bin"
CHAT_TEMPLATE = "chat_template.jinja"
PREPROCESSOR = "preprocessor.json"
GENERATION = "generation.json"
REQUIRED_FILES = (PROGRAM, WEIGHTS, TOKENIZER, VOCABULARY, GENERATION)

_CHUNK_BYTES = 4 << 20
_SHOWN = 8  # names in a message
_Model = TypeVar("_Model", bound=BaseModel)

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Schema):
    """What the manifest promises about one file."""

    sha256: Sha256
    bytes: Annotated[int, Field(ge=0)]


class DroppedGroup(_Schema):
    """Tensors of the checkpoint that the engine leaves out."""

    prefix: str
    tensors: Annotated[int, Field(gt=0)]
    bytes: Annotated[int, Field(ge=0)]


class ModelInfo(_Schema):
    """Which model the engine holds and which files it was made from."""

    architecture: str
    name: str
    config: dict[str, Any]  # config.json of the checkpoint
    sources: dict[str, FileEntry]  # every checkpoint file that was read


class Manifest(_Schema):
    """All of `manifest.json`."""

    schema_version: Literal[1]
    engine_id: Sha256
    model: ModelInfo
    precision: dict[str, str]  # layer group -> dtype of its weights
    kv_dtype: Literal["float32"]
    target_arch: str
    dropped: dict[str, DroppedGroup]
    files: dict[str, FileEntry]
    evaluation: dict[str, Any] | None = None
    tools: dict[str, str]  # program -> version
    created: str  # ISO 8601, UTC


class SamplingDefaults(_Schema):
    """What the model's authors recommend; temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    temperature: Annotated[float, Field(ge=0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    min_p: Annotated[float, Field(ge=0, le=1)]


class Generation(_Schema):
    """All of `generation.json`.

    Attributes:
        end_ids: Tokens that end an answer.
        pad_id: The padding token, if there is one.
        sampling: Defaults of the checkpoint.
        page_instruction: What the model is told to do with a page; "" for the picture alone, None
            for the server's own words.
    """

    end_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=8)]
    pad_id: Annotated[int, Field(ge=0)] | None
    sampling: SamplingDefaults
    page_instruction: str | None = None


@dataclass(frozen=True)
class EngineDirectory:
    """A verified engine directory.

    Attributes:
        path: Absolute, without symbolic links.
        manifest: `manifest.json`.
        program: `program.json`.
        generation: `generation.json`: end ids and sampling defaults.
        chat_template: The text of the Jinja template, None where the model has none.
        preprocessor: `preprocessor.json`, None for a model without vision.
    """

    path: Path
    manifest: Manifest
    program: Program
    generation: Generation
    chat_template: str | None
    preprocessor: Preprocessor | None

    @property
    def tokenizer_path(self) -> Path:
        """`tokenizer.json`, as the tokenizers library reads it."""
        return self.path / TOKENIZER

    @property
    def vocabulary_path(self) -> Path:
        """`vocab.bin`: the bytes of every token id."""
        return self.path / VOCABULARY

    @property
    def weights_path(self) -> Path:
        """The weights in runtime layout."""
        return self.path / WEIGHTS

    @property
    def model_config(self) -> dict[str, Any]:
        """`config.json` of the checkpoint the engine was made from."""
        return self.manifest.model.config


def engine_id(manifest: Mapping[str, Any]) -> str:
    """The content digest of an engine.

    Covers the sorted (file, sha256) list and what decides how the files are used. The name, the
    sources, the tool versions, the evaluation and the time of creation are labels: they stay out,
    so the same content has the same id whoever packs it.

    Args:
        manifest: `manifest.json` as a mapping; `engine_id` itself is not read.

    Returns:
        64 hexadecimal digits.
    """
    content = {
        "schema_version": manifest["schema_version"],
        "architecture": manifest["model"]["architecture"],
        "config": manifest["model"]["config"],
        "precision": manifest["precision"],
        "kv_dtype": manifest["kv_dtype"],
        "target_arch": manifest["target_arch"],
        "dropped": manifest["dropped"],
        "files": sorted([path, entry["sha256"]] for path, entry in manifest["files"].items()),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file.

    Args:
        path: The file.
        progress: Called with the bytes read since the last call.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def open_engine(
    path: str | Path,
    verify: Literal["digest", "size"] = "digest",
    progress: Progress | None = None,
) -> EngineDirectory:
    """Verifies an engine directory and reads its small files; the weights are not loaded.

    Args:
        path: The engine directory; may itself be a symbolic link.
        verify: `digest` reads and hashes every file, `size` only compares lengths.
        progress: Called while files are hashed.

    Returns:
        The verified directory.

    Raises:
        EngineError: One line: what was found, what is needed, the command that fixes it.
        ValueError: `verify` is neither of the two.
    """
    if verify not in ("digest", "size"):
        raise ValueError(f"open_engine: verify must be 'digest' or 'size', got {verify!r}")
    check = _Check(Path(path))
    try:
        check.find_manifest()
        manifest = check.read_manifest()
        check.check_tree(manifest)
        check.check_files(manifest, verify, progress)
        return check.read_contents(manifest)
    except OSError as error:
        raise check.refuse(
            f"{error.strerror or error} at {error.filename or path}",
            "an engine directory that this user can read",
            f"ls -laR {shlex.quote(str(check.path))}",
        ) from error


class _Check:
    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse(self, found: str, needed: str, fix: str | None = None) -> EngineError:
        repack = f"build_engine pack HF_DIR {shlex.quote(str(self.path))} --force"
        return EngineError(refusal(self.path, found, needed, fix or repack))

    def find_manifest(self) -> None:
        quoted = shlex.quote(str(self.path))
        if not os.path.lexists(self.path):
            raise self.refuse(
                "nothing", "an engine directory", f"build_engine pack HF_DIR {quoted}"
            )
        if not self.path.exists():
            raise self.refuse("a dangling symbolic link", "an engine directory", f"rm {quoted}")
        if not self.path.is_dir():
            raise self.refuse("a file", "an engine directory", "build_engine pack HF_DIR OUT")
        self.path = self.path.resolve()
        file = self.path / MANIFEST
        if not os.path.lexists(file):
            raise self._refuse_foreign()
        if not stat.S_ISREG(file.lstat().st_mode):
            raise self.refuse(f"a {MANIFEST} that is not a regular file", "a regular file")

    def read_manifest(self) -> Manifest:
        raw = self._read_raw_manifest()
        try:
            manifest = Manifest.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            raise self.refuse(
                f"a {MANIFEST} with {_first(error)}", f"schema version {SCHEMA_VERSION}"
            ) from error
        if manifest.target_arch not in TARGETS:
            raise self.refuse(
                f"an engine for target {manifest.target_arch}", f"a target of {', '.join(TARGETS)}"
            )
        for name in manifest.files:
            if not _is_safe(name):
                raise self.refuse(
                    f"the path {name!r} in {MANIFEST}", "paths that stay inside the directory"
                )
        absent = [name for name in REQUIRED_FILES if name not in manifest.files]
        if absent:
            raise self.refuse(f"a {MANIFEST} that does not list {_names(absent)}", "all of them")
        expected = engine_id(raw)
        if manifest.engine_id != expected:
            raise self.refuse(
                f"a {MANIFEST} changed after it was sealed (engine_id {manifest.engine_id[:12]})",
                f"engine_id {expected[:12]} for its content",
            )
        return manifest

    def _read_raw_manifest(self) -> dict[str, Any]:
        try:
            raw = json.loads((self.path / MANIFEST).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self.refuse(f"a {MANIFEST} that is not JSON ({error})", "valid JSON") from error
        if not isinstance(raw, dict) or "schema_version" not in raw or "engine_id" not in raw:
            raise self.refuse(
                f"a {MANIFEST} of another program",
                "one with schema_version and engine_id",
                "build_engine pack HF_DIR OUT",
            )
        self._check_version(raw["schema_version"])
        return raw

    def _refuse_foreign(self) -> EngineError:
        quoted = shlex.quote(str(self.path))
        names = {entry.name for entry in self.path.iterdir()}
        suffixes = {Path(name).suffix for name in names}
        if suffixes & {".engine", ".plan"}:
            found, fix = "an engine of another program", "build_engine pack HF_DIR OUT"
        elif "config.json" in names and suffixes & {".safetensors", ".bin"}:
            found, fix = "a Hugging Face checkpoint", f"build_engine pack {quoted} OUT"
        elif not names:
            found, fix = "an empty directory", f"build_engine pack HF_DIR {quoted}"
        elif names <= {PROGRAM, "weights", *REQUIRED_FILES, CHAT_TEMPLATE, PREPROCESSOR}:
            found, fix = "an engine directory whose manifest is gone", ""
        else:
            found, fix = "a directory that is no engine", "build_engine pack HF_DIR OUT"
        return self.refuse(found, f"an engine directory with {MANIFEST}", fix)

    def _check_version(self, version: object) -> None:
        if version == SCHEMA_VERSION and type(version) is int:
            return
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise self.refuse(
            f"schema_version {version!r}",
            f"schema_version {SCHEMA_VERSION}",
            "pip install --upgrade deltaflash" if newer else None,
        )

    def check_tree(self, manifest: Manifest) -> None:
        directories = {
            parent.as_posix() for name in manifest.files for parent in PurePosixPath(name).parents
        }
        files: set[str] = set()
        extra: list[str] = []
        pending = [self.path]
        while pending:
            directory = pending.pop()
            for entry in sorted(directory.iterdir()):
                name = entry.relative_to(self.path).as_posix()
                mode = entry.lstat().st_mode
                if stat.S_ISDIR(mode) and name in directories:
                    pending.append(entry)
                elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "symbolic link" if stat.S_ISLNK(mode) else "special file"
                    raise self.refuse(f"{name} as a {kind}", "regular files only")
                elif stat.S_ISREG(mode) and (name in manifest.files or name == MANIFEST):
                    files.add(name)
                else:
                    extra.append(name)
        missing = sorted(set(manifest.files) - files)
        if missing:
            raise self.refuse(
                f"{_names(missing)} missing", f"all {len(manifest.files)} files of {MANIFEST}"
            )
        if extra:
            paths = " ".join(shlex.quote(str(self.path / name)) for name in extra[:_SHOWN])
            raise self.refuse(
                f"{_names(extra)} which {MANIFEST} does not list",
                "only the files it lists",
                f"rm -r {paths}",
            )

    def check_files(
        self, manifest: Manifest, verify: Literal["digest", "size"], progress: Progress | None
    ) -> None:
        for name, entry in manifest.files.items():
            num_bytes = (self.path / name).stat().st_size
            if num_bytes != entry.bytes:
                raise self.refuse(
                    f"{name} of {num_bytes} bytes", f"the {entry.bytes} bytes of {MANIFEST}"
                )
        if verify == "size":
            return
        total = sum(entry.bytes for entry in manifest.files.values())
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        for name, entry in manifest.files.items():
            digest = hash_file(self.path / name, advance)
            if digest != entry.sha256:
                raise self.refuse(
                    f"{name} damaged (sha256 {digest[:12]})",
                    f"sha256 {entry.sha256[:12]} of {MANIFEST}",
                )

    def read_contents(self, manifest: Manifest) -> EngineDirectory:
        program = self._parse(PROGRAM, Program)
        generation = self._parse(GENERATION, Generation)
        bad = [i for i in generation.end_ids if i >= program.config.vocab_size]
        if bad:
            raise self.refuse(
                f"{GENERATION} with end id {bad[0]}", f"ids below {program.config.vocab_size}"
            )
        chat_template = None
        if CHAT_TEMPLATE in manifest.files:
            try:
                chat_template = (self.path / CHAT_TEMPLATE).read_bytes().decode()
            except UnicodeDecodeError as error:
                raise self.refuse(f"{CHAT_TEMPLATE} that is not UTF-8", "UTF-8 text") from error
        preprocessor = None
        if PREPROCESSOR in manifest.files:
            preprocessor = self._parse(PREPROCESSOR, Preprocessor)
        if (preprocessor is None) != (program.config.vision is None):
            found = "no" if preprocessor is None else "a"
            raise self.refuse(
                f"{found} {PREPROCESSOR} beside this {PROGRAM}",
                f"{PREPROCESSOR} exactly where {PROGRAM} has a vision step",
            )
        return EngineDirectory(
            self.path, manifest, program, generation, chat_template, preprocessor
        )

    def _parse(self, name: str, model: type[_Model]) -> _Model:
        try:
            return model.model_validate_json((self.path / name).read_bytes())
        except ValidationError as error:
            raise self.refuse(
                f"{name} with {_first(error)}", f"{name} of schema version {SCHEMA_VERSION}"
            ) from error


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(name)
        and name.isprintable()
        and "\\" not in name
        and not path.is_absolute()
        and ".." not in path.parts
        and path.as_posix() == name
        and name not in (".", MANIFEST)
    )


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"a fault at {where or 'the top level'} ({detail['msg']})"

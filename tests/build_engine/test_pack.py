"""The target appears whole or not at all, whatever happens; the command and its exit codes."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import (
    CREATED,
    RATIO3,
    TINY,
    assert_one_line,
    copy_checkpoint,
    edit_json,
    pack_into,
    shard,
)

from build_engine import staging
from build_engine.cli import main
from build_engine.errors import OutputError
from build_engine.pack import PackOptions, default_name, pack
from build_engine.staging import StagedFile, Target
from runtime.engine_directory import engine_id, open_engine
from runtime.preprocessor import Preprocessor

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    return {
        "old": pack_into(RATIO3, folder / "old").path,
        "new": pack_into(TINY, folder / "new").path,
    }


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build_engine", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refusal_of(checkpoint: Path, out: Path, *, force: bool = False) -> str:
    with pytest.raises(OutputError) as caught:
        pack_into(checkpoint, out, force=force)
    return str(caught.value)


class TestContent:
    def test_manifest(self, engines: dict[str, Path]) -> None:
        raw = json.loads((engines["new"] / "manifest.json").read_bytes())
        assert raw["schema_version"] == 1
        assert raw["engine_id"] == engine_id(raw)
        assert raw["model"]["name"] == "tiny"
        assert raw["model"]["architecture"] == "Qwen3_5ForConditionalGeneration"
        assert raw["model"]["config"] == json.loads((TINY / "config.json").read_bytes())
        assert set(raw["model"]["sources"]) == {
            "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
            "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        for name, entry in raw["model"]["sources"].items():
            data = (TINY / name).read_bytes()
            assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        assert raw["precision"] == {
            "attention": "bfloat16", "embedding": "bfloat16", "gdn": "bfloat16",
            "lm_head": "bfloat16", "mlp": "bfloat16", "vectors": "float32", "vision": "bfloat16",
        }  # fmt: skip
        assert (raw["kv_dtype"], raw["target_arch"]) == ("float32", "cpu")
        assert raw["dropped"] == {"mtp": {"prefix": "mtp.", "tensors": 15, "bytes": 197504}}
        assert set(raw["tools"]) == {"build_engine", "numpy", "python", "tokenizers"}
        assert raw["created"] == CREATED
        files = contents(engines["new"])
        del files["manifest.json"]
        assert raw["files"] == {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for name, data in sorted(files.items())
        }

    def test_what_the_reader_gets(self, engines: dict[str, Path]) -> None:
        tiny, ratio3 = open_engine(engines["new"]), open_engine(engines["old"])
        assert tiny.tokenizer_path.read_bytes() == (TINY / "tokenizer.json").read_bytes()
        assert tiny.chat_template == (TINY / "chat_template.jinja").read_text()
        assert tiny.preprocessor == Preprocessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=4096, max_pixels=65536,
            image_mean=[0.5] * 3, image_std=[0.5] * 3, rescale_factor=1 / 255,
        )  # fmt: skip
        assert tiny.generation.end_ids == [504]
        assert tiny.generation.pad_id == 505
        assert tiny.model_config["image_token_id"] == 500
        assert ratio3.generation.end_ids == [507, 504]
        assert ratio3.preprocessor is None
        assert ratio3.manifest.dropped == {}
        assert "lm_head" not in ratio3.manifest.precision

    def test_the_same_input_gives_the_same_bytes(
        self, engines: dict[str, Path], tmp_path: Path
    ) -> None:
        copied = copy_checkpoint(TINY, tmp_path / "elsewhere")
        again = pack_into(copied, tmp_path / "again").path
        assert contents(again) == contents(engines["new"])

    def test_labels_stay_out_of_the_id(self, engines: dict[str, Path], tmp_path: Path) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "sharded")
        shard(checkpoint)
        other = pack(checkpoint, tmp_path / "out", PackOptions("2027-01-01T00:00:00+00:00"))
        assert other.manifest.model.name == "sharded"
        assert "model.safetensors.index.json" in other.manifest.model.sources
        first, second = contents(engines["new"]), contents(other.path)
        assert json.loads(first.pop("manifest.json")) != json.loads(second.pop("manifest.json"))
        assert first == second
        assert open_engine(engines["new"]).manifest.engine_id == other.manifest.engine_id

    def test_one_bit_of_a_weight_changes_the_id(
        self, engines: dict[str, Path], tmp_path: Path
    ) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "changed")
        weights = checkpoint / "model.safetensors"
        data = bytearray(weights.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:start])["lm_head.weight"]
        data[start + entry["data_offsets"][0]] ^= 1
        weights.write_bytes(data)
        changed = pack_into(checkpoint, tmp_path / "out").manifest.engine_id
        assert changed != open_engine(engines["new"]).manifest.engine_id

    def test_default_names(self) -> None:
        assert default_name(Path("/models/Qwen3.5-4B")) == "Qwen3.5-4B"
        assert default_name(Path("/models/.a b*c")) == "a-b-c"
        assert default_name(Path("/models/...")) == "model"


class TestTarget:
    def test_an_engine_is_replaced_only_with_force(
        self, engines: dict[str, Path], tmp_path: Path
    ) -> None:
        out = Path(shutil.copytree(engines["old"], tmp_path / "out"))
        before = contents(out)
        assert_one_line(refusal_of(TINY, out), "found an engine", f"HF_DIR {out} --force")
        assert contents(out) == before
        pack_into(TINY, out, force=True)
        assert contents(out) == contents(engines["new"])
        assert list(tmp_path.iterdir()) == [out]

    @pytest.mark.parametrize("damage", ["manifest gone", "extra file", "manifest cut"])
    def test_force_repairs_a_damaged_engine(
        self, engines: dict[str, Path], tmp_path: Path, damage: str
    ) -> None:
        out = Path(shutil.copytree(engines["old"], tmp_path / "out"))
        if damage == "manifest gone":
            (out / "manifest.json").unlink()
        elif damage == "extra file":
            (out / "extra").write_text("")
        else:
            (out / "manifest.json").write_text("{")
        pack_into(TINY, out, force=True)
        assert contents(out) == contents(engines["new"])

    def test_force_never_removes_what_is_no_engine(self, tmp_path: Path) -> None:
        other = tmp_path / "home"
        other.mkdir()
        (other / "thesis.txt").write_text("years of work")
        assert_one_line(refusal_of(TINY, other, force=True), "a directory that is no engine")
        copy_checkpoint(TINY, tmp_path / "checkpoint")
        message = refusal_of(TINY, tmp_path / "checkpoint", force=True)
        assert_one_line(message, "a directory that is no engine")
        assert_one_line(refusal_of(TINY, other / "thesis.txt", force=True), "found a file")
        assert (other / "thesis.txt").read_text() == "years of work"

    def test_the_checkpoint_is_never_the_target(self, tmp_path: Path) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "a/b")
        for out in (checkpoint, tmp_path / "a", tmp_path / "a/b/../b"):
            assert_one_line(refusal_of(checkpoint, out, force=True), "the checkpoint itself")

    def test_places_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        assert_one_line(refusal_of(TINY, tmp_path / "no/out"), "no directory", "mkdir -p")
        (tmp_path / "link").symlink_to("out")
        assert_one_line(refusal_of(TINY, tmp_path / "link"), "a symbolic link")
        assert_one_line(refusal_of(TINY, Path("/")), "the root directory")

    def test_an_empty_directory_is_filled(self, engines: dict[str, Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        pack_into(TINY, out)
        assert contents(out) == contents(engines["new"])

    def test_a_bad_checkpoint_leaves_nothing(self, tmp_path: Path) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "in")
        (checkpoint / "tokenizer.json").unlink()
        (tmp_path / "here").mkdir()
        assert main(["pack", str(checkpoint), str(tmp_path / "here/out")]) == 3
        assert list((tmp_path / "here").iterdir()) == []

    def test_everything_is_flushed_before_the_rename(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino))
        rename = Path.rename

        def renaming(path: Path, target: Path) -> Path:
            assert {entry.stat().st_ino for entry in [path, *path.rglob("*")]} == set(flushed)
            flushed.clear()
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", renaming)
        pack_into(TINY, tmp_path / "out")
        assert flushed == [tmp_path.stat().st_ino]


class TestLock:
    def test_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with Target(out).locked():
            message = refusal_of(TINY, out)
            pack_into(TINY, tmp_path / "other")  # a lock per target
        assert_one_line(message, "another build_engine writing here", "wait")
        pack_into(TINY, out)
        assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}

    def test_two_commands_at_once(self, engines: dict[str, Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        command = [sys.executable, "-m", "build_engine", "pack", TINY, out, "--name", "tiny"]
        both = [
            subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) for _ in range(2)
        ]
        errors = [process.communicate()[1] for process in both]
        assert sorted(process.returncode for process in both) == [0, 4]
        loser = errors[[process.returncode for process in both].index(4)]
        assert_one_line(loser.removesuffix("\n"), str(out))
        assert open_engine(out).manifest.engine_id == open_engine(engines["new"]).manifest.engine_id
        assert list(tmp_path.iterdir()) == [out]

    def test_removing_the_lock_file_lets_nobody_in(self, tmp_path: Path) -> None:
        inside = entered = 0
        overlaps: list[int] = []
        counting = threading.Lock()

        def work() -> None:
            nonlocal inside, entered
            deadline = time.monotonic() + 0.4
            while time.monotonic() < deadline:
                try:
                    with Target(tmp_path / "out").locked():
                        with counting:
                            inside, entered = inside + 1, entered + 1
                            overlaps.append(inside)
                        with counting:
                            inside -= 1
                except OutputError:
                    continue

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert entered > 100
        assert set(overlaps) == {1}


Action = Callable[[int, str], None]

WAYS = pytest.mark.parametrize(
    ("replacing", "exchange"),
    [(False, True), (True, True), (True, False)],
    ids=["new", "swapped", "replaced by two renames"],
)


@contextlib.contextmanager
def events(action: Action, *, exchange: bool) -> Iterator[None]:
    """Calls `action` before each write, flush, rename and removal with its number and name."""
    numbers = itertools.count()

    def wrap(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: object, **options: object) -> object:
            action(next(numbers), name)
            return original(*arguments, **options)

        patch.setattr(owner, name, wrapped)

    with pytest.MonkeyPatch.context() as patch:
        if not exchange:
            patch.setattr(staging, "_exchange", lambda first, second: False)
        for owner, name in (
            (StagedFile, "write"),
            (os, "fsync"),
            (Path, "rename"),
            (Path, "mkdir"),
            (staging, "_exchange"),
            (shutil, "rmtree"),
        ):
            wrap(owner, name)
        yield


def chosen_events(out: Path, *, exchange: bool) -> dict[int, str]:
    """Every event of a run over `out` but for the many writes, of which four are drawn."""
    names: list[str] = []
    with events(lambda number, name: names.append(name), exchange=exchange):
        pack_into(TINY, out, force=True)
    writes = [number for number, name in enumerate(names) if name == "write"]
    drawn = random.Random(7).sample(writes, 4)
    return {n: name for n, name in enumerate(names) if name != "write" or n in drawn}


def in_child(work: Callable[[], object]) -> int:
    """Forks, runs `work` and returns the pid; the child's exit code is 0 if it came to its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def pack_and_die(out: Path, event: int, *, exchange: bool) -> None:
    """Packs over `out` in a child that is killed before its nth event."""

    def die(number: int, name: str) -> None:
        if number == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with events(die, exchange=exchange):
            pack_into(TINY, out, force=True)

    _, status = os.waitpid(in_child(work), 0)
    assert os.WIFSIGNALED(status)


class TestKilled:
    @WAYS
    def test_before_any_event(
        self, engines: dict[str, Path], tmp_path: Path, replacing: bool, exchange: bool
    ) -> None:
        states = {name: contents(path) for name, path in engines.items()} | {"absent": {}}
        out = tmp_path / "out"

        def prepare() -> None:
            shutil.rmtree(out, ignore_errors=True)
            if replacing:
                shutil.copytree(engines["old"], out)

        prepare()
        seen = set()
        for event in chosen_events(out, exchange=exchange):
            prepare()
            pack_and_die(out, event, exchange=exchange)
            state = contents(out) if out.exists() else {}
            seen.add(next(name for name, whole in states.items() if whole == state))
            with Target(out).locked():  # what the next run does first
                pass
            assert set(tmp_path.iterdir()) <= {out}
            assert out.exists() or not replacing
        want = {"new"} | ({"old"} if replacing else {"absent"})
        assert seen == (want if exchange else want | {"absent"})

    def test_at_random_times(self, engines: dict[str, Path], tmp_path: Path) -> None:
        rng = random.Random(20261130)
        whole = contents(engines["new"])
        out = tmp_path / "out"
        for _ in range(12):
            pid = in_child(lambda: pack_into(TINY, out, force=True))
            time.sleep(rng.uniform(0, 0.06))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if out.exists():
                assert contents(out) == whole
        pack_into(TINY, out, force=True)
        assert contents(out) == whole
        assert list(tmp_path.iterdir()) == [out]


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory that only this user may enter, used without the rights of root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    copy_checkpoint(TINY, folder / "in")
    (folder / "here").mkdir()
    is_root = os.geteuid() == 0
    if is_root:
        shutil.chown(folder / "here", NOBODY)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        (folder / "here").chmod(0o755)
        shutil.rmtree(folder)


class TestDisk:
    def test_read_only_directory(
        self, unprivileged: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        here = unprivileged / "here"
        here.chmod(0o555)
        assert main(["pack", str(unprivileged / "in"), str(here / "out")]) == 4
        error = capsys.readouterr().err
        assert_one_line(error.removesuffix("\n"), "Permission denied", "a writable directory")
        assert list(here.iterdir()) == []

    def test_unreadable_checkpoint(
        self, unprivileged: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        closed = copy_checkpoint(TINY, unprivileged / "here/in")
        (closed / "model.safetensors").chmod(0)
        assert main(["pack", str(closed), str(unprivileged / "here/out")]) == 3
        assert_one_line(capsys.readouterr().err.removesuffix("\n"), "Permission denied")
        closed.chmod(0)
        assert main(["pack", str(closed), str(unprivileged / "here/out")]) == 3
        assert_one_line(capsys.readouterr().err.removesuffix("\n"), "Permission denied")
        closed.chmod(0o755)

    @WAYS
    def test_full_at_any_event(
        self, engines: dict[str, Path], tmp_path: Path, replacing: bool, exchange: bool
    ) -> None:
        out, new = tmp_path / "out", contents(engines["new"])
        before = contents(engines["old"]) if replacing else {}

        def prepare() -> None:
            shutil.rmtree(out, ignore_errors=True)
            if replacing:
                shutil.copytree(engines["old"], out)

        prepare()
        for event, kind in chosen_events(out, exchange=exchange).items():
            if kind == "rmtree":  # its failures are ignored: the next run removes what is left
                continue
            prepare()

            def fail(number: int, name: str, event: int = event) -> None:
                if number == event:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with (
                events(fail, exchange=exchange),
                pytest.raises((OSError, OutputError), match="No space left") as caught,
            ):
                pack_into(TINY, out, force=True)
            placed = "after the new engine was put in place" in str(caught.value)
            assert (contents(out) if out.exists() else {}) == (new if placed else before)
            assert set(tmp_path.iterdir()) <= {out}

    def test_the_command_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(StagedFile, "write", fail)
        assert main(["pack", str(TINY), str(tmp_path / "out")]) == 4
        assert_one_line(capsys.readouterr().err.removesuffix("\n"), "No space left", "df -h")
        assert list(tmp_path.iterdir()) == []

    def test_file_size_limit(self, tmp_path: Path) -> None:
        limit = 100_000
        result = subprocess.run(
            [sys.executable, "-m", "build_engine", "pack", TINY, tmp_path / "out"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert result.returncode == 4
        assert_one_line(result.stderr.removesuffix("\n"), "File too large")
        assert list(tmp_path.iterdir()) == []

    def test_too_little_room_is_seen_before_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert_one_line(refusal_of(TINY, tmp_path / "out"), "found 1000 bytes free", "df -h")
        assert list(tmp_path.iterdir()) == []


class TestCommand:
    def test_success(self, engines: dict[str, Path], tmp_path: Path) -> None:
        result = run("pack", TINY, tmp_path / "out", "--name", "page-reader")
        assert (result.returncode, result.stderr) == (0, "")
        engine = open_engine(tmp_path / "out").manifest
        assert engine.model.name == "page-reader"
        assert engine.engine_id == open_engine(engines["new"]).manifest.engine_id
        for part in (engine.engine_id, "2 GDN + 1 attention", "context 4096", "mtp: 15 tensors",
                     "weights/model.safetensors  1.05 MB", "2 blocks, pictures of at most 65536",
                     ):  # fmt: skip
            assert part in result.stdout

    def test_progress_on_a_terminal(self, tmp_path: Path) -> None:
        controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 100))
        command = [sys.executable, "-m", "build_engine", "pack", TINY, tmp_path / "out"]
        result = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal, check=False
        )
        shown = os.read(controller, 65536)
        os.close(terminal)
        os.close(controller)
        assert result.returncode == 0
        assert b"B/s" in shown

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["pack"],
            ["pack", "in"],
            ["unpack", "in", "out"],
            ["pack", "in", "out", "--name", "a/b"],
            ["pack", "in", "out", "--quietly"],
        ],
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--help" in error

    def test_help_names_the_exit_codes(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["pack", "--help"])
        assert caught.value.code == 0
        assert "exit codes: 0 done, 2 wrong usage, 3" in capsys.readouterr().out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith("build_engine ")

    def test_source_date_epoch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
        assert main(["pack", str(TINY), str(tmp_path / "out")]) == 0
        assert open_engine(tmp_path / "out").manifest.created == "1970-01-02T00:00:00+00:00"
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
        with pytest.raises(SystemExit) as caught:
            main(["pack", str(TINY), str(tmp_path / "other")])
        assert caught.value.code == 2
        assert "seconds since 1970" in capsys.readouterr().err

    def test_errors_have_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "two\nlines")
        edit_json(checkpoint / "config.json", lambda c: c.update(model_type="a\nb"))
        assert main(["pack", str(checkpoint), str(tmp_path / "out")]) == 3
        assert_one_line(capsys.readouterr().err.removesuffix("\n"), "two\\nlines", "not MoE")

    def test_interrupt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(StagedFile, "write", interrupt)
        assert main(["pack", str(TINY), str(tmp_path / "out")]) == 130
        assert "interrupted" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

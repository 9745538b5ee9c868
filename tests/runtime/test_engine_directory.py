"""An engine directory is checked before anything is loaded; a refusal is one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    RATIO3,
    TINY,
    assert_one_line,
    copy_checkpoint,
    edit_json,
    pack_into,
    seal,
)

from runtime.engine_directory import FileEntry, open_engine
from runtime.errors import EngineError, refusal

Json = dict[str, Any]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_into(TINY, tmp_path_factory.mktemp("packed") / "engine").path


@pytest.fixture
def engine(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "engine"))


def refusal_of(path: Path, verify: Any = "digest") -> str:  # noqa: ANN401 - a Literal
    with pytest.raises(EngineError) as caught:
        open_engine(path, verify)
    return str(caught.value)


@pytest.mark.parametrize("verify", ["digest", "size"])
def test_a_whole_engine_opens(engine: Path, verify: Any) -> None:  # noqa: ANN401 - a Literal
    opened = open_engine(str(engine), verify)
    assert opened.path == engine
    assert opened.manifest.model.architecture == "Qwen3_5ForConditionalGeneration"
    assert opened.program.config.vocab_size == 512
    assert opened.generation.end_ids == [504]
    assert opened.generation.sampling.temperature == 0
    assert opened.chat_template == (TINY / "chat_template.jinja").read_text()
    assert opened.preprocessor is not None
    assert (opened.preprocessor.patch_size, opened.preprocessor.factor) == (16, 32)
    assert opened.model_config["text_config"]["num_hidden_layers"] == 3
    for path in (opened.tokenizer_path, opened.vocabulary_path, opened.weights_path):
        assert path.is_file()


def test_optional_files(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(RATIO3, tmp_path / "in")
    (checkpoint / "chat_template.jinja").unlink()
    opened = open_engine(pack_into(checkpoint, tmp_path / "out").path)
    assert opened.chat_template is None
    assert opened.preprocessor is None


def test_the_directory_may_be_a_link(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("engine")
    assert open_engine(tmp_path / "current").path == engine
    (tmp_path / "dangling").symlink_to("nowhere")
    assert_one_line(refusal_of(tmp_path / "dangling"), "a dangling symbolic link", "rm ")


def test_progress_counts_every_byte(engine: Path) -> None:
    calls: list[tuple[int, int]] = []
    manifest = open_engine(
        engine, progress=lambda done, total: calls.append((done, total))
    ).manifest
    total = sum(entry.bytes for entry in manifest.files.values())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    calls.clear()
    open_engine(engine, "size", lambda done, total: calls.append((done, total)))
    assert calls == []


def test_an_unknown_way_to_verify(engine: Path) -> None:
    with pytest.raises(ValueError, match="'digest' or 'size'"):
        open_engine(engine, "none")  # type: ignore[arg-type]


class TestForeign:
    def test_nothing_or_a_file(self, engine: Path, tmp_path: Path) -> None:
        message = refusal_of(tmp_path / "my engine")
        assert_one_line(
            message, "found nothing", f"build_engine pack HF_DIR '{tmp_path}/my engine'"
        )
        assert_one_line(refusal_of(engine / "vocab.bin"), "found a file", "build_engine pack")

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        message = refusal_of(tmp_path)
        assert_one_line(message, "an empty directory", f"build_engine pack HF_DIR {tmp_path}")

    def test_a_checkpoint(self, tmp_path: Path) -> None:
        checkpoint = copy_checkpoint(TINY, tmp_path / "in")
        message = refusal_of(checkpoint)
        assert_one_line(message, "a Hugging Face checkpoint", f"build_engine pack {checkpoint} OUT")

    def test_an_engine_of_another_program(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "rank0.engine").write_bytes(b"")
        assert_one_line(refusal_of(tmp_path), "an engine of another program")

    def test_another_directory(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        assert_one_line(refusal_of(tmp_path), "a directory that is no engine", "manifest.json")

    def test_the_manifest_is_gone(self, engine: Path) -> None:
        (engine / "manifest.json").unlink()
        message = refusal_of(engine)
        assert_one_line(message, "whose manifest is gone", f"HF_DIR {engine} --force")

    @pytest.mark.parametrize("content", ['{"name": "web app", "icons": []}', "[]", "null", '"x"'])
    def test_a_manifest_of_another_program(self, engine: Path, content: str) -> None:
        (engine / "manifest.json").write_text(content)
        assert_one_line(refusal_of(engine), "a manifest.json of another program", "schema_version")


class TestManifest:
    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a":\n1,}', b"[" * 100_000])
    def test_broken_json(self, engine: Path, content: bytes) -> None:
        (engine / "manifest.json").write_bytes(content)
        message = refusal_of(engine)
        assert_one_line(message, "a manifest.json that is not JSON", f"HF_DIR {engine} --force")

    @pytest.mark.parametrize(
        ("version", "fix"),
        [
            (2, "pip install --upgrade deltaflash"),
            (99, "pip install --upgrade deltaflash"),
            (0, "--force"),
            (-1, "--force"),
            ("1", "--force"),
            (1.0, "--force"),
            (True, "--force"),
            (None, "--force"),
        ],
    )
    def test_other_schema_versions(self, engine: Path, version: object, fix: str) -> None:
        seal(engine, lambda raw: raw.update(schema_version=version, unknown_key=1))
        message = refusal_of(engine)
        assert_one_line(message, f"found schema_version {version!r}", "schema_version 1", fix)

    @pytest.mark.parametrize(
        ("edit", "part"),
        [
            (lambda raw: raw.pop("tools"), "a fault at tools"),
            (lambda raw: raw.update(extra=1), "a fault at extra"),
            (lambda raw: raw.update(kv_dtype="fp8"), "a fault at kv_dtype"),
            (lambda raw: raw["files"]["vocab.bin"].update(bytes=-1), "files.vocab.bin.bytes"),
            (lambda raw: raw["files"]["vocab.bin"].update(sha256="x"), "files.vocab.bin.sha256"),
            (lambda raw: raw["model"].update(name="\ud800"), "a fault at the top level"),
        ],
    )
    def test_schema(self, engine: Path, edit: Callable[[Json], object], part: str) -> None:
        edit_json(engine / "manifest.json", edit)
        assert_one_line(refusal_of(engine), part, "--force")

    def test_another_target(self, engine: Path) -> None:
        seal(engine, lambda raw: raw.update(target_arch="sm_90a"))
        assert_one_line(refusal_of(engine), "an engine for target sm_90a", "a target of cpu")

    @pytest.mark.parametrize(
        "name",
        ["../outside", "/etc/hostname", "weights/../../outside", "a/./b", "a//b", "", ".", "./a",
         "a\\b", "manifest.json", "new\nline", ".."],
    )  # fmt: skip
    def test_paths_that_leave_the_directory(self, engine: Path, name: str) -> None:
        (engine.parent / "outside").write_text("")
        entry = FileEntry(sha256="0" * 64, bytes=0).model_dump()
        seal(engine, lambda raw: raw["files"].update({name: entry}))
        assert_one_line(refusal_of(engine), "the path", "stay inside the directory")

    @pytest.mark.parametrize(
        "edit",
        [
            lambda raw: raw["model"]["config"].update(image_token_id=1),
            lambda raw: raw["model"].update(architecture="Other"),
            lambda raw: raw["precision"].update(mlp="nvfp4"),
            lambda raw: raw["files"]["vocab.bin"].update(sha256="0" * 64),
            lambda raw: raw.update(engine_id="0" * 64),
            lambda raw: raw["dropped"].clear(),
        ],
    )
    def test_changes_after_sealing(self, engine: Path, edit: Callable[[Json], object]) -> None:
        edit_json(engine / "manifest.json", edit)
        assert_one_line(refusal_of(engine), "changed after it was sealed", "--force")

    def test_labels_may_change(self, engine: Path) -> None:
        edit_json(engine / "manifest.json", lambda raw: raw["model"].update(name="other"))
        edit_json(engine / "manifest.json", lambda raw: raw.update(evaluation={"cer": 0.01}))
        assert open_engine(engine).manifest.model.name == "other"
        assert open_engine(engine).manifest.evaluation == {"cer": 0.01}

    @pytest.mark.parametrize(
        "name",
        ["program.json", "weights/model.safetensors", "tokenizer.json", "vocab.bin",
         "generation.json"],
    )  # fmt: skip
    def test_files_that_must_be_listed(self, engine: Path, name: str) -> None:
        (engine / name).unlink()
        seal(engine, lambda raw: raw["files"].pop(name))
        assert_one_line(refusal_of(engine), f"does not list {name}")


class TestFiles:
    @pytest.mark.parametrize("verify", ["digest", "size"])
    def test_missing(self, engine: Path, verify: str) -> None:
        (engine / "vocab.bin").unlink()
        shutil.rmtree(engine / "weights")
        message = refusal_of(engine, verify)
        assert_one_line(message, "vocab.bin, weights/model.safetensors missing", "all 7 files")

    @pytest.mark.parametrize("verify", ["digest", "size"])
    @pytest.mark.parametrize("name", ["extra.bin", "weights/.model.safetensors.swp", "drafter/a b"])
    def test_extra(self, engine: Path, name: str, verify: str) -> None:
        (engine / name).parent.mkdir(exist_ok=True)
        (engine / name).write_text("")
        found = "drafter" if name.startswith("drafter") else name
        message = refusal_of(engine, verify)
        assert_one_line(message, f"found {found} which", f"fix: rm -r {engine / found}")

    def test_many_extra_files(self, engine: Path) -> None:
        for index in range(20):
            (engine / f"extra{index:02}").mkdir()
        assert_one_line(refusal_of(engine), "extra07 and 12 more")

    @pytest.mark.parametrize("verify", ["digest", "size"])
    @pytest.mark.parametrize("change", [-1, 1, -556219])
    def test_truncated_or_longer(self, engine: Path, change: int, verify: str) -> None:
        file = engine / "weights/model.safetensors"
        size = file.stat().st_size + max(change, -file.stat().st_size)
        os.truncate(file, size)
        message = refusal_of(engine, verify)
        assert_one_line(message, f"weights/model.safetensors of {size} bytes", "--force")

    @pytest.mark.parametrize("name", ["weights/model.safetensors", "vocab.bin", "program.json"])
    @pytest.mark.parametrize("position", [0, -1])
    def test_one_byte_changed(self, engine: Path, name: str, position: int) -> None:
        data = bytearray((engine / name).read_bytes())
        data[position] ^= 1
        (engine / name).write_bytes(data)
        assert_one_line(refusal_of(engine), f"{name} damaged (sha256 ", "--force")

    def test_size_alone_does_not_see_a_changed_weight(self, engine: Path) -> None:
        file = engine / "weights/model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        open_engine(engine, "size")

    @pytest.mark.parametrize("verify", ["digest", "size"])
    @pytest.mark.parametrize("name", ["vocab.bin", "weights", "manifest.json", "more"])
    def test_links(self, engine: Path, tmp_path: Path, name: str, verify: str) -> None:
        outside = tmp_path / "outside"
        if (engine / name).exists():
            (engine / name).rename(outside)
        (engine / name).symlink_to(outside)
        message = refusal_of(engine, verify)
        assert_one_line(message, "regular file")
        assert "link" in message or name == "manifest.json"

    def test_special_files(self, engine: Path) -> None:
        (engine / "vocab.bin").unlink()
        os.mkfifo(engine / "vocab.bin")
        assert_one_line(refusal_of(engine), "vocab.bin as a special file")

    def test_a_name_with_control_characters(self, engine: Path) -> None:
        (engine / "a\n\x1b[31mb").write_text("")
        (engine / os.fsdecode(b"\xff")).write_text("")
        assert_one_line(refusal_of(engine), "a\\n\\x1b[31mb", "\\udcff")


class TestContents:
    @pytest.mark.parametrize(
        ("name", "edit", "part"),
        [
            ("program.json", lambda p: p.update(schema_version=2), "a fault at schema_version"),
            ("program.json", lambda p: p.pop("steps"), "a fault at steps"),
            ("program.json", lambda p: p["config"].update(head_dim=0), "config.head_dim"),
            ("generation.json", lambda g: g.update(end_ids=[]), "a fault at end_ids"),
            ("generation.json", lambda g: g.update(end_ids=list(range(9))), "a fault at end_ids"),
            ("generation.json", lambda g: g.update(end_ids=[512]), "end id 512"),
            ("generation.json", lambda g: g["sampling"].update(top_p=0), "sampling.top_p"),
        ],
    )
    def test_schema(
        self, engine: Path, name: str, edit: Callable[[Json], object], part: str
    ) -> None:
        edit_json(engine / name, edit)
        seal(engine)
        assert_one_line(refusal_of(engine), name, part, "--force")

    @pytest.mark.parametrize(
        ("name", "content", "part"),
        [
            ("program.json", b"{", "the top level"),
            ("chat_template.jinja", b"\xff", "not UTF-8"),
            ("preprocessor.json", b"{", "the top level"),
            ("preprocessor.json", b"[]", "the top level"),
        ],
    )
    def test_broken(self, engine: Path, name: str, content: bytes, part: str) -> None:
        (engine / name).write_bytes(content)
        seal(engine)
        assert_one_line(refusal_of(engine), name, part, "--force")


def test_a_file_that_cannot_be_read(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("runtime.engine_directory.hash_file", fail)
    assert_one_line(refusal_of(engine), "Permission denied at ", "ls -laR")


def test_refusals_stay_on_one_line() -> None:
    line = refusal("a\nb", "\x1b[0m", "\u2028", "rm 'ä'")
    assert line == "a\\nb: found \\x1b[0m; needed \\u2028; fix: rm 'ä'"

"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime import Executor

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def engine_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both tiny checkpoints as engine directories, by name."""
    from build_engine.pack import PackOptions, pack

    root = tmp_path_factory.mktemp("engines")
    engines = {}
    for name in ("tiny_qwen3_5", "tiny_ratio3"):
        pack(DATA / name, root / name, PackOptions(created="2026-01-01T00:00:00Z"))
        engines[name] = root / name
    return engines


@pytest.fixture(scope="session")
def engine_dir(engine_dirs: dict[str, Path]) -> Path:
    return engine_dirs["tiny_qwen3_5"]


@pytest.fixture
def make_executor(engine_dir: Path) -> Iterator[Callable[..., Executor]]:
    """Makes executors from ExecutorConfig keywords and shuts them down after the test."""
    from runtime import Executor, ExecutorConfig

    made = []

    def make(engine: Path = engine_dir, **config: int) -> Executor:
        executor = Executor(engine, ExecutorConfig(**{"num_threads": 1, **config}))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


def load_expected(name: str) -> dict[str, Any]:
    return json.loads((DATA / name / "expected.json").read_text())

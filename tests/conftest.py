"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime import Executor

DATA = Path(__file__).parent / "data"
NEEDS_GPU = "needs a GPU and libdeltaflash_cuda"
# The backends that the contract suites run on: device and provider of segments.
BACKENDS = [
    pytest.param({"device": "cpu"}, id="cpu"),
    pytest.param({"device": "cuda", "provider": "exact"}, id="cuda", marks=pytest.mark.gpu),
]


def use_native_module(path: str) -> None:
    """Puts another build of the native module in place of the installed one."""
    spec = importlib.util.spec_from_file_location("runtime._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runtime._native"] = module
    spec.loader.exec_module(module)


# A build with sanitizers, see tools/sanitize. Tests import this file a second time, as `conftest`.
if "DELTAFLASH_NATIVE" in os.environ and "runtime._native" not in sys.modules:
    use_native_module(os.environ["DELTAFLASH_NATIVE"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail gpu tests where they cannot run"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips gpu tests on a machine without a GPU or without the CUDA library."""
    if config.getoption("--require-gpu") or not any(
        item.get_closest_marker("gpu") for item in items
    ):
        return
    from runtime import _native

    library = Path(_native.__file__).parent / "libdeltaflash_cuda.so"
    if library.exists() and Path("/dev/nvidia0").exists():
        return
    skip = pytest.mark.skip(reason=NEEDS_GPU)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in one line why gpu tests were skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    num_gpu = sum(NEEDS_GPU in str(report.longrepr) for report in skipped)
    if num_gpu:
        terminalreporter.write_line(f"{num_gpu} skipped: {NEEDS_GPU}")


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


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, str]:
    """ExecutorConfig keywords of one backend."""
    return request.param


@pytest.fixture
def make_executor(engine_dir: Path, backend: dict[str, str]) -> Iterator[Callable[..., Executor]]:
    """Makes executors from ExecutorConfig keywords and shuts them down after the test."""
    from runtime import Executor, ExecutorConfig

    made = []

    def make(engine: Path = engine_dir, **config: int | str) -> Executor:
        executor = Executor(engine, ExecutorConfig(**{"num_threads": 1, **backend, **config}))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


def load_expected(name: str) -> dict[str, Any]:
    return json.loads((DATA / name / "expected.json").read_text())

"""The parts that compute-sanitizer runs on a GPU, on the CPU and without it, so that they work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract.sanitizer_session import PARTS, run_part

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("part", PARTS)
def test_part_runs(tmp_path: Path, part: str) -> None:
    run_part("tiny_ratio3", "cpu", part, tmp_path / "engine")

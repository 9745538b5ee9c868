import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from runtime._native import plugins

INSTRUCTION_SETS = [
    one for one in plugins.InstructionSet if one <= plugins.widest_instruction_set()
]


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh inputs at every run; pytest shows the seed where a test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(params=INSTRUCTION_SETS, ids=lambda one: one.name.lower())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with each instruction set of this machine."""
    before = plugins.instruction_set()
    plugins.set_instruction_set(request.param)
    yield
    plugins.set_instruction_set(before)

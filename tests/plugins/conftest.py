import secrets

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh inputs at every run; pytest shows the seed where a test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)

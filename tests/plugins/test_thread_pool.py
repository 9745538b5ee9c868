import subprocess
import sys
import time

import numpy as np
import pytest
from reference.linear import to_bfloat16

from runtime._native import plugins


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_short_runs(rng: np.random.Generator, num_threads: int) -> None:
    """Runs of few and of many parts, with pauses long enough for the threads to go to sleep."""
    x = rng.normal(size=(4, 64)).astype(np.float32)
    weights = [to_bfloat16(rng.normal(size=(size, 64))) for size in (16, 1100, 4500)]
    wants = [np.empty((4, len(weight)), np.float32) for weight in weights]
    for weight, want in zip(weights, wants, strict=True):
        plugins.linear(x, weight, want)
    pool = plugins.ThreadPool(num_threads)
    assert pool.num_threads == num_threads
    for run in range(1500):
        pick = int(rng.integers(3))
        out = np.full_like(wants[pick], np.nan)
        plugins.linear(x, weights[pick], out, pool)
        assert out.tobytes() == wants[pick].tobytes()
        if run % 150 == 0:
            time.sleep(0.002)


def test_a_pool_may_end_unused() -> None:
    for _ in range(20):
        plugins.ThreadPool(3)


@pytest.mark.plain_build
def test_more_threads_than_fit_are_an_error() -> None:
    code = """
import resource
from runtime._native import plugins
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    plugins.ThreadPool(4000)
except RuntimeError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_refuses_no_threads() -> None:
    with pytest.raises(ValueError, match="ThreadPool: expected num_threads >= 1, found 0"):
        plugins.ThreadPool(0)

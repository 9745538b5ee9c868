import time

import numpy as np
import pytest
from reference.linear import to_bfloat16

from runtime._native import plugins


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_short_runs(rng: np.random.Generator, num_threads: int) -> None:
    """More threads than cores too; pauses long enough that threads go to sleep in between."""
    x = rng.normal(size=(4, 512)).astype(np.float32)
    weight = to_bfloat16(rng.normal(size=(640, 512)))
    want = np.empty((4, 640), np.float32)
    plugins.linear(x, weight, want)
    pool = plugins.ThreadPool(num_threads)
    assert pool.num_threads == num_threads
    for run in range(400):
        out = np.full_like(want, np.nan)
        plugins.linear(x, weight, out, pool)
        assert out.tobytes() == want.tobytes()
        if run % 40 == 0:
            time.sleep(0.002)


def test_a_pool_may_end_unused() -> None:
    for _ in range(20):
        plugins.ThreadPool(3)


def test_refuses_no_threads() -> None:
    with pytest.raises(ValueError, match="ThreadPool: expected num_threads >= 1, found 0"):
        plugins.ThreadPool(0)

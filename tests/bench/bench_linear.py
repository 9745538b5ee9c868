"""CPU `linear` beside oneDNN (torch) and OpenBLAS (NumPy): a markdown table of GFLOP/s.

    PYTHONPATH=tests python tests/bench/bench_linear.py [--threads 1 2]

Peers that are not installed are left out. Every result is held to a float64 product first.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from reference.linear import from_bfloat16, linear, linear_bound, to_bfloat16

from runtime._native import plugins

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(256, 768), (192, 768), (1024, 4096)]  # in_dim, out_dim
TOKENS = (1, 8, 64, 1280)
WEIGHT_BYTES = 96 << 20  # copies of the weights that take turns for one token: none stays cached
TIME_S = 0.3


def blas_set_threads() -> Callable[[int], Any] | None:
    """OpenBLAS' switch, as NumPy's wheels carry it."""
    for library in (Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*"):
        blas = ctypes.CDLL(str(library))
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"):
            if hasattr(blas, name):
                return getattr(blas, name)
    return None


def best_s(calls: list[Callable[[], Any]]) -> float:
    """Seconds of the quickest call, calls taking turns."""
    best = float("inf")
    turns = itertools.cycle(calls)
    end = time.perf_counter() + TIME_S
    while time.perf_counter() < end:
        call = next(turns)
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def ours(x: np.ndarray, weight: np.ndarray, copies: int, threads: int) -> list[Callable[[], Any]]:
    """Calls of the op, each on weights of its own."""
    pool = plugins.ThreadPool(threads)
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    plugins.linear(x, weight, out, pool)
    assert (np.abs(out - linear(x, weight)) <= linear_bound(x, weight)).all()
    weights = [weight.copy() for _ in range(copies)]
    return [lambda w=w: plugins.linear(x, w, out, pool) for w in weights]


def torch_calls(
    x: np.ndarray, weight: np.ndarray, copies: int, threads: int, dtype: str
) -> list[Callable[[], Any]]:
    """torch.nn.functional.linear with inputs and weights of one dtype."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    to = getattr(torch, dtype)
    a = torch.from_numpy(x).to(to)
    weights = [torch.from_numpy(weight).to(to).clone() for _ in range(copies)]
    return [lambda w=w: torch.nn.functional.linear(a, w) for w in weights]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    threads_list = parser.parse_args().threads
    rng = np.random.default_rng()
    set_blas = blas_set_threads()
    has_torch = importlib.util.find_spec("torch") is not None
    names = ["ours bf16", "ours fp32"]
    names += ["OpenBLAS fp32"] if set_blas else []
    names += ["oneDNN fp32", "oneDNN bf16"] if has_torch else []
    print(f"GFLOP/s, best call; ours with {plugins.instruction_set().name.lower()}\n")
    print("| threads | K x N | M | " + " | ".join(names) + " |")
    print("|--:|---|--:|" + "--:|" * len(names))
    for threads, (in_dim, out_dim), tokens in itertools.product(threads_list, SHAPES, TOKENS):
        x = rng.normal(size=(tokens, in_dim)).astype(np.float32)
        bits = to_bfloat16(rng.normal(size=(out_dim, in_dim)).astype(np.float32))
        weight = from_bfloat16(bits)
        copies = max(1, WEIGHT_BYTES // (2 * bits.size)) if tokens == 1 else 1
        rows = [ours(x, bits, copies, threads), ours(x, weight, copies, threads)]
        if set_blas:
            set_blas(threads)
            weights = [weight.copy() for _ in range(copies)]
            rows.append([lambda w=w, x=x: x @ w.T for w in weights])
        if has_torch:
            rows += [
                torch_calls(x, weight, copies, threads, dtype) for dtype in ("float32", "bfloat16")
            ]
        flops = 2.0 * tokens * in_dim * out_dim
        cells = " | ".join(f"{flops / best_s(calls) / 1e9:.0f}" for calls in rows)
        print(f"| {threads} | {in_dim} x {out_dim} | {tokens} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

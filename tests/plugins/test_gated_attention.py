from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from reference.gated_attention import gated_attention
from reference.paged_kv import PagedCache

from runtime._native import plugins

pytestmark = pytest.mark.usefixtures("instruction_set")

# fp32 scores of unit vectors are off by some 1e-7 of their size, at most about 6 here; weights sum
# to one, values are about one.
ATOL = 4e-6
# num_heads, num_kv_heads, head_dim
SHAPES = [(1, 1, 8), (2, 1, 24), (3, 1, 40), (10, 2, 64), (7, 1, 16), (8, 1, 72), (16, 4, 256)]


@dataclass
class Sequence:
    q: np.ndarray
    gate: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@dataclass
class Engine:
    """Runs the op over one cache, writing keys and values as a step does, before it."""

    rng: np.random.Generator
    shape: tuple[int, int, int]
    num_slots: int = 1
    max_len: int = 256
    page_size: int = 16
    cache: PagedCache = field(init=False)

    def __post_init__(self) -> None:
        _, num_kv_heads, head_dim = self.shape
        self.table = plugins.make_slot_table(self.num_slots)
        self.cache = PagedCache(
            self.rng,
            num_slots=self.num_slots,
            max_pages=-(-self.max_len // self.page_size),
            page_size=self.page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def step(
        self,
        rows: list[tuple[int, Sequence | None, int]],
        pool: plugins.ThreadPool | None = None,
    ) -> list[np.ndarray]:
        """One launch: rows of (slot, its sequence, tokens); None and 2 tokens for a padded row."""
        num_heads, _, head_dim = self.shape
        row_start = np.concatenate([[0], np.cumsum([n for *_, n in rows])]).astype(np.int32)
        num_tokens = int(row_start[-1]) + 1
        q = np.full((num_tokens, num_heads, head_dim), np.nan, np.float32)
        fused = np.full((num_tokens, num_heads, 2 * head_dim), np.nan, np.float32)
        out = np.full_like(q, np.nan)
        for (slot, sequence, count), start in zip(rows, row_start, strict=False):
            if sequence is not None:
                first = int(self.table["kv_len"][slot])
                span = slice(first, first + count)
                q[start : start + count] = sequence.q[span]
                fused[start : start + count, :, head_dim:] = sequence.gate[span]
                self.cache.write(slot, first, sequence.keys[span], sequence.values[span])
        plugins.gated_attention(
            q,
            fused[..., head_dim:],
            out,
            self.cache.keys,
            self.cache.values,
            self.cache.page_table,
            self.table,
            np.array([-1 if s is None else slot for slot, s, _ in rows], np.int32),
            row_start,
            head_dim**-0.5,
            pool,
        )
        for slot, sequence, count in rows:
            if sequence is not None:
                self.table["kv_len"][slot] += count
        assert np.isnan(out[-1]).all()  # the bucket's slack belongs to no row
        return [out[a:b] for a, b in pairwise(row_start)]


def make_sequence(rng: np.random.Generator, shape: tuple[int, int, int], length: int) -> Sequence:
    num_heads, num_kv_heads, head_dim = shape
    q = 2 * rng.normal(size=(length, num_heads, head_dim))
    gate = 3 * rng.normal(size=(length, num_heads, head_dim))
    keys, values = rng.normal(size=(2, length, num_kv_heads, head_dim))
    return Sequence(*(x.astype(np.float32) for x in (q, gate, keys, values)))


def reference(sequence: Sequence, head_dim: int) -> np.ndarray:
    s = sequence
    return gated_attention(s.q, s.gate, s.keys, s.values, head_dim**-0.5)


def in_pieces(engine: Engine, sequence: Sequence, piece: int) -> np.ndarray:
    length = len(sequence.q)
    return np.concatenate(
        [engine.step([(0, sequence, min(piece, length - i))])[0] for i in range(0, length, piece)]
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 65, 150])
def test_equals_reference(
    rng: np.random.Generator, shape: tuple[int, int, int], length: int
) -> None:
    sequence = make_sequence(rng, shape, length)
    (out,) = Engine(rng, shape).step([(0, sequence, length)])
    np.testing.assert_allclose(out, reference(sequence, shape[2]), rtol=0, atol=ATOL)


@pytest.mark.parametrize("shape", [(4, 4, 24), (6, 2, 64), (5, 1, 40), (16, 4, 256)])
def test_bits_do_not_depend_on_chunks_pages_or_threads(
    rng: np.random.Generator, shape: tuple[int, int, int]
) -> None:
    sequence = make_sequence(rng, shape, 140)
    (whole,) = Engine(rng, shape).step([(0, sequence, 140)])
    for piece in (1, 3, 7, 64, 100):
        # The cache behind a piece is NaN: a key that is read too early shows.
        assert in_pieces(Engine(rng, shape), sequence, piece).tobytes() == whole.tobytes()
    for page_size in (1, 5, 24, 48, 64, 256):
        engine = Engine(rng, shape, page_size=page_size)
        assert engine.step([(0, sequence, 140)])[0].tobytes() == whole.tobytes()
    (threaded,) = Engine(rng, shape).step([(0, sequence, 140)], plugins.ThreadPool(2))
    assert threaded.tobytes() == whole.tobytes()


def test_bits_do_not_depend_on_the_batch(rng: np.random.Generator) -> None:
    shape = (8, 2, 64)
    lengths = [3, 130, 64, 77, 1]
    sequences = [make_sequence(rng, shape, n) for n in lengths]
    alone = [Engine(rng, shape).step([(0, s, len(s.q))])[0] for s in sequences]
    engine = Engine(rng, shape, num_slots=5)
    rows: list[tuple[int, Sequence | None, int]] = [
        (i, s, n) for i, (s, n) in enumerate(zip(sequences, lengths, strict=True))
    ]
    rows.insert(2, (0, None, 2))
    rng.shuffle(rows)
    outs = engine.step(rows, plugins.ThreadPool(2))
    for (slot, sequence, _), out in zip(rows, outs, strict=True):
        if sequence is None:
            assert not out.any()
        else:
            assert out.tobytes() == alone[slot].tobytes()
    assert np.isnan(engine.cache.keys[engine.cache.spare]).all()
    assert engine.cache.num_written() == sum(lengths) * shape[1]


def test_verify_rows_over_a_long_context(rng: np.random.Generator) -> None:
    shape = (8, 2, 128)
    sequence = make_sequence(rng, shape, 1100)
    want = reference(sequence, shape[2])
    engine = Engine(rng, shape, max_len=1100)
    engine.cache.write(0, 0, sequence.keys[:1000], sequence.values[:1000])
    engine.table["kv_len"] = 1000
    for first in range(1000, 1096, 8):
        (out,) = engine.step([(0, sequence, 8)])
        np.testing.assert_allclose(out, want[first : first + 8], rtol=0, atol=ATOL)


def test_scores_far_apart_do_not_overflow(rng: np.random.Generator) -> None:
    shape = (2, 1, 16)
    sequence = make_sequence(rng, shape, 130)
    sequence.q *= 200
    sequence.gate[:] = np.where(rng.random(sequence.gate.shape) < 0.5, 1e4, -1e4)
    (out,) = Engine(rng, shape).step([(0, sequence, 130)])
    assert np.isfinite(out).all()
    want = reference(sequence, shape[2])
    # Scores of some 2,000 carry fp32 errors of 3e-4, and so do the weights.
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-3)


def test_a_nan_reaches_no_earlier_token(rng: np.random.Generator) -> None:
    shape = (2, 1, 16)
    sequence = make_sequence(rng, shape, 100)
    (clean,) = Engine(rng, shape).step([(0, sequence, 100)])
    sequence.values[70] = np.nan
    sequence.keys[71] = np.nan
    (out,) = Engine(rng, shape).step([(0, sequence, 100)])
    assert out[:70].tobytes() == clean[:70].tobytes()
    assert np.isnan(out[70:]).all()


def test_missing_pages_are_masked(rng: np.random.Generator) -> None:
    shape = (4, 2, 24)
    sequence = make_sequence(rng, shape, 100)
    outs = []
    for page_size in (16, 4):
        engine = Engine(rng, shape, page_size=page_size)
        engine.cache.write(0, 0, sequence.keys[:99], sequence.values[:99])
        engine.table["kv_len"] = 99
        engine.cache.page_table[0, 64 // page_size : 80 // page_size] = -1
        page_table = engine.cache.page_table.copy()
        engine.cache.page_table[engine.cache.page_table < 0] = engine.cache.spare[0]
        engine.cache.write(0, 99, sequence.keys[99:], sequence.values[99:])
        engine.cache.page_table[:] = page_table
        out = np.full((1, 4, 24), np.nan, np.float32)
        plugins.gated_attention(
            sequence.q[99:],
            sequence.gate[99:],
            out,
            engine.cache.keys,
            engine.cache.values,
            page_table,
            engine.table,
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            24**-0.5,
        )
        outs.append(out)
    kept = np.r_[0:64, 80:100]
    want = gated_attention(
        sequence.q[99:], sequence.gate[99:], sequence.keys[kept], sequence.values[kept], 24**-0.5
    )
    for out in outs:
        np.testing.assert_allclose(out, want, rtol=0, atol=ATOL)

    out = np.full((1, 4, 24), np.nan, np.float32)
    none = np.full_like(page_table, -1)
    rows = (np.zeros(1, np.int32), np.array([0, 1], np.int32))
    cache = (engine.cache.keys, engine.cache.values)
    plugins.gated_attention(
        sequence.q[:1], sequence.gate[:1], out, *cache, none, engine.table, *rows, 1.0
    )
    assert not out.any()


def test_refuses_what_does_not_fit(rng: np.random.Generator) -> None:
    def run(shape: tuple[int, int, int], q: tuple[int, ...]) -> None:
        engine = Engine(rng, shape)
        x = np.zeros(q, np.float32)
        plugins.gated_attention(
            x,
            x,
            x,
            engine.cache.keys,
            engine.cache.values,
            engine.cache.page_table,
            engine.table,
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            1.0,
        )

    with pytest.raises(ValueError, match="expected head_dim to be a multiple of 8, got 12"):
        run((2, 1, 12), (1, 2, 12))
    with pytest.raises(ValueError, match="expected num_heads to be a multiple of 2 kv heads"):
        run((2, 2, 16), (1, 3, 16))
    with pytest.raises(ValueError, match=r"gated_attention: expected q of shape \[1, 2, 16\]"):
        run((2, 2, 16), (1, 2, 24))

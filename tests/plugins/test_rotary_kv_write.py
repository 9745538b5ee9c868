from collections.abc import Callable

import numpy as np
import pytest
from reference.paged_kv import PagedCache
from reference.rotary_kv_write import contiguous_axes, norm_rotate, project_heads, rotary_axes

from runtime._native import plugins

EPS = 1e-6
ATOL = 4e-6  # numbers up to 8, three fp32 roundings each
# num_heads, num_kv_heads, head_dim, section, page_size
SHAPES = [
    (1, 1, 8, (1, 1, 1), 4),
    (4, 2, 24, (2, 2, 1), 5),
    (6, 1, 40, (10, 5, 5), 16),
    (16, 4, 256, (11, 11, 10), 16),
]
Axes = Callable[[int, tuple[int, int, int]], np.ndarray]


class Case:
    """Four slots with histories; a batch of rows of slots 2, padded, 0 and 3."""

    def __init__(
        self,
        rng: np.random.Generator,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        section: tuple[int, int, int],
        page_size: int,
    ) -> None:
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.section = section
        self.slots = np.array([2, -1, 0, 3], np.int32)
        self.row_start = np.array([0, 1, 4, 11, 13], np.int32)
        self.num_tokens = 15  # two beyond the rows
        self.table = plugins.make_slot_table(4)
        self.table["kv_len"] = rng.integers(0, 30, 4)
        self.cache = PagedCache(
            rng,
            num_slots=4,
            max_pages=-(-40 // page_size),
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        width = 2 * (num_heads + num_kv_heads) * head_dim + 3
        self.qkv = rng.normal(size=(self.num_tokens, width)).astype(np.float32)
        self.q_norm, self.k_norm = rng.normal(size=(2, head_dim)).astype(np.float32)
        frequencies = sum(section)
        self.inv_freq = (1e7 ** (-np.arange(frequencies) / frequencies)).astype(np.float32)
        # Three axes far from each other, as inside an image on a late page.
        self.positions = rng.integers(0, 200_000, (3, self.num_tokens), np.int32)
        self.q_out = np.full((self.num_tokens, num_heads, head_dim), np.nan, np.float32)
        self.factor = 1.138629

    def run(self, pool: plugins.ThreadPool | None = None) -> None:
        plugins.rotary_kv_write(
            self.qkv,
            self.q_norm,
            self.k_norm,
            self.inv_freq,
            self.positions,
            self.section,
            self.q_out,
            self.cache.keys,
            self.cache.values,
            self.cache.page_table,
            self.table,
            self.slots,
            self.row_start,
            EPS,
            self.factor,
            pool,
        )

    def want(self, axes: Axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, _, k, v = project_heads(self.qkv, *self.shape)
        turn = axes(len(self.inv_freq), self.section)
        q, k = (
            norm_rotate(
                x,
                weight,
                self.positions,
                self.inv_freq,
                turn,
                eps=EPS,
                attention_factor=float(np.float32(self.factor)),
            )
            for x, weight in ((q, self.q_norm), (k, self.k_norm))
        )
        return q, k, v

    def live_rows(self) -> list[tuple[int, int, int]]:
        spans = zip(self.slots, self.row_start, self.row_start[1:], strict=False)
        return [(int(s), int(a), int(b)) for s, a, b in spans if s >= 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(rng: np.random.Generator, shape: tuple) -> None:
    case = Case(rng, *shape)
    case.run()
    q, k, v = case.want(rotary_axes)
    live = np.zeros(case.num_tokens, bool)
    for slot, start, end in case.live_rows():
        live[start:end] = True
        np.testing.assert_allclose(case.q_out[start:end], q[start:end], rtol=2e-6, atol=ATOL)
        first = int(case.table["kv_len"][slot])
        keys, values = case.cache.read(slot, first + end - start)
        assert np.isnan(keys[:first]).all()
        np.testing.assert_allclose(keys[first:], k[start:end], rtol=2e-6, atol=ATOL)
        np.testing.assert_array_equal(values[first:], v[start:end])
    assert np.isnan(case.q_out[~live]).all()
    assert case.cache.num_written() == live.sum() * case.shape[1]

    again = Case(rng, *shape)
    for name in ("qkv", "q_norm", "k_norm", "positions", "table"):
        setattr(again, name, getattr(case, name))
    again.run(plugins.ThreadPool(2))
    assert again.q_out.tobytes() == case.q_out.tobytes()


def test_contiguous_sections_would_be_noticed(rng: np.random.Generator) -> None:
    case = Case(rng, *SHAPES[-1])
    case.run()
    right, wrong = case.want(rotary_axes)[0][:1], case.want(contiguous_axes)[0][:1]
    assert np.abs(case.q_out[:1] - right).max() < ATOL
    assert np.abs(case.q_out[:1] - wrong).max() > 0.1


def test_a_missing_page_is_skipped(rng: np.random.Generator) -> None:
    case = Case(rng, *SHAPES[2])
    case.table["kv_len"][0] = 13  # its 7 tokens reach into the second page
    page = case.cache.page_table[0, 1]
    case.cache.page_table[0, 1] = -1
    case.run()
    assert np.isnan(case.cache.keys[page]).all()
    assert np.isnan(case.cache.values[page]).all()
    assert case.cache.num_written() == (1 + 3 + 2) * case.shape[1]
    assert np.isfinite(case.q_out[4:11]).all()

    case = Case(rng, *SHAPES[2])
    case.table["kv_len"][3] = 16 * 3 - 1  # the second token lies past the table
    case.run()
    assert case.cache.num_written() == (1 + 7 + 1) * case.shape[1]


def test_text_positions_do_not_depend_on_the_layout(rng: np.random.Generator) -> None:
    case = Case(rng, *SHAPES[-1])
    case.positions[:] = case.positions[0]
    case.run()
    np.testing.assert_allclose(
        case.q_out[4:13], case.want(contiguous_axes)[0][4:13], rtol=2e-6, atol=ATOL
    )


def test_refuses_what_does_not_fit(rng: np.random.Generator) -> None:
    case = Case(rng, *SHAPES[1])
    case.section = (2, 1, 1)
    with pytest.raises(ValueError, match="expected sections that sum to 5, got 4"):
        case.run()
    case = Case(rng, *SHAPES[1])
    case.cache.page_table[0, 0] = len(case.cache.keys)
    with pytest.raises(ValueError, match="rotary_kv_write: expected pages in"):
        case.run()
    case = Case(rng, *SHAPES[1])
    case.qkv = case.qkv[:, :-4].copy()
    with pytest.raises(ValueError, match="expected rows of qkv of at least 288 elements"):
        case.run()

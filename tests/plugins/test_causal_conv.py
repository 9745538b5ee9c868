import numpy as np
import pytest
from reference.causal_conv import causal_conv

from runtime._native import plugins

CASES = [(1, 4), (17, 4), (300, 4), (512, 4), (40, 2), (33, 1)]
# Sums of 4 products of up to some 20, each rounded to fp32.
TOLERANCE = {"rtol": 3e-6, "atol": 1e-5}


class Conv:
    """A layer's ring, all NaN, and a slot table."""

    def __init__(
        self, rng: np.random.Generator, channels: int, kernel: int, ring_cols: int
    ) -> None:
        self.weight = rng.normal(size=(channels, kernel)).astype(np.float32)
        self.ring = np.full((5, ring_cols, channels), np.nan, np.float32)
        self.table = plugins.make_slot_table(5)

    def run(
        self,
        x: np.ndarray,
        slots: list[int],
        row_start: list[int],
        pool: plugins.ThreadPool | None = None,
    ) -> np.ndarray:
        out = np.full((len(x), len(self.weight)), np.nan, np.float32)
        rows = np.array(slots, np.int32), np.array(row_start, np.int32)
        plugins.causal_conv(x, self.weight, self.ring, out, self.table, *rows, pool)
        return out

    def want(self, x: np.ndarray) -> np.ndarray:
        return causal_conv(
            x[:, : len(self.weight)].astype(np.float64), self.weight.astype(np.float64)
        )


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(("channels", "kernel"), CASES)
def test_prefill_in_pieces_equals_the_whole(
    rng: np.random.Generator, channels: int, kernel: int, extra: int
) -> None:
    conv = Conv(rng, channels, kernel, 8)
    x = rng.normal(size=(61, channels + extra)).astype(np.float32)
    want = conv.want(x)
    whole = conv.run(x, [1], [0, 61])
    np.testing.assert_allclose(whole, want, **TOLERANCE)
    begin = 0
    for end in (1, 2, 5, 30, 61):
        conv.table["kv_len"][3] = begin
        got = conv.run(np.ascontiguousarray(x[begin:end]), [3], [0, end - begin])
        assert got.tobytes() == whole[begin:end].tobytes()
        begin = end
    assert conv.ring[1].tobytes() == conv.ring[3].tobytes()
    for position in range(61 - 8, 61):
        np.testing.assert_array_equal(conv.ring[1, position % 8], x[position, :channels])
    assert np.isnan(conv.ring[[0, 2, 4]]).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_verify_rounds_with_rejected_drafts(rng: np.random.Generator, num_threads: int) -> None:
    channels, longest, rounds = 300, 13, 60
    conv = Conv(rng, channels, 4, 16)
    pool = plugins.ThreadPool(num_threads)
    slots = [3, 0, 2]
    truth = {
        slot: rng.normal(size=(rounds * longest, channels)).astype(np.float32) for slot in slots
    }
    want = {slot: conv.want(truth[slot]) for slot in slots}
    for _ in range(rounds):
        order = [*rng.permutation(slots), -1]
        lengths = rng.integers(1, longest + 1, len(order))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        accepted = rng.integers(0, lengths + 1)
        x = rng.normal(size=(starts[-1] + 2, channels)).astype(np.float32)  # 2 tokens of padding
        for row, slot in enumerate(order[:-1]):
            at = conv.table["kv_len"][slot]
            x[starts[row] : starts[row] + accepted[row]] = truth[slot][at : at + accepted[row]]
        x[starts[-2] :] = np.nan
        out = conv.run(x, order, starts.tolist(), pool)
        assert not out[starts[-2] : starts[-1]].any()
        assert np.isnan(out[starts[-1] :]).all()
        for row, slot in enumerate(order[:-1]):
            at = conv.table["kv_len"][slot]
            np.testing.assert_allclose(
                out[starts[row] : starts[row] + accepted[row]],
                want[slot][at : at + accepted[row]],
                **TOLERANCE,
            )
            conv.table["kv_len"][slot] += accepted[row]
    assert np.isnan(conv.ring[[1, 4]]).all()


def test_writes_only_the_row_s_columns(rng: np.random.Generator) -> None:
    conv = Conv(rng, 20, 4, 8)
    conv.ring[:] = rng.normal(size=conv.ring.shape)
    conv.table["kv_len"][2] = 13
    before = conv.ring.copy()
    table = conv.table.tobytes()
    conv.run(rng.normal(size=(3, 20)).astype(np.float32), [-1, 2, 4], [0, 1, 3, 3])
    changed = np.argwhere((conv.ring != before).any(-1))
    np.testing.assert_array_equal(changed, [[2, 13 % 8], [2, 14 % 8]])
    assert conv.table.tobytes() == table


def test_refuses_bad_arguments(rng: np.random.Generator) -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"causal_conv: expected ring_cols to be a power of two"):
        Conv(rng, 8, 4, 12).run(x, [0], [0, 2])
    with pytest.raises(ValueError, match=r"expected 0 < channels <= x_stride, got 9 and 8"):
        Conv(rng, 9, 4, 8).run(x, [0], [0, 2])
    with pytest.raises(ValueError, match=r"expected slots in \[-1, 5\), found 5"):
        Conv(rng, 8, 4, 8).run(x, [5], [0, 2])
    with pytest.raises(ValueError, match=r"expected row_start to rise within \[0, 2\], found 3"):
        Conv(rng, 8, 4, 8).run(x, [0], [0, 3])

import mmap

import numpy as np
import pytest
from reference.gated_delta_net import (
    Dims,
    ReplayPool,
    Tokens,
    chunked,
    fold,
    prepared,
    recurrent,
    tokens_from,
    window,
)

from runtime._native import plugins

pytestmark = pytest.mark.usefixtures("instruction_set")

# Value heads per key head 1 to 4; head dims equal, different, and no multiples of 16.
DIMS = [Dims(2, 2, 16, 16), Dims(2, 4, 32, 16), Dims(1, 3, 20, 24), Dims(2, 8, 7, 33)]
REAL = Dims(1, 2, 128, 128)

# Of the largest number compared. fp32 has 6e-8; sums run over K, the window and the history.
TOLERANCE = 5e-6


class Layer:
    """One layer's op arguments in fp32, its memory all NaN."""

    def __init__(
        self, rng: np.random.Generator, dims: Dims, num_slots: int, ring_rows: int = 32
    ) -> None:
        self.rng, self.dims = rng, dims
        heads = dims.num_value_heads
        self.a_log = np.log(rng.uniform(0.01, 16, heads)).astype(np.float32)
        self.dt_bias = (rng.normal(size=heads) - 3).astype(np.float32)
        nan = np.float32(np.nan)
        self.state = np.full((num_slots, heads, dims.value_dim, dims.key_dim), nan)
        self.ring_d = np.full((num_slots, heads, ring_rows, dims.value_dim), nan)
        self.ring_k = np.full((num_slots, dims.num_key_heads, ring_rows, dims.key_dim), nan)
        self.ring_g = np.full((num_slots, heads, ring_rows), nan)
        self.table = plugins.make_slot_table(num_slots)
        self.pool: plugins.ThreadPool | None = None

    @property
    def memory(self) -> tuple[np.ndarray, ...]:
        return self.state, self.ring_d, self.ring_k, self.ring_g

    def inputs(self, num_tokens: int, extra: int = 0) -> tuple[np.ndarray, np.ndarray]:
        d = self.dims
        width = 2 * d.num_key_heads * d.key_dim + d.num_value_heads * d.value_dim
        qkv = self.rng.normal(size=(num_tokens, width + extra)).astype(np.float32)
        ba = self.rng.normal(size=(num_tokens, 2 * d.num_value_heads + extra))
        return qkv, ba.astype(np.float32)

    def tokens(self, qkv: np.ndarray, ba: np.ndarray) -> Tokens:
        params = self.a_log.astype(np.float64), self.dt_bias.astype(np.float64)
        return tokens_from(qkv.astype(np.float64), ba.astype(np.float64), params, self.dims)

    def run(
        self,
        op: str,
        inputs: tuple[np.ndarray, np.ndarray],
        rows: list[tuple[int, int]],
        history_limit: int = 0,
    ) -> np.ndarray:
        """Runs rows of (slot, length); returns `out`, NaN where nothing was written."""
        slots = np.array([slot for slot, _ in rows], np.int32)
        row_start = np.cumsum([0, *(length for _, length in rows)]).astype(np.int32)
        out = np.full((len(inputs[0]), *self.state.shape[1:3]), np.nan, np.float32)
        params = self.a_log, self.dt_bias
        arrays = (*inputs, *params, *self.memory, out, self.table, slots, row_start)
        getattr(plugins, f"gated_delta_net_{op}")(*arrays, history_limit, self.pool)
        return out

    def materialize(self, slot: int, num_records: int) -> np.ndarray:
        out = np.full(self.state.shape[1:], np.nan, np.float32)
        plugins.gated_delta_net_materialize(*self.memory, self.table, slot, num_records, out)
        return out

    def commit(self, slot: int, row_len: int, num_accepted: int, history_limit: int) -> None:
        """What commit_round does to a verify row's cursors."""
        entry = self.table[slot]
        if plugins.flushes(int(entry["ring_history"]), row_len, history_limit):
            entry["ring_base"] = (entry["ring_base"] + entry["ring_history"]) % self.ring_g.shape[2]
            entry["ring_history"] = 0
        entry["ring_history"] += num_accepted
        entry["kv_len"] += num_accepted

    def random_slot(self, slot: int, base: int, history: int) -> None:
        """A slot in mid-sequence: random state and live records, NaN in the other ring rows."""
        ring_rows, d = self.ring_g.shape[2], self.dims
        live = (base + np.arange(history)) % ring_rows
        self.state[slot] = self.rng.normal(size=self.state.shape[1:])
        for ring in (self.ring_d, self.ring_k, self.ring_g):
            ring[slot] = np.nan
        self.ring_d[slot][:, live] = self.rng.normal(size=(d.num_value_heads, history, d.value_dim))
        keys = self.rng.normal(size=(d.num_key_heads, history, d.key_dim))
        self.ring_k[slot][:, live] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        self.ring_g[slot][:, live] = -self.rng.exponential(0.2, (d.num_value_heads, history))
        self.table[slot] = 0
        for name, value in (("kv_len", 1000), ("ring_base", base), ("ring_history", history)):
            self.table[slot][name] = value

    def records(self, slot: int, first: int, count: int) -> tuple[np.ndarray, ...]:
        """d, k (per value head) and g of `count` records from the `first` live one on, float64."""
        at = (self.table[slot]["ring_base"] + first + np.arange(count)) % self.ring_g.shape[2]
        group = self.dims.num_value_heads // self.dims.num_key_heads
        d, k, g = (ring[slot][:, at].astype(np.float64) for ring in self.memory[1:])
        return d.transpose(1, 0, 2), np.repeat(k, group, axis=0).transpose(1, 0, 2), g.T

    def state_with(self, slot: int, num_records: int) -> np.ndarray:
        """The float64 state behind the slot's first live records."""
        state = self.state[slot].astype(np.float64)
        return fold(state, *self.records(slot, 0, num_records)) if num_records > 0 else state


def error(got: np.ndarray, want: np.ndarray, least: float = 0.0) -> float:
    """The largest difference as a part of the largest number; NaN counts as infinite.

    A largest number below `least` counts as that.
    """
    if got.size == 0:
        return 0.0
    largest = np.abs(got - want).max() / max(np.abs(want).max(), least)
    return float(np.nan_to_num(largest, nan=np.inf))


def out_error(got: np.ndarray, want: np.ndarray, states: np.ndarray) -> float:
    """The error of outputs S q, with `states` behind each token.

    Where a state holds little but one record, q may be nearly orthogonal to all of it. The sum then
    cancels, and its rounding is that of its terms: `least` is what a q of random direction gives.
    """
    return error(got, want, np.linalg.norm(states, axis=-1).max() / states.shape[-1])


@pytest.mark.parametrize("dims", DIMS)
def test_reference_forms_agree(rng: np.random.Generator, dims: Dims) -> None:
    layer = Layer(rng, dims, 1)
    tokens = layer.tokens(*layer.inputs(150))
    start = rng.normal(size=layer.state.shape[1:])
    want, states = recurrent(tokens, start)
    for chunk in (1, 7, 64, 256):
        out, state = chunked(tokens, start, chunk)
        assert max(error(out, want), error(state, states[-1])) < 1e-11
    for history_limit in (0, 8, 16):
        pool = ReplayPool(1, dims, history_limit)
        pool.reset(0, start)
        done = 0
        while done < 140:
            accepted = int(rng.integers(1, 9))
            out = pool.verify(0, tokens.at(slice(done, done + 8)))
            pool.commit(0, accepted)
            assert error(out, want[done : done + 8]) < 1e-11
            done += accepted
            assert error(pool.materialize(0), states[done - 1]) < 1e-11


@pytest.mark.parametrize("dims", [*DIMS, REAL])
def test_prefill_equals_recurrence(rng: np.random.Generator, dims: Dims) -> None:
    layer = Layer(rng, dims, 8)
    rows = [(3, 1), (-1, 4), (0, 70), (6, 0), (5, 130), (2, 64), (7, 37)]
    started = {2: 64, 7: 27, 5: 100}  # slots with a state; the others begin a sequence
    for slot, kv_len in started.items():
        layer.table[slot]["kv_len"] = kv_len
        layer.state[slot] = rng.normal(size=layer.state.shape[1:])
    layer.table["finish_reason"][5] = 1
    before = [x.copy() for x in layer.memory]
    table = layer.table.tobytes()
    qkv, ba = layer.inputs(sum(length for _, length in rows) + 3, extra=2)
    qkv[1:5] = ba[1:5] = np.nan  # the padded row's
    out = layer.run("prefill", (qkv, ba), rows)
    begin = 0
    for slot, length in rows:
        end = begin + length
        if slot < 0:
            assert not out[begin:end].any()
        elif length > 0:
            start = before[0][slot] if slot in started else np.zeros(layer.state.shape[1:])
            want, states = recurrent(layer.tokens(qkv[begin:end], ba[begin:end]), start)
            assert out_error(out[begin:end], want, states) < TOLERANCE
            assert error(layer.state[slot], states[-1]) < TOLERANCE
        begin = end
    assert np.isnan(out[begin:]).all()
    for slot in (1, 4, 6):
        assert layer.state[slot].tobytes() == before[0][slot].tobytes()
    for ring, old in zip(layer.memory[1:], before[1:], strict=True):
        assert ring.tobytes() == old.tobytes()
    assert layer.table.tobytes() == table


@pytest.mark.parametrize("dims", [Dims(2, 4, 32, 16), Dims(1, 3, 20, 24)])
def test_prefill_has_the_same_bits_however_it_is_cut(rng: np.random.Generator, dims: Dims) -> None:
    layer = Layer(rng, dims, 1)
    qkv, ba = layer.inputs(330)
    want = layer.run("prefill", (qkv, ba), [(0, 330)])
    state = layer.state.tobytes()
    for cuts in ([64], [256], [64, 128, 320], [64, 128, 192, 256, 320]):
        layer.state[:] = np.nan
        begin = 0
        for end in [*cuts, 330]:
            layer.table[0]["kv_len"] = begin
            out = layer.run("prefill", (qkv[begin:end], ba[begin:end]), [(0, end - begin)])
            assert out.tobytes() == want[begin:end].tobytes()
            begin = end
        assert layer.state.tobytes() == state


@pytest.mark.parametrize("history_limit", [0, 16])
@pytest.mark.parametrize("dims", [*DIMS, REAL])
def test_verify_at_every_history_and_base(
    rng: np.random.Generator, dims: Dims, history_limit: int
) -> None:
    """17 histories at random bases, so that live and new records wrap, in batches of 17 rows."""
    layer = Layer(rng, dims, 20)
    slots = rng.permutation(20)[:17]
    for history, slot in enumerate(slots):
        layer.random_slot(slot, int(rng.integers(32)), history)
    rows = [(int(slot), int(rng.integers(1, 9))) for slot in slots]
    rows.insert(5, (-1, 3))
    layer.table["finish_reason"][slots[3]] = 1
    qkv, ba = layer.inputs(sum(length for _, length in rows) + 2, extra=1)
    before = [x.copy() for x in layer.memory]
    table = layer.table.tobytes()
    truth = {slot: layer.state_with(slot, layer.table[slot]["ring_history"]) for slot, _ in rows}
    out = layer.run("verify", (qkv, ba), rows, history_limit)
    assert layer.table.tobytes() == table
    begin = 0
    for slot, length in rows:
        end = begin + length
        if slot < 0:
            assert not out[begin:end].any()
            begin = end
            continue
        base, history = layer.table[slot]["ring_base"], int(layer.table[slot]["ring_history"])
        tokens = layer.tokens(qkv[begin:end], ba[begin:end])
        want, states = recurrent(tokens, truth[slot])
        assert error(out[begin:end], want) < TOLERANCE
        flushed = plugins.flushes(history, length, history_limit)
        if flushed and history > 0:
            assert error(layer.state[slot], truth[slot]) < TOLERANCE
        else:
            assert layer.state[slot].tobytes() == before[0][slot].tobytes()
        records = layer.records(slot, history, length)
        assert error(records[0], window(tokens, truth[slot])[1]) < TOLERANCE
        assert error(records[1], prepared(tokens)[1]) < TOLERANCE
        assert error(records[2], tokens.g) < TOLERANCE
        assert error(fold(truth[slot], *records), states[-1]) < TOLERANCE
        new = (base + history + np.arange(length)) % 32
        others = np.setdiff1d(np.arange(32), new)
        for ring, old in zip(layer.memory[1:], before[1:], strict=True):
            assert ring[slot][:, others].tobytes() == old[slot][:, others].tobytes()
        begin = end
    assert np.isnan(out[begin:]).all()
    for slot in np.setdiff1d(np.arange(20), slots):
        for x in layer.memory:
            assert np.isnan(x[slot]).all()


@pytest.mark.parametrize("history_limit", [0, 16])
def test_verify_has_the_same_bits_alone_and_in_a_batch(
    rng: np.random.Generator, history_limit: int
) -> None:
    dims = Dims(2, 6, 48, 20)
    layer = Layer(rng, dims, 9)
    for slot in range(9):
        layer.random_slot(slot, int(rng.integers(32)), int(rng.integers(17)))
    rows = [(slot, int(rng.integers(1, 9))) for slot in range(9)]
    qkv, ba = layer.inputs(sum(length for _, length in rows))
    before = [x.copy() for x in layer.memory]
    results = []
    for num_threads in (1, 2, 3):
        layer.pool = plugins.ThreadPool(num_threads)
        for x, old in zip(layer.memory, before, strict=True):
            x[:] = old
        out = layer.run("verify", (qkv, ba), rows, history_limit)
        results.append(b"".join(x.tobytes() for x in (out, *layer.memory)))
    for x, old in zip(layer.memory, before, strict=True):
        x[:] = old
    parts, begin = [], 0
    for slot, length in rows:
        part = qkv[begin : begin + length], ba[begin : begin + length]
        parts.append(layer.run("verify", part, [(slot, length)], history_limit))
        begin += length
    out = np.concatenate(parts)
    results.append(b"".join(x.tobytes() for x in (out, *layer.memory)))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("history_limit", [0, 16])
def test_verify_twice_is_harmless_without_a_fold(
    rng: np.random.Generator, history_limit: int
) -> None:
    layer = Layer(rng, DIMS[1], 1)
    layer.random_slot(0, 30, 8 if history_limit else 0)
    inputs = layer.inputs(8)
    first = layer.run("verify", inputs, [(0, 8)], history_limit)
    memory = [x.tobytes() for x in layer.memory]
    assert layer.run("verify", inputs, [(0, 8)], history_limit).tobytes() == first.tobytes()
    assert [x.tobytes() for x in layer.memory] == memory


@pytest.mark.parametrize("dims", [DIMS[1], DIMS[2]])
def test_materialize_at_every_record(rng: np.random.Generator, dims: Dims) -> None:
    layer = Layer(rng, dims, 3)
    layer.random_slot(1, 25, 16)
    before = [x.tobytes() for x in (*layer.memory, layer.table)]
    for num_records in range(17):
        want = layer.state_with(1, num_records)
        assert error(layer.materialize(1, num_records), want) < TOLERANCE
    assert [x.tobytes() for x in (*layer.memory, layer.table)] == before
    folded = layer.materialize(1, 16)
    layer.run("verify", layer.inputs(1), [(1, 1)], 16)
    assert layer.state[1].tobytes() == folded.tobytes()
    assert not layer.materialize(0, 0).any()  # kv_len 0: zeros, whatever the slot holds
    for num_records in (-1, 17):
        with pytest.raises(ValueError, match=r"expected num_records in \[0, 16\]"):
            layer.materialize(1, num_records)


@pytest.mark.parametrize("history_limit", [0, 16])
def test_two_thousand_steps_equal_the_recurrence(
    rng: np.random.Generator, history_limit: int
) -> None:
    """Random accept lengths, row lengths and batch order, with wrong drafts behind what is kept.

    Each slot is poisoned and given to a new sequence several times. The error must not grow.
    """
    dims, longest, num_steps = Dims(1, 2, 16, 16), 8, 2000
    layer = Layer(rng, dims, 4)
    zeros = np.zeros(layer.state.shape[1:])
    states: dict[int, np.ndarray] = {}
    errors = np.zeros((num_steps, 2))
    for step in range(num_steps):
        if step % 400 == 0:
            for slot in (3, 0) if step % 800 == 0 else (0,):
                for x in layer.memory:
                    x[slot] = np.nan
                layer.table[slot] = 0
                if step == 400:  # the sequence starts in a verify row, without a prefill
                    states[slot] = zeros
                    continue
                qkv, ba = layer.inputs(21)
                layer.run("prefill", (qkv, ba), [(slot, 21)])
                layer.table[slot]["kv_len"] = 21
                states[slot] = recurrent(layer.tokens(qkv, ba), zeros)[1][-1]
        rows = [(slot, int(rng.integers(1, longest + 1))) for slot in rng.permutation([3, 0])]
        rows.insert(1, (-1, 1))
        qkv, ba = layer.inputs(sum(length for _, length in rows))
        qkv[rows[0][1]] = np.nan
        out = layer.run("verify", (qkv, ba), rows, history_limit)
        begin = 0
        for slot, length in rows:
            end = begin + length
            if slot >= 0:
                accepted = int(rng.integers(1, length + 1))
                want, after = recurrent(layer.tokens(qkv[begin:end], ba[begin:end]), states[slot])
                states[slot] = after[accepted - 1]
                layer.commit(slot, length, accepted, history_limit)
                # A token whose output nearly cancels counts as one of a tenth of the usual size.
                errors[step, 0] = max(errors[step, 0], error(out[begin:end], want, 0.02))
                if step % 10 == 0:
                    history = int(layer.table[slot]["ring_history"])
                    got = layer.materialize(slot, history)
                    errors[step, 1] = max(errors[step, 1], error(got, states[slot]))
            begin = end
    assert errors.max() < TOLERANCE
    assert errors[1000:, 0].mean() < 1.5 * errors[:1000, 0].mean()
    for x in layer.memory:
        assert np.isnan(x[[1, 2]]).all()


@pytest.mark.parametrize("op", ["prefill", "verify"])
@pytest.mark.parametrize("case", ["keep", "forget", "mixed", "zero_k", "zero_q"])
def test_extreme_gates_and_vectors(rng: np.random.Generator, op: str, case: str) -> None:
    dims, num_tokens = Dims(1, 2, 32, 16), 70 if op == "prefill" else 8
    layer = Layer(rng, dims, 1, ring_rows=16)
    layer.random_slot(0, 13, 0 if op == "prefill" else 6)
    qkv, ba = layer.inputs(num_tokens)
    layer.a_log[:] = np.log(np.float32(100))
    layer.dt_bias[:] = 0
    ba[:, 2:] = {"keep": -200.0, "forget": 1.0}.get(case, -6.0)  # g = 0, or about -130
    if case == "mixed":
        ba[::3, 2:] = 1.0
    if case == "zero_k":
        qkv[:, 32:64] = 0
    if case == "zero_q":
        qkv[:, :32] = 0
    start = layer.state_with(0, int(layer.table[0]["ring_history"]))
    out = layer.run(op, (qkv, ba), [(0, num_tokens)], 0)
    tokens = layer.tokens(qkv, ba)
    want, states = recurrent(tokens, start)
    if case == "zero_q":
        assert not out.any()
    else:
        assert error(out, want) < 4 * TOLERANCE
    if op == "prefill":
        assert error(layer.state[0], states[-1]) < 4 * TOLERANCE
    if case == "keep":
        assert not tokens.g.astype(np.float32).any()


def test_a_rejected_suffix_leaves_the_kept_records_alone(rng: np.random.Generator) -> None:
    """Prefix invariance, to the bit: what a token gives does not depend on the drafts behind it."""
    layer = Layer(rng, DIMS[1], 1)
    layer.random_slot(0, 3, 5)
    qkv, ba = layer.inputs(8)
    whole = layer.run("verify", (qkv, ba), [(0, 8)], 16)
    records = layer.ring_d[0][:, 8:16].copy()
    for length in range(1, 8):
        out = layer.run("verify", (qkv[:length], ba[:length]), [(0, length)], 16)
        assert out.tobytes() == whole[:length].tobytes()
        assert layer.ring_d[0][:, 8 : 8 + length].tobytes() == records[:, :length].tobytes()


def test_offsets_beyond_32_bits(rng: np.random.Generator) -> None:
    """The last slot's state begins 2^31 numbers behind the first's; only it is touched."""
    dims, num_slots = Dims(1, 4, 128, 128), 2**15 + 1
    layer = Layer(rng, dims, 1, ring_rows=2)
    shape = (num_slots, *layer.state.shape[1:])
    try:
        pages = mmap.mmap(-1, 4 * int(np.prod(shape)))
    except OSError:
        pytest.skip("no address space for a pool of 8 GiB")
    layer.state = np.frombuffer(pages, np.float32).reshape(shape)
    layer.ring_d, layer.ring_k, layer.ring_g = (
        np.zeros((num_slots, *ring.shape[1:]), np.float32) for ring in layer.memory[1:]
    )
    layer.table = plugins.make_slot_table(num_slots)
    last = num_slots - 1
    qkv, ba = layer.inputs(2)
    layer.run("prefill", (qkv, ba), [(last, 2)])
    want = recurrent(layer.tokens(qkv, ba), np.zeros(shape[1:]))[1][-1]
    assert error(layer.state[last], want) < TOLERANCE
    assert not layer.state[0].any()
    layer.table[last]["kv_len"] = 2
    layer.run("verify", layer.inputs(1), [(last, 1)])
    assert layer.ring_g[last, :, 0].all()
    assert not any(ring[:last].any() for ring in layer.memory[1:])


def test_refuses_bad_arguments(rng: np.random.Generator) -> None:
    layer = Layer(rng, Dims(2, 4, 8, 8), 2, ring_rows=8)
    qkv, ba = layer.inputs(6)
    layer.table[1]["ring_history"] = 3
    with pytest.raises(
        ValueError, match="prefill: expected an empty ring in slot 1, got 3 records"
    ):
        layer.run("prefill", (qkv, ba), [(1, 6)])
    with pytest.raises(ValueError, match=r"verify: expected ring_rows >= history .* 9 in row 0"):
        layer.run("verify", (qkv, ba), [(1, 6)])
    with pytest.raises(ValueError, match="verify: expected qkv_stride >= 64, got 63"):
        layer.run("verify", (qkv[:, :-1].copy(), ba), [(0, 6)])
    with pytest.raises(
        ValueError, match=r"verify: expected ba of shape \[6, any\], found \[5, 8\]"
    ):
        layer.run("verify", (qkv, ba[:5]), [(0, 6)])
    with pytest.raises(ValueError, match="history_limit >= 0, got -1"):
        layer.run("verify", (qkv, ba), [(0, 6)], -1)
    layer.ring_g = layer.ring_g[:, :, :6].copy()
    with pytest.raises(ValueError, match=r"verify: expected ring_d of shape \[2, 4, 6, 8\]"):
        layer.run("verify", (qkv, ba), [(0, 6)])
    layer.ring_d, layer.ring_k = (x[:, :, :6].copy() for x in (layer.ring_d, layer.ring_k))
    with pytest.raises(ValueError, match="verify: expected ring_rows to be a power of two, got 6"):
        layer.run("verify", (qkv, ba), [(0, 6)])


def test_flush_rule() -> None:
    assert not plugins.flushes(8, 8, 16)
    assert plugins.flushes(9, 8, 16)
    assert not plugins.flushes(0, 8, 0)
    assert plugins.flushes(1, 8, 0)

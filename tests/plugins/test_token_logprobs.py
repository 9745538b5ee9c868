from collections.abc import Sequence

import numpy as np
import pytest
from reference.token_logprobs import Judged, log_softmax, token_logprobs

from runtime._native import plugins

MAX_TOP = plugins.MAX_TOP_LOGPROBS
LOWEST = float(np.finfo(np.float32).min)
UNTOUCHED = -7


def run(
    logits: np.ndarray,
    rows: Sequence[tuple[list[int], int | None] | None],
    pool: plugins.ThreadPool | None = None,
    max_emitted: int | None = None,
) -> list[list[Judged] | None]:
    """What is said of each row's emitted tokens.

    Args:
        logits: [num_logits, vocab_size]; rows take theirs in turn.
        rows: Emitted tokens and how many candidates to list, None for no records; a row that is
            None is a padded one.
        pool: The threads.
        max_emitted: Columns of the arrays.
    """
    num_rows = len(rows)
    width = max_emitted or max(len(row[0]) for row in rows if row is not None)
    table = plugins.make_slot_table(num_rows)
    slots = np.full(num_rows, -1, np.int32)
    starts = np.full(num_rows, -1, np.int32)
    tokens = np.full((num_rows, width), -1, np.int32)
    # A padded row has counts that no row may go by.
    emitted = np.full(num_rows, width, np.int32)
    start = 0
    for i, row in enumerate(rows):
        if row is None:
            continue
        ids, num_top = row
        slots[i] = num_rows - 1 - i  # not the row, so that no test passes by taking one for it
        starts[i] = start
        tokens[i, : len(ids)] = ids
        emitted[i] = len(ids)
        start += len(ids)
        table[slots[i]]["num_logprobs"] = 0 if num_top is None else 1 + num_top
    logprob = np.full((num_rows, width), np.nan, np.float32)
    rank = np.full((num_rows, width), UNTOUCHED, np.int32)
    top_ids = np.full((num_rows, width, MAX_TOP), UNTOUCHED, np.int32)
    top_logprobs = np.full(top_ids.shape, np.nan, np.float32)
    row_start = np.arange(num_rows + 1, dtype=np.int32)
    outputs = (logprob, rank, top_ids, top_logprobs)
    plugins.token_logprobs(logits, table, slots, row_start, starts, tokens, emitted, *outputs, pool)
    results: list[list[Judged] | None] = []
    written = np.zeros(rank.shape, bool)
    num_written = np.zeros(rank.shape, int)
    for i, row in enumerate(rows):
        if row is None or row[1] is None:
            results.append(None)
            continue
        count, k = len(row[0]), min(row[1], logits.shape[1])
        written[i, :count] = True
        num_written[i, :count] = k
        results.append(
            [
                Judged(
                    float(logprob[i, j]),
                    int(rank[i, j]),
                    top_ids[i, j, :k].tolist(),
                    top_logprobs[i, j, :k].tolist(),
                )
                for j in range(count)
            ]
        )
    assert np.isnan(logprob[~written]).all()
    assert (rank[~written] == UNTOUCHED).all()
    beyond = np.arange(MAX_TOP) >= num_written[..., None]
    assert (top_ids[beyond] == UNTOUCHED).all()
    assert np.isnan(top_logprobs[beyond]).all()
    return results


def check(got: Judged, want: Judged) -> None:
    assert got.rank == want.rank
    assert got.top_ids == want.top_ids
    for mine, exact in zip(
        [got.logprob, *got.top_logprobs], [want.logprob, *want.top_logprobs], strict=True
    ):
        assert not np.isnan(mine)
        assert mine <= 0
        if np.isinf(exact):
            assert mine == exact
        else:
            bounded = max(exact, LOWEST)
            assert abs(mine - bounded) <= 2e-6 + 2**-23 * abs(bounded)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 127, 128, 129, 1000, 248_320])
@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0])
def test_equals_the_reference(rng: np.random.Generator, vocab_size: int, spread: float) -> None:
    logits = (spread * rng.normal(size=(7, vocab_size))).astype(np.float32)
    logits[3:] = np.round(logits[3:])  # many ties
    tokens = rng.integers(0, vocab_size, 7).tolist()
    tokens[0], tokens[3] = int(logits[0].argmax()), int(logits[3].argmax())
    rows = [(tokens[:4], MAX_TOP), (tokens[4:6], 5), None, (tokens[6:], 0)]
    got = run(logits, rows, plugins.ThreadPool(2))
    judged = [entry for row in got if row is not None for entry in row]
    for j, (entry, k) in enumerate(zip(judged, [MAX_TOP] * 4 + [5] * 2 + [0], strict=True)):
        check(entry, token_logprobs(logits[j], tokens[j], min(k, vocab_size)))


def test_rows_that_do_not_ask_and_padded_rows_are_left_alone(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(6, 50)).astype(np.float32)
    got = run(logits, [([1, 2], None), None, ([3], 2), ([], 4), ([4, 5, 6], 1)], max_emitted=16)
    assert got[:2] == [None, None]
    assert got[3] == []
    assert got[2] is not None
    check(got[2][0], token_logprobs(logits[2], 3, 2))
    assert got[4] is not None
    for j in range(3):
        check(got[4][j], token_logprobs(logits[3 + j], 4 + j, 1))


@pytest.mark.parametrize("vocab_size", [3, 33, 300])
def test_infinite_huge_and_missing_numbers(rng: np.random.Generator, vocab_size: int) -> None:
    base = rng.normal(size=vocab_size).astype(np.float32)
    some = rng.random(vocab_size) < 0.4
    some[:2] = True, False
    cases = {
        "some -inf": np.where(some, -np.inf, base),
        "some NaN": np.where(some, np.nan, base),
        "one finite": np.where(np.arange(vocab_size) == vocab_size // 2, -3e38, -np.inf),
        "no number": np.full(vocab_size, np.nan),
        "all -inf": np.full(vocab_size, -np.inf),
        "some +inf": np.where(some, np.inf, base),
        "+inf and NaN": np.where(some, np.inf, np.nan),
        "huge": np.where(some, 3.3e38, -3.3e38),
        "far below": base - 1e30,
        "equal": np.full(vocab_size, 1e4),
        "-0 and 0": np.where(some, -0.0, 0.0),
    }
    for name, values in cases.items():
        logits = values.astype(np.float32)[None]
        for token in range(min(vocab_size, 8)):
            (row,) = run(logits, [([token], MAX_TOP)])
            assert row is not None, name
            with np.errstate(over="ignore"):
                check(row[0], token_logprobs(logits[0], token, min(MAX_TOP, vocab_size)))


def test_bits_depend_on_nothing_but_the_logits(rng: np.random.Generator) -> None:
    vocab_size = 5000
    logits = (4 * rng.normal(size=(24, vocab_size))).astype(np.float32)
    tokens = rng.integers(0, vocab_size, 24).tolist()
    alone = [run(logits[j : j + 1], [([tokens[j]], 9)]) for j in range(24)]
    want = [row[0] for (row,) in alone if row is not None]
    for threads in (1, 2, 3):
        pool = plugins.ThreadPool(threads)
        blocks = [(tokens[j : j + 8], 9) for j in range(0, 24, 8)]
        together = [entry for row in run(logits, blocks, pool) if row for entry in row]
        assert together == want


def test_all_candidates_of_a_small_vocabulary_sum_to_one(rng: np.random.Generator) -> None:
    logits = (2 * rng.normal(size=(1, MAX_TOP))).astype(np.float32)
    (row,) = run(logits, [([3], MAX_TOP)])
    assert row is not None
    assert sorted(row[0].top_ids) == list(range(MAX_TOP))
    assert np.exp(row[0].top_logprobs).sum() == pytest.approx(1, abs=1e-5)
    assert row[0].logprob == row[0].top_logprobs[row[0].top_ids.index(3)]
    assert np.exp(log_softmax(logits[0])).sum() == pytest.approx(1)


def test_wrong_arguments_are_refused() -> None:
    logits = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match=r"tokens in \[0, 5\), found 5"):
        run(logits, [([0, 5], 1)])
    with pytest.raises(ValueError, match=r"logits rows in \[0, 2\), found 0 and 3 emitted"):
        run(logits, [([0, 1, 2], 1)])

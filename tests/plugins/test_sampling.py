from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from reference.sampling import (
    END_ID,
    IN_PROMPT,
    LENGTH,
    NOT_FINISHED,
    Row,
    Rules,
    SamplingParams,
    accept,
    philox4x32,
    ruled_logits,
    sample,
    sampling_law,
    stream_uniform,
)

from runtime._native import plugins

# The 0.999 quantiles of chi-square for 1..15 degrees of freedom. Seeds are fixed, so a law test
# gives the same verdict at every run.
CHI_SQUARE = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26, 32.91]
CHI_SQUARE += [34.53, 36.12, 37.70]
NUM_DRAWS = 40_000
Law = Callable[[np.ndarray, SamplingParams], tuple[np.ndarray, np.ndarray]]


RULES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def token_counts(
    vocab_size: int, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> np.ndarray:
    """What a slot's row of the table of counts holds."""
    counts = np.bincount(np.array(output, np.int64), minlength=vocab_size).astype(np.uint16)
    counts[list(prompt)] |= IN_PROMPT
    return counts


def run(
    rows: Sequence[Row | None], logits: Sequence[np.ndarray], pool: plugins.ThreadPool | None = None
) -> list[tuple[list[int], int, int]]:
    """Emitted tokens, accepted drafts and finish reason a row; None is a padded row."""
    num_rows = len(rows)
    live = [row for row in rows if row is not None]
    max_draft = max((len(row.drafts) for row in live), default=0)
    max_forced = max((len(row.forced) for row in live), default=0)
    # Slots in reverse, so that no test passes by taking the row for the slot.
    table = plugins.make_slot_table(num_rows)
    lens = np.array([0 if row is None else 1 + len(row.drafts) for row in rows], np.int32)
    row_start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    token_ids = np.full(row_start[-1], -1, np.int32)
    forced = np.full((num_rows, max_forced), -1, np.int32)
    slots = np.full(num_rows, -1, np.int32)
    vocab_size = logits[0].shape[1]
    # Junk where no slot may look: of slots without penalties, past a slot's biases.
    counts = np.full((num_rows, vocab_size), 0xFFFF, np.uint16)
    bias_ids = np.full((num_rows, plugins.MAX_LOGIT_BIASES), -1, np.int32)
    bias_values = np.full(bias_ids.shape, np.nan, np.float32)
    for i, row in enumerate(rows):
        if row is None:
            continue
        slot = slots[i] = num_rows - 1 - i
        state = table[slot]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            state[name] = getattr(row.params, name)
        for name in ("seed", "num_emitted", "num_remaining", "finish_reason"):
            state[name] = getattr(row, name)
        state["num_end_ids"] = len(row.end_ids)
        state["end_ids"][: len(row.end_ids)] = row.end_ids
        state["num_forced"] = len(row.forced)
        for name in RULES:
            state[name] = getattr(row.rules, name)
        biases = sorted(row.rules.logit_bias)
        state["num_biases"] = len(biases)
        bias_ids[slot, : len(biases)] = [token for token, _ in biases]
        bias_values[slot, : len(biases)] = [value for _, value in biases]
        if any(getattr(row.rules, name) for name in RULES[:3]):
            counts[slot] = token_counts(vocab_size, row.prompt, row.output)
        token_ids[row_start[i] + 1 : row_start[i + 1]] = row.drafts
        forced[slot, : len(row.forced)] = row.forced
    before = table.tobytes()
    tokens = np.full((num_rows, max_draft + 1), -7, np.int32)
    emitted, accepted, reasons = np.full((3, num_rows), -7, np.int32)
    plugins.sample_accept(
        np.concatenate([x for x in logits if len(x)]).astype(np.float32),
        table,
        slots,
        row_start,
        row_start[:-1].copy(),
        lens,
        token_ids,
        tokens,
        emitted,
        accepted,
        reasons,
        forced if max_forced else None,
        counts,
        bias_ids,
        bias_values,
        pool,
    )
    assert table.tobytes() == before
    results = []
    for i in range(num_rows):
        assert (tokens[i, emitted[i] :] == -1).all()
        results.append((tokens[i, : emitted[i]].tolist(), int(accepted[i]), int(reasons[i])))
    return results


def draw(
    logits: np.ndarray,
    params: SamplingParams,
    seeds: Sequence[int],
    rules: Rules | None = None,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> np.ndarray:
    """The next token of a request per seed, all from the same logits [vocab_size]."""
    num_rows = len(seeds)
    table = plugins.make_slot_table(num_rows)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        table[name] = getattr(params, name)
    table["seed"], table["num_remaining"] = seeds, 2
    for name in RULES:
        table[name] = getattr(rules or Rules(), name)
    counts = np.tile(token_counts(len(logits), prompt, output), (num_rows, 1))
    rows = (np.arange(num_rows, dtype=np.int32), np.arange(num_rows + 1, dtype=np.int32))
    tokens = np.full((num_rows, 1), -7, np.int32)
    outs = np.full((3, num_rows), -7, np.int32)
    zeros = np.zeros(num_rows, np.int32)
    plugins.sample_accept(
        logits[None].astype(np.float32),
        table,
        *rows,
        zeros,
        zeros + 1,
        zeros,
        tokens,
        *outs,
        token_counts=counts,
    )
    assert (outs[0] == 1).all()
    return tokens[:, 0]


# ---- random streams


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # the known-answer vectors that Random123 ships for philox4x32, 10 rounds
        ("0" * 32, "0" * 16, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ("f" * 32, "f" * 16, "408f276d41c83b0ea20bc7c66d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe0994fdcceb5001e42024126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    def words(text: str) -> list[int]:
        return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]

    assert list(plugins.philox4x32(words(counter), words(key))) == words(want)
    assert list(philox4x32(words(counter), words(key))) == words(want)


def test_stream_uniform_equals_reference(rng: np.random.Generator) -> None:
    for _ in range(300):
        seed, index = (int(x) for x in rng.integers(0, 2**64, 2, np.uint64))
        lane = int(rng.integers(0, 2**32))
        assert plugins.stream_uniform(seed, index, lane) == stream_uniform(seed, index, lane)
    numbers = [plugins.stream_uniform(5, i, 0) for i in range(20_000)]
    assert 0 <= min(numbers) < 1e-3
    assert 0.999 < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 4 / np.sqrt(12 * 20_000)
    assert plugins.stream_uniform(5, 0, 0) != plugins.stream_uniform(5, 0, 1)


# ---- greedy


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 32, 33, 1000, 248_320])
def test_greedy_takes_the_lowest_of_the_largest(rng: np.random.Generator, vocab_size: int) -> None:
    logits = rng.integers(0, 9, (6, vocab_size)).astype(np.float32)  # many ties
    logits[1] = -np.inf
    logits[2] = np.nan
    logits[3][rng.random(vocab_size) < 0.5] = np.nan
    logits[4] -= 1e30
    logits[5, rng.integers(0, vocab_size)] = np.inf
    greedy = SamplingParams()
    got = run([Row(greedy)] * 6, [x[None] for x in logits], plugins.ThreadPool(2))
    for (tokens, *_), x in zip(got, logits, strict=True):
        assert tokens == [sample(x, greedy, 0.5)]


def test_every_position_can_win() -> None:
    for vocab_size in (16, 45, 64):
        logits = np.where(np.eye(vocab_size, dtype=bool), 1.0, -1.0)
        got = run([Row(SamplingParams())] * vocab_size, [x[None] for x in logits])
        assert [tokens[0] for tokens, *_ in got] == list(range(vocab_size))


# ---- the law

PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.3),
    SamplingParams(2.5),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.3, top_k=5),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(1.0, min_p=0.2),
    SamplingParams(1.5, top_k=6, top_p=0.8),
    SamplingParams(1.5, top_k=7, top_p=0.9, min_p=0.15),
    SamplingParams(2.0, top_p=0.9, min_p=0.1),
    SamplingParams(1.0, min_p=1.0),
    SamplingParams(1e-6),
    SamplingParams(1e6, top_p=0.5),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 3, 100, 3000])
def test_draws_are_the_inverse_cdf(
    rng: np.random.Generator, params: SamplingParams, vocab_size: int
) -> None:
    for spread in (0.0, 1.0, 12.0):
        logits = (spread * rng.normal(size=vocab_size)).astype(np.float32)
        logits[rng.random(vocab_size) < 0.1] = -np.inf
        logits[rng.random(vocab_size) < 0.3] = np.round(logits[0])  # ties
        logits[1:][rng.random(vocab_size - 1) < 0.05] = np.nan
        seeds = rng.integers(0, 2**64, 40, np.uint64).tolist()
        want = [sample(logits, params, stream_uniform(seed, 0, 0)) for seed in seeds]
        np.testing.assert_array_equal(draw(logits, params, seeds), want)


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS], ids=str)
@pytest.mark.parametrize("nothing", [-np.inf, np.nan])
def test_without_a_logit_above_minus_infinity_it_is_id_0(
    params: SamplingParams, nothing: float
) -> None:
    for vocab_size in (1, 3, 100, 3000):
        logits = np.full(vocab_size, -np.inf, np.float32)
        logits[: vocab_size // 2 + 1] = nothing
        assert sample(logits, params, 0.999) == 0
        assert (draw(logits, params, range(8)) == 0).all()


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, 40, 0.9), PARAMS[10]])
def test_draws_over_the_whole_vocabulary(rng: np.random.Generator, params: SamplingParams) -> None:
    logits = (3 * rng.normal(size=248_320)).astype(np.float32)
    seeds = rng.integers(0, 2**64, 6, np.uint64).tolist()
    order, law = sampling_law(logits, params)
    edges = np.cumsum(law)
    # Two sums of 248,320 doubles may differ by 1e-12, a draw that close to an edge in either's.
    uniforms = [stream_uniform(seed, 0, 0) for seed in seeds]
    clear = [np.abs(edges - u).min() > 1e-11 for u in uniforms]
    want = order[np.searchsorted(edges, uniforms, side="right")]
    got = draw(logits, params, seeds)
    np.testing.assert_array_equal(got[clear], want[clear])


LAW_LOGITS = np.log([0.25, 0.05, 0.16, 0.14, 0.02, 0.12, 0.08, 0.06, 0.05, 0.04, 0.02, 0.01])


def chi_square(tokens: np.ndarray, order: np.ndarray, law: np.ndarray) -> float:
    """Pearson's statistic; infinite for a token outside the law."""
    counts = np.bincount(tokens, minlength=len(LAW_LOGITS))
    if counts[order].sum() != len(tokens):
        return np.inf
    expected = law * len(tokens)
    return float(((counts[order] - expected) ** 2 / expected).sum())


LAW_PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(1.8),
    SamplingParams(1.0, top_k=4),
    SamplingParams(1.0, top_p=0.6),
    SamplingParams(1.0, min_p=0.3),
    SamplingParams(1.2, top_k=6, top_p=0.75),
    SamplingParams(1.2, top_p=0.9, min_p=0.25),
    SamplingParams(1.5, top_k=9, top_p=0.85, min_p=0.3),
]


@pytest.mark.parametrize("params", LAW_PARAMS, ids=str)
def test_draws_follow_the_law(params: SamplingParams) -> None:
    order, law = sampling_law(LAW_LOGITS.astype(np.float32), params)
    assert 2 <= len(order) <= len(CHI_SQUARE) + 1
    statistic = chi_square(draw(LAW_LOGITS, params, range(NUM_DRAWS)), order, law)
    assert statistic < CHI_SQUARE[len(order) - 2]


def top_p_before_top_k(logits: np.ndarray, params: SamplingParams) -> tuple:
    order, law = sampling_law(logits, replace(params, top_k=0))
    order, law = order[: params.top_k], law[: params.top_k]
    return order, law / law.sum()


def nucleus_without_its_border(logits: np.ndarray, params: SamplingParams) -> tuple:
    order, law = sampling_law(logits, params)
    return order[:-1], law[:-1] / law[:-1].sum()


def nucleus_one_too_long(logits: np.ndarray, params: SamplingParams) -> tuple:
    count = len(sampling_law(logits, params)[0]) + 1
    return sampling_law(logits, replace(params, top_p=1.0, top_k=count))


def temperature_after_the_nucleus(logits: np.ndarray, params: SamplingParams) -> tuple:
    count = len(sampling_law(logits, replace(params, temperature=1.0))[0])
    return sampling_law(logits, replace(params, top_p=1.0, top_k=count))


def min_p_of_the_total(logits: np.ndarray, params: SamplingParams) -> tuple:
    order, law = sampling_law(logits, replace(params, min_p=0.0))
    kept = law >= params.min_p
    return order[kept], law[kept] / law[kept].sum()


def not_renormalised(logits: np.ndarray, params: SamplingParams) -> tuple:
    order, law = sampling_law(logits, params)
    rest = 1 - sampling_law(logits, replace(params, top_k=0))[1][: len(order)].sum()
    law = law * (1 - rest)
    law[-1] += rest  # what a draw beyond the kept mass falls back to
    return order, law


@pytest.mark.parametrize(
    ("wrong_law", "params"),
    [
        (top_p_before_top_k, SamplingParams(1.0, top_k=5, top_p=0.8)),
        (nucleus_without_its_border, SamplingParams(1.0, top_p=0.6)),
        (nucleus_one_too_long, SamplingParams(1.0, top_p=0.6)),
        (temperature_after_the_nucleus, SamplingParams(1.8, top_p=0.6)),
        (min_p_of_the_total, SamplingParams(1.0, min_p=0.22)),
        (not_renormalised, SamplingParams(1.0, top_k=6)),
    ],
)
def test_a_wrong_rule_would_be_noticed(wrong_law: Law, params: SamplingParams) -> None:
    logits = LAW_LOGITS.astype(np.float32)
    tokens = draw(LAW_LOGITS, params, range(NUM_DRAWS))
    order, law = sampling_law(logits, params)
    assert chi_square(tokens, order, law) < CHI_SQUARE[len(order) - 2]
    order, law = wrong_law(logits, params)
    assert chi_square(tokens, order, law) > 4 * CHI_SQUARE[len(order) - 2]


# ---- rules for the logits

REPEATING = Rules(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
HISTORY = {"prompt": (0, 1, 4), "output": (2, 3, 2, 2, 0)}


@pytest.mark.parametrize("rules", [REPEATING, Rules(1.8), Rules(0.7, -0.5, -0.2)], ids=str)
def test_penalised_draws_follow_the_law(rules: Rules) -> None:
    params = SamplingParams(1.2, top_k=9)
    ruled = ruled_logits(LAW_LOGITS.astype(np.float32), rules, 0, **HISTORY)
    order, law = sampling_law(ruled, params)
    tokens = draw(LAW_LOGITS, params, range(NUM_DRAWS), rules, **HISTORY)
    assert chi_square(tokens, order, law) < CHI_SQUARE[len(order) - 2]


def test_a_wrong_penalty_would_be_noticed() -> None:
    params = SamplingParams(1.0)
    # All logits are negative, so with 3 added a sign that is not looked at shows too.
    logits = (LAW_LOGITS + 3).astype(np.float32)
    assert logits.min() < 0 < logits.max()
    tokens = draw(logits, params, range(NUM_DRAWS), REPEATING, **HISTORY)

    def statistic(ruled: np.ndarray) -> float:
        order, law = sampling_law(ruled, params)
        return chi_square(tokens, order, law) / CHI_SQUARE[len(order) - 2]

    def ruled(rules: Rules = REPEATING, **history: tuple[int, ...]) -> np.ndarray:
        return ruled_logits(logits, rules, 0, **(HISTORY | history))

    assert statistic(ruled()) < 1
    seen = sorted({*HISTORY["prompt"], *HISTORY["output"]})
    divided = logits.copy()
    divided[seen] /= np.float32(REPEATING.repetition_penalty)
    without_sign = ruled_logits(divided, replace(REPEATING, repetition_penalty=0), 0, **HISTORY)
    wrong = {
        "the prompt is left out": ruled(prompt=()),
        "the prompt counts as output": ruled(output=HISTORY["output"] + HISTORY["prompt"]),
        "the output is left out": ruled(output=()),
        "each token counts once": ruled(output=tuple(set(HISTORY["output"]))),
        "the sign is not looked at": without_sign,
        "no presence": ruled(replace(REPEATING, presence_penalty=0)),
        "after the temperature": ruled(replace(REPEATING, repetition_penalty=1.0)),
    }
    for name, law in wrong.items():
        assert statistic(law) > 2, name


def test_rules_hold_before_the_temperature_and_for_greedy() -> None:
    logits = np.array([[2.0, 1.9, 1.0, -1.0]])
    greedy = SamplingParams()
    wants = [
        (Row(greedy), 0),
        (Row(greedy, rules=Rules(2.0), prompt=(0,)), 1),
        (Row(greedy, rules=Rules(2.0), prompt=(0,), output=(1,)), 0),
        (Row(greedy, rules=Rules(0, 0.2), prompt=(0,)), 0),
        (Row(greedy, rules=Rules(0, 0.2), output=(0,)), 1),
        (Row(greedy, rules=Rules(0, 0, 0.5), output=(0, 0, 0, 1, 1)), 2),
        (Row(greedy, rules=Rules(logit_bias=((3, 100.0),))), 3),
        (Row(greedy, rules=Rules(logit_bias=((0, -100.0), (1, -100.0)))), 2),
        (Row(SamplingParams(1.0, top_k=1), rules=Rules(logit_bias=((2, 50.0),))), 2),
        (Row(SamplingParams(0.01), rules=Rules(logit_bias=((3, 20.0),))), 3),
    ]
    for (row, want), (tokens, *_) in zip(
        wants, run([row for row, _ in wants], [logits] * len(wants)), strict=True
    ):
        assert tokens == [want], row
        assert accept(row, logits)[0] == [want]


@pytest.mark.parametrize("times", [32766, 32767])
def test_counts_saturate(times: int) -> None:
    """A count ends at 32767, with the drafts too."""
    logits = np.array([[10.0, 0.0], [0.0, 0.0]])
    # Token 0 gains its count, token 1 as much as half a count more than the highest.
    rules = Rules(frequency_penalty=-1.0, logit_bias=((1, 32767.5),))
    row = Row(SamplingParams(), rules=rules, output=(0,) * times, drafts=(0,))
    assert run([row], [logits]) == [accept(row, logits)] == [([0, 1], 1, NOT_FINISHED)]


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)], ids=str)
def test_no_end_id_before_min_tokens(block: int, params: SamplingParams) -> None:
    """The end id is by far the likeliest at each position; it comes once it may."""
    end, other = 5, 2
    logits = np.zeros((block, 8))
    logits[:, end], logits[:, other] = 200, 100
    for num_emitted in (0, 3):
        for at in range(block + 1):  # the first position at which it may come
            row = Row(
                params,
                num_emitted=num_emitted,
                end_ids=(7, end),
                drafts=(other,) * (block - 1),
                rules=Rules(min_tokens=num_emitted + at),
            )
            (got,) = run([row], [logits])
            assert got == accept(row, logits)
            ends = at < block
            assert got[0] == [other] * min(at, block) + [end] * ends
            assert got[2] == (END_ID if ends else NOT_FINISHED)


def test_forced_tokens_that_are_only_drafted_are_not_said() -> None:
    table = plugins.make_slot_table(1)
    table["num_forced"], table["num_remaining"], table["forced_drafts"] = 1, 9, 1
    rows = (np.zeros(1, np.int32), np.array([0, 1], np.int32))
    tokens = np.zeros((1, 1), np.int32)
    outs = np.zeros((3, 1), np.int32)
    zeros = np.zeros(1, np.int32)
    logits = np.array([[0, 1]], np.float32)
    plugins.sample_accept(
        logits, table, *rows, zeros, zeros + 1, zeros, tokens, *outs, zeros[None].copy()
    )
    assert tokens.tolist() == [[1]]


# ---- drafts, seeds and cuts


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0])),
        top_k=int(rng.choice([0, 3, 20])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.1])),
    )


def random_rules(rng: np.random.Generator, vocab_size: int) -> Rules:
    biased = rng.choice(vocab_size, int(rng.choice([0, 0, 1, 7])), replace=False)
    return Rules(
        repetition_penalty=float(rng.choice([0.0, 1.0, 0.8, 1.7])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.6, -0.3])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.4, -0.2])),
        logit_bias=tuple(
            (int(t), float(b)) for t, b in zip(biased, rng.normal(0, 3, 7), strict=False)
        ),
        min_tokens=int(rng.choice([0, 0, 3, 60])),
    )


def test_random_batches_equal_the_reference(rng: np.random.Generator) -> None:
    for _ in range(60):
        rows: list[Row | None] = []
        logits = []
        for _ in range(int(rng.integers(1, 12))):
            num_drafts = int(rng.integers(0, 8))
            x = 2 * rng.normal(size=(num_drafts + 1, 30)).astype(np.float32)
            row = Row(
                random_params(rng),
                seed=int(rng.integers(0, 2**63)),
                num_emitted=int(rng.integers(0, 50)),
                num_remaining=int(rng.integers(0, 12)),
                finish_reason=int(rng.choice([0, 0, 0, 0, 1, 4])),
                end_ids=tuple(rng.integers(0, 30, rng.integers(0, 9)).tolist()),
                forced=tuple(rng.integers(0, 30, rng.choice([0, 0, 5, 60])).tolist()),
                rules=random_rules(rng, 30),
                prompt=tuple(rng.integers(0, 30, rng.integers(0, 12)).tolist()),
                output=tuple(rng.integers(0, 30, rng.integers(0, 40)).tolist()),
            )
            # What it would sample with all drafts right; then one wrong, or none.
            unlimited = replace(row, finish_reason=0, num_remaining=99)
            right: list[int] = []
            for i in range(num_drafts):
                step = replace(
                    unlimited,
                    num_emitted=row.num_emitted + i,
                    output=row.output + tuple(right),
                )
                right += accept(step, x[i : i + 1])[0]
            wrong = int(rng.integers(0, num_drafts + 1))
            right[wrong : wrong + 1] = [29 - t for t in right[wrong : wrong + 1]]
            rows.append(replace(row, drafts=tuple(right)))
            logits.append(x)
        rows.insert(int(rng.integers(0, len(rows) + 1)), None)
        filled = [np.empty((0, 30), np.float32) if r is None else logits.pop(0) for r in rows]
        got = run(rows, filled, plugins.ThreadPool(2))
        for row, x, result in zip(rows, filled, got, strict=True):
            assert result == (([], 0, NOT_FINISHED) if row is None else accept(row, x))


def generate(
    logits: np.ndarray, row: Row, drafter: Callable[[int, int], int], block: int
) -> tuple[list[int], int]:
    """All tokens of a request in rounds of `block` drafts, and how many rounds it took."""
    emitted: list[int] = []
    rounds = 0
    while True:
        first = row.num_emitted + len(emitted)
        drafts = tuple(drafter(first + i, rounds) for i in range(block))
        step = replace(
            row,
            num_emitted=first,
            num_remaining=row.num_remaining - len(emitted),
            drafts=drafts,
            output=tuple(emitted),
        )
        other = Row(SamplingParams(1.0), seed=rounds, drafts=drafts)
        noise = np.random.default_rng(rounds).normal(size=(block + 1, logits.shape[1]))
        (_, (tokens, _, reason)) = run([other, step], [noise, logits[first : first + block + 1]])
        emitted += tokens
        rounds += 1
        if reason != NOT_FINISHED:
            return emitted, rounds


@pytest.mark.parametrize("rules", [Rules(), REPEATING, Rules(1.2, 0, 0.5, ((3, 2.0),), 30)])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), PARAMS[9]], ids=str)
def test_seeded_tokens_do_not_depend_on_drafts(
    rng: np.random.Generator, params: SamplingParams, rules: Rules
) -> None:
    logits = rng.normal(size=(80, 40)).astype(np.float32)
    row = Row(params, seed=int(rng.integers(0, 2**63)), num_remaining=60, rules=rules, prompt=(3,))
    plain, rounds = generate(logits, row, lambda *_: 0, 0)
    assert rounds == 60
    plain_ids = plain + [0] * 20

    def wrong(index: int, _round: int) -> int:
        return (plain_ids[index] + 1) % 40

    def scripted(index: int, round_: int) -> int:
        return plain_ids[index] if (index + round_) % 3 else wrong(index, round_)

    assert generate(logits, row, lambda index, _: plain_ids[index], 5) == (plain, 10)
    assert generate(logits, row, wrong, 5) == (plain, 60)
    mixed, rounds = generate(logits, row, scripted, 5)
    assert mixed == plain
    assert 10 < rounds < 60


@pytest.mark.parametrize("block", [1, 4, 8])
def test_cuts_at_each_position(block: int) -> None:
    logits = np.where(np.arange(20) == np.arange(3, 3 + block)[:, None], 5.0, 0.0)
    right = tuple(range(3, 3 + block))
    row = Row(SamplingParams(), drafts=right[:-1])
    assert run([row], [logits]) == [(list(right), block - 1, NOT_FINISHED)]
    for cut in range(1, block + 1):
        ended = replace(row, end_ids=(19, right[cut - 1]))
        short = replace(row, num_remaining=cut)
        both = replace(ended, num_remaining=cut)
        late = replace(ended, num_remaining=cut - 1)
        got = run([ended, short, both, late], [logits] * 4)
        assert got[0] == (list(right[:cut]), block - 1, END_ID)
        assert got[1] == (list(right[:cut]), block - 1, LENGTH)
        assert got[2] == (list(right[:cut]), block - 1, END_ID)
        assert got[3] == (list(right[: cut - 1]), block - 1, LENGTH)


@pytest.mark.parametrize("right", range(6))
def test_accepts_as_far_as_the_drafts_are_right(right: int) -> None:
    forced = tuple(range(10, 16))
    drafts = tuple(t if i < right else 0 for i, t in enumerate(forced[:5]))
    row = Row(SamplingParams(1.0), forced=forced, drafts=drafts)
    logits = np.full((6, 20), np.nan)  # forced tokens look at none
    assert run([row], [logits]) == [(list(forced[: right + 1]), right, NOT_FINISHED)]


def test_rows_without_samples_and_finished_slots_emit_nothing() -> None:
    table = plugins.make_slot_table(2)
    table["num_remaining"], table["finish_reason"] = 5, [4, 0]
    tokens = np.full((2, 3), -7, np.int32)
    emitted, accepted, reasons = np.full((3, 2), -7, np.int32)
    rows = (np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
    starts = np.array([0, -1], np.int32)
    logits = np.zeros((1, 4), np.float32)
    ones = np.ones(2, np.int32)
    plugins.sample_accept(
        logits, table, *rows, starts, ones, ones, tokens, emitted, accepted, reasons
    )
    assert (tokens == -1).all()
    assert emitted.tolist() == accepted.tolist() == [0, 0]
    assert reasons.tolist() == [4, 0]


def test_refuses_what_does_not_fit() -> None:
    table = plugins.make_slot_table(1)
    rows = (np.zeros(1, np.int32), np.array([0, 3], np.int32))
    zeros = np.zeros(1, np.int32)
    ids = np.zeros(3, np.int32)
    outs = (ids, np.zeros((1, 2), np.int32), zeros.copy(), zeros.copy(), zeros.copy())
    with pytest.raises(
        ValueError, match=r"expected sample_start \+ sample_len of at most 1, found 2"
    ):
        plugins.sample_accept(np.zeros((1, 4), "f4"), table, *rows, zeros, zeros + 2, *outs)
    with pytest.raises(ValueError, match="expected sample_len of at most 2, got 3"):
        plugins.sample_accept(np.zeros((3, 4), "f4"), table, *rows, zeros, zeros + 3, *outs)
    with pytest.raises(ValueError, match="expected sample_len of at most the row's 3 tokens"):
        plugins.sample_accept(np.zeros((9, 4), "f4"), table, *rows, zeros, zeros + 4, *outs)
    with pytest.raises(ValueError, match=r"expected row_start to rise within \[0, 2\], found 3"):
        plugins.sample_accept(
            np.zeros((3, 4), "f4"), table, *rows, zeros, zeros + 1, ids[:2], *outs[1:]
        )

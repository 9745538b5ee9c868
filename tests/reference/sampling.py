"""The sampler's law with its rules for logits, its random streams and its accept rule."""

from dataclasses import dataclass, field

import numpy as np

NOT_FINISHED, END_ID, LENGTH = 0, 1, 2
MAX_COUNT = 0x7FFF
IN_PROMPT = 0x8000


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10: Salmon et al., SC 2011."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def stream_uniform(seed: int, index: int, lane: int) -> float:
    """The upper 24 bits of the first word, as a fraction."""
    mask = 0xFFFFFFFF
    counter = (index & mask, index >> 32, lane, 0)
    return (philox4x32(counter, (seed & mask, seed >> 32))[0] >> 8) / 2**24


@dataclass(frozen=True)
class SamplingParams:
    """As in the slot table: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_law(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The kept ids in order of falling probability, ties by id, and their probabilities.

    Each filter looks at what the one before it has kept, renormalised: top_k, then the shortest
    prefix that reaches top_p, then what has at least min_p times the highest probability. The
    table holds float32 parameters, so they are rounded first. Without a logit above -inf it is id
    0 for sure.
    """
    temperature, top_p, min_p = (
        float(np.float32(x)) for x in (params.temperature, params.top_p, params.min_p)
    )
    logits = logits.astype(np.float64)
    possible = np.flatnonzero(logits > -np.inf)  # NaN is not
    if len(possible) == 0:
        return np.zeros(1, np.int64), np.ones(1)
    order = possible[np.lexsort((possible, -logits[possible]))]
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    if params.top_k > 0:
        order, weights = order[: params.top_k], weights[: params.top_k]
    if top_p < 1:
        before = np.cumsum(weights) - weights
        kept = np.maximum(np.count_nonzero(before < top_p * weights.sum()), 1)
        order, weights = order[:kept], weights[:kept]
    kept = weights >= min_p * weights[0]
    order, weights = order[kept], weights[kept]
    return order, weights / weights.sum()


def sample(logits: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """One token: the arg max, or the inverse CDF of the law at `uniform`."""
    if params.temperature == 0:
        return 0 if np.isnan(logits).all() else int(np.nanargmax(logits))
    order, law = sampling_law(logits, params)
    return int(order[min(np.count_nonzero(np.cumsum(law) <= uniform), len(order) - 1)])


@dataclass(frozen=True)
class Rules:
    """As in the slot table: repetition_penalty 0 is off."""

    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0


def ruled_logits(
    logits: np.ndarray,
    rules: Rules,
    index: int,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    end_ids: tuple[int, ...] = (),
) -> np.ndarray:
    """The logits of a position whose token has `index` in the output, float32 [vocab_size]."""
    repetition, presence, frequency = (
        float(np.float32(x))
        for x in (rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty)
    )
    size = len(logits)
    counts = np.minimum(np.bincount(np.array(output, np.int64), minlength=size), MAX_COUNT)
    ruled = logits.astype(np.float64)
    if repetition > 0:
        seen = counts > 0
        seen[list(prompt)] = True
        ruled[seen] = np.where(ruled[seen] > 0, ruled[seen] / repetition, ruled[seen] * repetition)
    ruled -= frequency * counts + np.where(counts > 0, presence, 0.0)
    for token, bias in rules.logit_bias:
        ruled[token] += float(np.float32(bias))
    if index < rules.min_tokens:
        ruled[list(end_ids)] = -np.inf
    return ruled.astype(np.float32)


@dataclass
class Row:
    """What a slot brings to a round; `prompt` and `output` are what its token counts hold."""

    params: SamplingParams
    seed: int = 0
    num_emitted: int = 0
    num_remaining: int = 1 << 20
    finish_reason: int = NOT_FINISHED
    end_ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    drafts: tuple[int, ...] = field(default=())
    rules: Rules = field(default_factory=Rules)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def accept(row: Row, logits: np.ndarray) -> tuple[list[int], int, int]:
    """Emitted tokens, drafts accepted before the cut, finish reason; logits [1 + drafts, vocab]."""
    if row.finish_reason != NOT_FINISHED:
        return [], 0, row.finish_reason
    tokens: list[int] = []
    for i in range(len(row.drafts) + 1):
        index = row.num_emitted + i
        if index < len(row.forced):
            token = row.forced[index]
        else:
            ruled = ruled_logits(
                logits[i],
                row.rules,
                index,
                prompt=row.prompt,
                output=row.output + row.drafts[:i],
                end_ids=row.end_ids,
            )
            token = sample(ruled, row.params, stream_uniform(row.seed, index, 0))
        tokens.append(token)
        if i < len(row.drafts) and row.drafts[i] != token:
            break
    accepted = len(tokens) - 1
    emitted = tokens[: max(row.num_remaining, 0)]
    for i, token in enumerate(emitted):
        if token in row.end_ids:
            return emitted[: i + 1], accepted, END_ID
    return emitted, accepted, LENGTH if len(emitted) >= row.num_remaining else NOT_FINISHED

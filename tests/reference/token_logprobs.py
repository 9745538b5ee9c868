"""How likely a token was by its raw logits, and what was likelier, in float64."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Judged:
    """One emitted token: natural logarithms of probabilities, falling."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [vocab_size]; NaN is -inf, and of several +inf each gets the same share."""
    values = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    high = values.max()
    if high == -np.inf:
        return values
    if high == np.inf:
        return np.where(values == np.inf, -np.log((values == np.inf).sum()), -np.inf)
    return values - high - np.log(np.exp(values - high).sum())


def token_logprobs(logits: np.ndarray, token: int, num_top: int) -> Judged:
    """Judges a token by the logits [vocab_size] it was chosen from."""
    values = np.where(np.isnan(logits), -np.inf, logits)
    logprobs = log_softmax(logits)
    order = np.lexsort((np.arange(len(values)), -values))[:num_top]  # ties to the lowest id
    return Judged(
        float(logprobs[token]),
        1 + int((values > values[token]).sum()),
        order.tolist(),
        logprobs[order].tolist(),
    )

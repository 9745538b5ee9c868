"""Bias and GELU of a dense layer's output, in float64."""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def identity(v: np.ndarray) -> np.ndarray:
    return v


def gelu_tanh(v: np.ndarray) -> np.ndarray:
    return 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def gelu_erf(v: np.ndarray) -> np.ndarray:
    return 0.5 * v * (1 + _erf(v / math.sqrt(2)))

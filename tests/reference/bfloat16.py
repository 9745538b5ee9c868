"""bfloat16 as NumPy lacks it: the upper 16 bits of a float32."""

import numpy as np


def to_bits(x: np.ndarray) -> np.ndarray:
    """Rounds finite float32 numbers to bfloat16, to nearest even; returns the bits as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose bfloat16 bits these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

"""NumPy truth of the `linear` op and of bfloat16 numbers."""

import numpy as np
from numpy.typing import NDArray


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of x rounded to bfloat16, to nearest even; finite x only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_float32(weight: NDArray[np.uint16] | NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights as numbers: the bits of bfloat16 numbers, or float32 as they are."""
    return from_bfloat16(weight) if weight.dtype == np.uint16 else weight.astype(np.float32)


def linear(
    x: NDArray[np.float32], weight: NDArray[np.uint16] | NDArray[np.float32]
) -> NDArray[np.float64]:
    """Exact: x [num_tokens, in_dim], weight [out_dim, in_dim] in bfloat16 bits or float32."""
    return x.astype(np.float64) @ as_float32(weight).astype(np.float64).T


def linear_bound(
    x: NDArray[np.float32], weight: NDArray[np.uint16] | NDArray[np.float32]
) -> NDArray[np.float64]:
    """How far fp32 sums of 32 products, then of these sums, may lie from the exact sum.

    A product and its sum may round twice, where the machine has no fused multiply-add.
    """
    in_dim = x.shape[1]
    roundings = min(in_dim, 32) + 1 + -(-in_dim // 32)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(as_float32(weight)).astype(np.float64).T
    return roundings * 2.0**-24 * magnitude

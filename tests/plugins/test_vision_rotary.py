import numpy as np
import pytest
from reference.vision_rotary import vision_angles, vision_rotate
from vision_ops import TILE, kv_buffers

from runtime._native import plugins

THETA = 10000.0
# height and width in patches, merge_size, num_heads, head_dim
CASES = [(1, 1, 1, 1, 16), (2, 2, 2, 2, 32), (6, 10, 2, 4, 16), (8, 8, 2, 3, 64), (9, 15, 3, 2, 72),
         (4, 34, 2, 1, 128), (10, 14, 2, 2, 100)]  # fmt: skip


def angles_of(num_positions: int, head_dim: int) -> np.ndarray:
    angles = np.full((num_positions, 2, head_dim // 4), np.nan, np.float32)
    plugins.vision_rotary_angles(head_dim, THETA, angles)
    return angles


def run(
    qkv: np.ndarray,
    bias: np.ndarray,
    grid: tuple[int, int, int],
    heads: int,
    pieces: list[tuple[int, int]],
    pool: plugins.ThreadPool | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    head_dim = len(bias) // 3 // heads
    keys, values = kv_buffers(len(qkv), heads, head_dim)
    q = np.full((len(qkv), heads * head_dim), np.nan, np.float32)
    angles = angles_of(max(grid[:2]), head_dim)
    for first, end in pieces:
        plugins.vision_rotary(
            qkv[first:end], bias, angles, q[first:end], keys, values, *grid, first, pool
        )
    return q, keys, values


@pytest.mark.parametrize(("height", "width", "merge", "heads", "head_dim"), CASES)
def test_equals_reference_in_any_pieces(
    rng: np.random.Generator, height: int, width: int, merge: int, heads: int, head_dim: int
) -> None:
    num, grid = height * width, (height, width, merge)
    qkv = rng.normal(size=(num, 3 * heads * head_dim)).astype(np.float32)
    bias = rng.normal(size=3 * heads * head_dim).astype(np.float32)
    q, keys, values = run(qkv, bias, grid, heads, [(0, num)])

    parts = (qkv + bias).reshape(num, 3, heads, head_dim).swapaxes(0, 1)
    angles = vision_angles(*grid, head_dim, THETA)
    # [heads, tiles, head_dim, TILE] -> [patches, heads, head_dim]
    in_rows = keys.transpose(1, 3, 0, 2).reshape(-1, heads, head_dim)
    for got, part in ((q.reshape(num, heads, head_dim), parts[0]), (in_rows[:num], parts[1])):
        half = np.abs(part[..., : head_dim // 2]) + np.abs(part[..., head_dim // 2 :])
        bound = 3 * 2.0**-24 * np.concatenate([half, half], axis=-1)
        assert (np.abs(got - vision_rotate(part, angles)) <= bound).all()
    np.testing.assert_array_equal(values[:, :num, :head_dim], parts[2].swapaxes(0, 1))
    assert not in_rows[num:].any()
    assert not values[:, num:].any()
    assert not values[..., head_dim:].any()

    for step in (1, 5, 16, 48):
        pieces = [(first, min(first + step, num)) for first in range(0, num, step)]
        rng.shuffle(pieces)
        got = run(qkv, bias, grid, heads, pieces, plugins.ThreadPool(2))
        for a, b in zip(got, (q, keys, values), strict=True):
            assert a.tobytes() == b.tobytes()


def test_angles_are_those_of_float32_products() -> None:
    angles = angles_of(4096, 72)
    frequency = (1 / THETA ** (np.arange(18) / 18)).astype(np.float32)
    product = (np.arange(4096, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    np.testing.assert_allclose(angles[:, 0], np.cos(product), rtol=0, atol=2.0**-24)
    np.testing.assert_allclose(angles[:, 1], np.sin(product), rtol=0, atol=2.0**-24)


def test_refuses_what_does_not_fit() -> None:
    def call(
        head_dim: int = 32, patches: int = 4, positions: int = 2, tile: int = TILE, first: int = 0
    ) -> None:
        x = np.zeros((4, 3 * head_dim), np.float32)
        keys, values = kv_buffers(patches, 1, head_dim)
        plugins.vision_rotary(
            x,
            x[0],
            np.zeros((positions, 2, head_dim // 4), np.float32),
            np.zeros((4, head_dim), np.float32),
            np.ascontiguousarray(keys[..., :tile]),
            values,
            *(2, 2, 2),
            first,
        )

    call()
    for wrong in (12, 30, 132):
        with pytest.raises(ValueError, match=r"16 \.\. 128 that is a multiple of 4"):
            call(head_dim=wrong)
    with pytest.raises(ValueError, match=r"vision_rotary: expected keys of shape"):
        call(patches=65)
    with pytest.raises(ValueError, match=r"vision_rotary: expected keys of shape"):
        call(tile=32)
    with pytest.raises(ValueError, match="expected angles of 2 positions, found 1"):
        call(positions=1)
    with pytest.raises(ValueError, match="expected rows inside the 4 of the picture"):
        call(first=1)

import numpy as np
import pytest
from reference.vision_attention import vision_attention
from vision_ops import TILE, kv_buffers

from runtime._native import plugins

# num_patches, num_heads, head_dim: every number of vectors a value row can have, odd sizes
CASES = [(1, 1, 16), (4, 2, 32), (63, 3, 48), (64, 1, 64), (65, 2, 72), (130, 2, 80), (200, 1, 96),
         (257, 2, 100), (128, 1, 112), (300, 3, 128), (60, 4, 20)]  # fmt: skip


def lay_out(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[num_patches, num_heads, head_dim] each, in the op's layout."""
    num, heads, head_dim = keys.shape
    laid_keys, laid_values = kv_buffers(num, heads, head_dim)
    padded = np.zeros((laid_values.shape[1], heads, head_dim), np.float32)
    padded[:num] = keys
    laid_keys[:] = padded.reshape(-1, TILE, heads, head_dim).transpose(2, 0, 3, 1)
    laid_values[:] = 0
    laid_values[:, :num, :head_dim] = values.swapaxes(0, 1)
    return laid_keys, laid_values


def run(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    piece: int | None = None,
    pool: plugins.ThreadPool | None = None,
) -> np.ndarray:
    laid_out = lay_out(keys, values)
    flat = q.reshape(len(q), -1)
    out = np.full_like(flat, np.nan)
    step = piece or len(q)
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        plugins.vision_attention(
            flat[rows], *laid_out, len(keys), out[rows], q.shape[-1] ** -0.5, pool
        )
    return out.reshape(q.shape)


def bound(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The header's, for each output: errors of the weights times |value|, then of the sums."""
    num, _, head_dim = keys.shape
    scale = head_dim**-0.5
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    scores = scale * np.einsum("qhd,khd->hqk", q, keys)
    sizes = scale * np.einsum("qhd,khd->hqk", np.abs(q), np.abs(keys))
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True)
    of_weight = (head_dim + 4) * sizes + np.abs(scores) + np.abs(top) + 3 + num / 128
    of_sum = 2 * (num / 16 + 16)
    error = weights * (of_weight + (weights * of_weight).sum(-1, keepdims=True) + of_sum)
    return 2.0**-24 * np.einsum("hqk,khd->qhd", error, np.abs(values))


@pytest.mark.parametrize(("num", "heads", "head_dim"), CASES)
def test_equals_reference(rng: np.random.Generator, num: int, heads: int, head_dim: int) -> None:
    q, keys, values = rng.normal(size=(3, num, heads, head_dim)).astype(np.float32)
    q *= 2
    out = run(q, keys, values)
    error = np.abs(out - vision_attention(q, keys, values, head_dim**-0.5))
    assert (error <= bound(q, keys, values)).all()
    assert error.max() < 4e-6  # in practice errors add like their squares
    for piece in (1, 5, 48, 100):
        assert run(q, keys, values, piece).tobytes() == out.tobytes()
        threaded = run(q, keys, values, piece, plugins.ThreadPool(2))
        assert threaded.tobytes() == out.tobytes()


def test_many_patches(rng: np.random.Generator) -> None:
    q = rng.normal(size=(50, 2, 72)).astype(np.float32)
    keys, values = rng.normal(size=(2, 5003, 2, 72)).astype(np.float32)
    out = run(q, keys, values, pool=plugins.ThreadPool(2))
    want = vision_attention(q, keys, values, 72**-0.5)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


def test_out_may_be_q(rng: np.random.Generator) -> None:
    q, keys, values = rng.normal(size=(3, 150, 3, 32)).astype(np.float32)
    out = run(q, keys, values)
    flat = q.reshape(150, -1).copy()
    laid_out = lay_out(keys, values)
    plugins.vision_attention(flat, *laid_out, 150, flat, 32**-0.5, plugins.ThreadPool(2))
    assert flat.tobytes() == out.tobytes()


@pytest.mark.parametrize("order", [1, -1])
def test_scores_far_apart_do_not_overflow(rng: np.random.Generator, order: int) -> None:
    q, keys, values = rng.normal(size=(3, 300, 2, 64)).astype(np.float32)
    # The maximum moves with every block of keys, or stays with the first.
    keys *= 50 * np.linspace(0, 1, 300, dtype=np.float32)[::order, None, None]
    q *= 20
    out = run(q, keys, values)
    want = vision_attention(q, keys, values, 64**-0.5)
    assert np.isfinite(out).all()
    assert (np.abs(out - want) <= bound(q, keys, values)).all()


def test_equal_scores_are_a_mean(rng: np.random.Generator) -> None:
    values = rng.normal(size=(1000, 1, 64)).astype(np.float32)
    q, keys = np.zeros((7, 1, 64), np.float32), np.zeros((1000, 1, 64), np.float32)
    want = np.broadcast_to(values.mean(0, dtype=np.float64), q.shape)
    np.testing.assert_allclose(run(q, keys, values), want, rtol=0, atol=1e-6)


def test_a_nan_query_stays_in_its_row_and_head(rng: np.random.Generator) -> None:
    q, keys, values = rng.normal(size=(3, 70, 2, 32)).astype(np.float32)
    clean = run(q, keys, values)
    q[11, 1, 3] = np.nan
    out = run(q, keys, values)
    assert np.isnan(out[11, 1]).all()
    out[11, 1] = clean[11, 1]
    assert out.tobytes() == clean.tobytes()


def test_refuses_what_does_not_fit() -> None:
    def call(head_dim: int = 32, heads: int = 2, patches: int = 70, width: int = 64) -> None:
        keys, values = kv_buffers(70, heads, head_dim)
        q = np.zeros((3, width), np.float32)
        plugins.vision_attention(q, keys, values, patches, q, 1.0)

    for wrong, width in ((12, 24), (34, 68), (132, 264)):
        with pytest.raises(ValueError, match=r"head_dim in 16 \.\. 128 that is a multiple of 4"):
            call(head_dim=wrong, width=width)
    with pytest.raises(ValueError, match="expected num_patches > 0, found 0"):
        call(patches=0)
    with pytest.raises(ValueError, match="vision_attention: expected keys of shape"):
        call(patches=129)
    with pytest.raises(ValueError, match=r"expected q of shape \[3, 64\], found \[3, 65\]"):
        call(width=65)

"""Chunked Gated DeltaNet for training: batched matrix products and one short scan.

The chunk form of the recurrence (S is the state, [dk, dv], before a chunk of C tokens):

    L[i, j] = exp(G_i - G_j) for j <= i      G: running sum of g in the chunk
    M       = (I + A)^-1                     A: strictly lower part of (diag(beta) K K^T) * L
    U       = M diag(beta) V,   W = M diag(beta exp(G)) K
    O       = diag(exp(G)) Q S + ((Q K^T) * L) (U - W S)
    S'      = (exp(G_C) I - Kd^T W) S + Kd^T U,   Kd = diag(exp(G_C - G)) K

so that all but `S' = T S + B` is batched over the chunks. The inverse and the scan are opaque
operators with backward passes of their own: compilers neither unroll nor look into them.
"""

import torch
import torch.nn.functional as F  # noqa: N812 as everyone writes it
from torch import Tensor

CHUNK = 64


@torch.library.custom_op("nano::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(strict: Tensor) -> Tensor:
    """Inverts I + A by substitution; powers of A would explode where keys repeat.

    Args:
        strict: [..., C, C], A, strictly lower.
    """
    eye = torch.eye(strict.shape[-1], dtype=strict.dtype, device=strict.device)
    return torch.linalg.solve_triangular(
        strict + eye, eye.expand_as(strict), upper=False, unitriangular=True
    ).contiguous()


@unit_lower_inverse.register_fake
def _(strict: Tensor) -> Tensor:
    return torch.empty_like(strict, memory_format=torch.contiguous_format)


def _keep_inverse(ctx, inputs, output) -> None:  # noqa: ANN001 torch names these
    ctx.save_for_backward(output)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:  # noqa: ANN001
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_keep_inverse)


@torch.library.custom_op("nano::affine_scan", mutates_args=())
def affine_scan(transitions: Tensor, increments: Tensor) -> Tensor:
    """Runs S' = T S + B from zero and returns the state before each step.

    Args:
        transitions: [n, batch, k, k], T.
        increments: [n, batch, k, v], B.

    Returns:
        [n, batch, k, v], S before step 0, 1, ...
    """
    states = torch.zeros_like(increments, memory_format=torch.contiguous_format)
    for step in range(increments.shape[0] - 1):
        torch.baddbmm(increments[step], transitions[step], states[step], out=states[step + 1])
    return states


@affine_scan.register_fake
def _(transitions: Tensor, increments: Tensor) -> Tensor:
    return torch.empty_like(increments, memory_format=torch.contiguous_format)


@torch.library.custom_op("nano::affine_scan_backward", mutates_args=())
def affine_scan_backward(transitions: Tensor, grads: Tensor) -> Tensor:
    """Returns the gradient of the state after each step: D = grad + T'^T D'."""
    after = torch.zeros_like(grads, memory_format=torch.contiguous_format)
    for step in range(grads.shape[0] - 2, -1, -1):
        torch.baddbmm(
            grads[step + 1],
            transitions[step + 1].transpose(-1, -2),
            after[step + 1],
            out=after[step],
        )
    return after


@affine_scan_backward.register_fake
def _(transitions: Tensor, grads: Tensor) -> Tensor:
    return torch.empty_like(grads, memory_format=torch.contiguous_format)


def _keep_scan(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
    transitions, states = ctx.saved_tensors
    after = affine_scan_backward(transitions, grad.contiguous())
    return after @ states.transpose(-1, -2), after


affine_scan.register_autograd(_scan_backward, setup_context=_keep_scan)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet over whole sequences, in fp32.

    Args:
        q: [batch, heads, tokens, dk], normalised and scaled; tokens a multiple of `CHUNK`.
        k: Same shape, normalised.
        v: [batch, heads, tokens, dv].
        g: [batch, heads, tokens], log decay, <= 0.
        beta: Same shape.

    Returns:
        [batch, heads, tokens, dv].
    """
    batch, heads, num_tokens, dk = q.shape
    dv, rows = v.shape[-1], batch * heads
    num_chunks = num_tokens // CHUNK
    q, k, v = (x.reshape(rows, num_chunks, CHUNK, -1).transpose(0, 1) for x in (q, k, v))
    g, beta = (x.reshape(rows, num_chunks, CHUNK).transpose(0, 1) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, 0.0)
    decay = gap.exp().masked_fill(~lower, 0.0)
    weighted = beta[..., None] * k
    strict = ((weighted @ k.transpose(-1, -2)) * decay).tril(-1)
    inverse = unit_lower_inverse(strict)
    u = inverse @ (beta[..., None] * v)
    w = inverse @ (weighted * total.exp()[..., None])
    last = total[..., -1:]
    faded = (k * (last - total).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(dk, dtype=q.dtype, device=q.device)
    transitions = last.exp()[..., None] * eye - faded @ w
    states = affine_scan(transitions.contiguous(), (faded @ u).contiguous())
    scores = (q @ k.transpose(-1, -2)) * decay
    out = (q * total.exp()[..., None]) @ states + scores @ (u - w @ states)
    return out.transpose(0, 1).reshape(batch, heads, num_tokens, dv)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution as four shifted products, then silu.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, 1, taps], the last tap for the token itself.
    """
    taps, num_tokens = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    parts = [padded[:, tap : tap + num_tokens] * weight[:, 0, tap] for tap in range(taps)]
    return F.silu(sum(parts[1:], parts[0]))

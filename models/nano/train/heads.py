"""What guides the training besides the text: linear heads that name the glyphs of a patch."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 as everyone writes it
from torch import Tensor

from models.nano.config import CONFIG, MERGE
from models.nano.train.forward import layer_norm, linear
from models.nano.train.paint import GRID, NUM_CLASSES

CELLS = GRID[0] * GRID[1]
WIDTHS = {"patch": CONFIG["vision_config"]["hidden_size"],
          "merged": CONFIG["vision_config"]["out_hidden_size"]}  # fmt: skip


def initial_heads(seed: int) -> dict[str, Tensor]:
    """Draws the heads, fp32: one on the last block's patches, one on the image tokens."""
    rng = torch.Generator().manual_seed(seed)
    heads = {}
    for name, width in WIDTHS.items():
        rows = CELLS * (1 if name == "patch" else MERGE**2) * NUM_CLASSES
        heads[f"{name}.norm.weight"] = torch.ones(width)
        heads[f"{name}.norm.bias"] = torch.zeros(width)
        heads[f"{name}.weight"] = torch.randn(rows, width, generator=rng) * 0.7 / math.sqrt(width)
        heads[f"{name}.bias"] = torch.zeros(rows)
    return heads


def glyph_loss(
    x: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, cells: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Names the glyph of each cell.

    Args:
        x: [pages, rows, width].
        norm: [width]; `norm_bias` alike.
        norm_bias: See above.
        weight: [cells of a row * NUM_CLASSES, width]; `bias` [the same].
        bias: See above.
        cells: [pages, rows, cells of a row] int64, 0 for an empty cell.
        dtype: Of the matrix product.

    Returns:
        The mean cross-entropy of the cells with a glyph plus that of the empty ones: a mean over
        all would rest at "always empty"; and the share of glyphs named rightly.
    """
    logits = linear(layer_norm(x, norm, norm_bias), weight, dtype, bias)
    logits = logits.reshape(-1, NUM_CLASSES).float()
    flat = cells.reshape(-1)
    missed = F.cross_entropy(logits, flat, reduction="none")
    shown = (flat > 0).float()
    num_shown = shown.sum().clamp(min=1)
    loss = (missed * shown).sum() / num_shown
    loss = loss + (missed * (1 - shown)).sum() / (1 - shown).sum().clamp(min=1)
    right = ((logits.argmax(-1) == flat).float() * shown).sum() / num_shown
    return loss, right


def text_loss(logits: Tensor, labels: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the text.

    Args:
        logits: [pages, tokens, vocabulary].
        labels: [pages, tokens], -100 where there is nothing to say.
        kinds: [pages, tokens], kind of text.

    Returns:
        The mean, and for natural and for random text [2, 3]: summed loss, right ids, ids.
    """
    logits = logits.reshape(-1, logits.shape[-1]).float()
    flat, kinds = labels.reshape(-1), kinds.reshape(-1)
    missed = F.cross_entropy(logits, flat, ignore_index=-100, reduction="none")
    valid = (flat >= 0).float()
    right = (logits.argmax(-1) == flat).float()
    rows = [
        torch.stack([(missed * part).sum(), (right * part).sum(), part.sum()])
        for part in (valid * (kinds == 0), valid * (kinds == 1))
    ]
    return missed.sum() / valid.sum().clamp(min=1), torch.stack(rows).detach()

"""Paints batches of pages on the device, ages them, and derives what the encoder must know.

Pictures come from glyph atlases: a scatter of integers, so the same batch and generator give the
same picture. Appearance follows `data/draw.py`, which draws the pages for scores with Pillow.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 as everyone writes it
from torch import Tensor

from models.nano.config import CELL, MERGE, PATCH
from models.nano.data.batches import Batch
from models.nano.data.faces import BIG_CELL, BIG_ORIGIN, CHARACTERS, SMALL_CELL, SMALL_ORIGIN
from models.nano.tokenizer import FIRST_IMAGE_INDEX, NUM_PROMPT_IDS
from models.nano.train.forward import merge_order

GRID = (2, 4)
"""Cells down and across a patch; each says which glyph has its centre there."""
NUM_CLASSES = len(CHARACTERS)
"""Class 0, the space, stands for a cell without a glyph."""


@dataclass(frozen=True)
class Painted:
    """What a training step takes.

    Attributes:
        patches: [pages, patches, 768] in -1..1, merge-block order.
        cells: [pages, patches, 8] int64, class of the glyph in each cell of a patch.
        texts: [pages, max_text] int64.
        labels: [pages, num_tokens] int64, the id that follows, or -100.
        kinds: [pages, num_tokens] int64, kind of text of the label.
        targets: Two of [pages, num_tokens] int64, where the guided heads should look, or -1.
    """

    patches: Tensor
    cells: Tensor
    texts: Tensor
    labels: Tensor
    kinds: Tensor
    targets: list[Tensor]


class Painter:
    """Holds the atlases on the device."""

    def __init__(self, small: np.ndarray, big: np.ndarray, device: torch.device) -> None:
        """Takes what `faces.load_glyphs` drew."""
        self.device = device
        self._small = torch.from_numpy(small.reshape(-1, SMALL_CELL**2)).to(device)
        self._big = torch.from_numpy(big.reshape(-1, BIG_CELL**2)).to(device)
        index = torch.arange(8, dtype=torch.float32, device=device)
        self._dct = torch.cos((index + 0.5) * index[:, None] * math.pi / 8) / 2
        self._dct[0] /= math.sqrt(2)
        self._quantiser = torch.tensor(LUMINANCE, dtype=torch.float32, device=device).view(8, 8)

    @torch.no_grad()
    def paint(self, batch: Batch, seed: int, *, clean: bool = False) -> Painted:
        """Paints a batch.

        Args:
            batch: The pages.
            seed: Of the appearance.
            clean: Black on white, not turned.

        Returns:
            Inputs and labels of a step.
        """
        put = lambda array: torch.from_numpy(array).to(self.device, non_blocking=True)  # noqa: E731
        rng = torch.Generator(self.device).manual_seed(seed)
        cover = self._glyphs(batch, put)
        cover = torch.maximum(cover, boxes(put(batch.rules), cover.shape[1:]))
        tone = torch.maximum(cover, boxes(put(batch.shades), cover.shape[1:]))
        centre = put(batch.centre)
        if clean:
            rgb = (1 - tone)[:, None].expand(-1, 3, -1, -1)
        else:
            tone, centre = self._turn(tone, centre, rng)
            rgb = self._age(tone, rng)
        rgb = (rgb.clamp(0, 1) * 255).round() / 255
        return self._assemble(batch, rgb * 2 - 1, centre, put)

    def _glyphs(self, batch: Batch, put) -> Tensor:  # noqa: ANN001 a local function
        count, (height, width) = len(batch.texts), (batch.shape.height, batch.shape.width)
        page = torch.zeros(count * height * width, dtype=torch.int32, device=self.device)
        for big, atlas, cell, origin in (
            (False, self._small, SMALL_CELL, SMALL_ORIGIN),
            (True, self._big, BIG_CELL, BIG_ORIGIN),
        ):
            where = np.nonzero((batch.glyph >= 0) & (batch.is_big == big))  # here: no device waits
            rows, at = put(where[0]), put(batch.corner[where]).long()
            offset = torch.arange(cell, device=self.device)
            xs = at[:, 0, None] - origin[0] + offset
            ys = at[:, 1, None] - origin[1] + offset
            inside = ((ys >= 0) & (ys < height))[:, :, None] & ((xs >= 0) & (xs < width))[:, None]
            flat = (rows[:, None] * height + ys.clamp(0, height - 1))[:, :, None] * width
            flat = flat + xs.clamp(0, width - 1)[:, None]
            ink = atlas[put(batch.glyph[where]).long()].view(-1, cell, cell).int() * inside
            page.scatter_add_(0, flat.flatten(), ink.flatten())
        return page.view(count, height, width).clamp(max=255).float() / 255

    def _uniform(self, rng: torch.Generator, count: int, low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=rng, device=self.device) * (high - low) + low

    def _colour(self, rng: torch.Generator, count: int, low: float, high: float) -> Tensor:
        drawn = torch.rand(count, 3, 1, 1, generator=rng, device=self.device)
        return drawn * (high - low) + low

    def _turn(self, tone: Tensor, centre: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        count, height, width = tone.shape
        turned = (self._uniform(rng, count, 0, 1) < 0.5).float()
        angle = self._uniform(rng, count, -0.021, 0.021) * turned
        skew = self._uniform(rng, count, -0.01, 0.01) * turned
        scale = 1 + self._uniform(rng, count, -0.02, 0.02) * turned
        cos, sin = angle.cos() * scale, angle.sin() * scale
        # Where a point of the new page comes from, in pixels from the middle.
        matrix = torch.cat([torch.cat([cos, sin + skew], 2), torch.cat([-sin, cos], 2)], 1)
        unit = torch.tensor([width / 2, height / 2], device=self.device)
        theta = torch.cat([matrix * unit / unit[:, None], torch.zeros_like(matrix[:, :, :1])], 2)
        grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
        new = F.grid_sample(tone[:, None], grid, align_corners=False)[:, 0]
        moved = (centre - unit) @ torch.linalg.inv(matrix).transpose(1, 2) + unit
        return new, moved

    def _age(self, tone: Tensor, rng: torch.Generator) -> Tensor:
        count, height, width = tone.shape
        spread = self._uniform(rng, count, -0.3, 0.2).clamp(min=0)
        for axis in (1, 2):
            before, after = tone.roll(1, axis), tone.roll(-1, axis)
            tone = tone * (1 - 2 * spread) + (before + after) * spread
        tone = tone ** self._uniform(rng, count, -0.35, 0.35).exp()
        quality = self._uniform(rng, count, 35, 95)
        tone = torch.where(self._uniform(rng, count, 0, 1) < 0.4, self._jpeg(tone, quality), tone)
        clean = self._uniform(rng, count, 0, 1) < 0.2
        paper = self._uniform(rng, count, 0.85, 1.0)[..., None] - self._colour(
            rng, count, 0.0, 0.06
        )
        ink = self._uniform(rng, count, 0.0, 0.3)[..., None] + self._colour(rng, count, -0.05, 0.08)
        paper = torch.where(clean[..., None], torch.ones_like(paper), paper)
        ink = torch.where(clean[..., None], torch.zeros_like(ink), ink)
        rgb = paper + (ink - paper) * tone[:, None]
        slope = self._uniform(rng, count, -0.1, 0.1) * ~clean
        rgb = rgb * (1 - slope * torch.linspace(0, 1, width, device=self.device))[:, None]
        noise = torch.randn(count, height, width, generator=rng, device=self.device)
        return rgb + (noise * self._uniform(rng, count, 0, 0.035) * ~clean)[:, None]

    def _jpeg(self, tone: Tensor, quality: Tensor) -> Tensor:
        """Rounds the coefficients of 8 x 8 blocks as a JPEG file of that quality does."""
        count, height, width = tone.shape
        scale = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
        step = (self._quantiser * scale).clamp(min=1).view(count, 1, 1, 8, 8)
        blocks = tone.view(count, height // 8, 8, width // 8, 8).transpose(2, 3) * 255
        rounded = (self._dct @ blocks @ self._dct.T / step).round() * step
        blocks = self._dct.T @ rounded @ self._dct / 255
        return blocks.transpose(2, 3).reshape(count, height, width).clamp(0, 1)

    def _assemble(self, batch: Batch, rgb: Tensor, centre: Tensor, put) -> Painted:  # noqa: ANN001
        shape = batch.shape
        count, grid = len(batch.texts), (shape.height // PATCH, shape.width // PATCH)
        split = rgb.reshape(count, 3, grid[0], PATCH, grid[1], PATCH).permute(0, 1, 3, 5, 2, 4)
        patches = merge_order(split, grid).permute(0, 4, 1, 2, 3).reshape(count, -1, 3 * PATCH**2)

        inside = (put(batch.glyph) >= 0) & (centre >= 0).all(-1)
        inside &= (centre[..., 0] < shape.width) & (centre[..., 1] < shape.height)
        tall, wide = PATCH // GRID[0], PATCH // GRID[1]
        rows = (centre[..., 1] / tall).long().clamp(0, shape.height // tall - 1)
        columns = (centre[..., 0] / wide).long().clamp(0, shape.width // wide - 1)
        across = shape.width // wide
        cells = torch.zeros(count, shape.height // tall * across, dtype=torch.int64,
                            device=self.device)  # fmt: skip
        cells.scatter_reduce_(1, rows * across + columns, put(batch.char).long() * inside, "amax")
        cells = cells.view(count, grid[0], GRID[0], grid[1], GRID[1]).permute(0, 2, 4, 1, 3)
        cells = merge_order(cells, grid).permute(0, 3, 1, 2).reshape(count, -1, GRID[0] * GRID[1])

        token = (centre[..., 1] / CELL).long() * (shape.width // CELL)
        token = token + (centre[..., 0] / CELL).long() + FIRST_IMAGE_INDEX
        token = torch.where(inside, token, -1)
        token = torch.cat([token, torch.full_like(token[:, :1], -1)], 1)  # glyph -1 is nowhere
        num_image = grid[0] * grid[1] // MERGE**2
        length = shape.num_tokens
        first = NUM_PROMPT_IDS + num_image
        current = torch.full((count, length), -1, device=self.device)
        following, labels = current.clone(), torch.full_like(current, -100)
        kinds = torch.zeros_like(current)
        # A query stands on an id: it has read that one, and writes the next.
        end = first + shape.max_text
        current[:, first:end] = token.gather(1, put(batch.current).long() % token.shape[1])
        following[:, first - 1 : end] = token.gather(
            1, put(batch.following).long() % token.shape[1]
        )
        texts = put(batch.texts).long()
        counted = torch.arange(shape.max_text, device=self.device) < put(batch.lengths)[:, None]
        labels[:, first - 1 : end - 1] = torch.where(counted, texts, -100)
        kinds[:, first - 1 : end - 1] = put(batch.kinds).long()
        return Painted(patches, cells, texts, labels, kinds, [current, following])


def boxes(rules: Tensor, size: torch.Size) -> Tensor:
    """Fills boxes.

    Args:
        rules: [pages, n, 5]: x0, y0, x1, y1 in pixels, and ink.
        size: Height and width.

    Returns:
        [pages, height, width], the ink of the boxes, 0 elsewhere.
    """
    ys = torch.arange(size[0], device=rules.device)
    xs = torch.arange(size[1], device=rules.device)
    x0, y0, x1, y1, ink = rules.round(decimals=3).unbind(-1)
    x0, y0, x1, y1 = (v.round()[..., None] for v in (x0, y0, x1, y1))
    down = ((ys >= y0) & (ys < y1)).float() * ink[..., None]
    across = ((xs >= x0) & (xs < x1)).float()
    return (down.transpose(1, 2) @ across).clamp(max=1)


LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
"""The quantisation table of ITU-T T.81, annex K, table K.1, by rows."""

"""The curriculum: what is read when, and when a stage is done."""

from dataclasses import dataclass, replace

from models.nano.data.batches import Order
from models.nano.data.pages import FIRST_MIX, SHAPES, TRAINING_MIX, Mix

MIDDLE_MIX = Mix((0.35, 0.50, 0.15), (0.42, 0.20, 0.04, 0.12, 0.12, 0.10))


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: What logs call it.
        shapes: Key of `SHAPES`, pages a batch, share of the batches.
        mix: Of texts and layouts.
        glyph_weight: Of the two glyph losses.
        guide_weight: Of the guide losses.
        done_below: The running loss on random strings, nats, that ends the stage.
        min_steps: Not before so many steps.
        max_share: Of the whole run's time; the last stage takes what is left.
    """

    name: str
    shapes: tuple[tuple[str, int, float], ...]
    mix: Mix
    glyph_weight: float
    guide_weight: float
    done_below: float
    min_steps: int
    max_share: float

    def order(self, seed: int, scale: float) -> Order:
        """Returns what the loader makes; `scale` shrinks the batches for small machines."""
        shapes = tuple(
            (SHAPES[name], max(1, round(count * scale)), share)
            for name, count, share in self.shapes
        )
        return Order(shapes, self.mix, seed)


STAGES = (
    Stage("strips", (("strip", 512, 1.0),), FIRST_MIX, 1.0, 0.3, 0.20, 200, 0.22),
    Stage("cards", (("card", 192, 0.8), ("strip", 512, 0.2)), MIDDLE_MIX,
          0.3, 0.1, 0.15, 200, 0.10),
    Stage(
        "pages",
        (("wide", 64, 0.25), ("tall", 64, 0.25), ("sheet", 64, 0.20), ("half", 64, 0.08),
         ("card", 192, 0.12), ("strip", 512, 0.10)),
        TRAINING_MIX, 0.3, 0.1, 0.0, 0, 1.0,
    ),
)  # fmt: skip

GUIDE_STEP, GUIDE_BOUND = 300, 1.2
"""A fresh run whose mean guide loss is above the bound at that step is broken."""
GLYPH_STEP, GLYPH_BOUND = 500, 0.05
"""A fresh run that names a smaller share of the glyphs at that step is broken."""


def smoke_stages() -> tuple[Stage, ...]:
    """Returns a stage a page shape that ends with its first line of the log."""
    each = {part[0]: (stage, part) for stage in STAGES for part in stage.shapes}
    return tuple(
        replace(stage, name=f"smoke {name}", shapes=((name, count, 1.0),), max_share=0.0)
        for name, (stage, (_, count, _)) in each.items()
    )

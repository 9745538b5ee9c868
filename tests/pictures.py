"""Pictures for tests, and prompts that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from data.make_tiny_qwen3_5 import make_image

from runtime import Image

if TYPE_CHECKING:
    import random

IMAGE_ID = 500  # of the tiny checkpoints
FACTOR = 32  # pixels of a token's side


def picture(width: int, height: int, number: int, digest: bytes = b"") -> Image:
    return Image(np.ascontiguousarray(make_image(width, height, number)), digest)


def noise(width: int, height: int, seed: int, digest: bytes = b"") -> Image:
    rng = np.random.default_rng(seed)
    return Image(rng.integers(0, 256, (height, width, 3), dtype=np.uint8), digest)


def placeholders(image: Image) -> list[int]:
    """The ids that stand for a picture."""
    return [IMAGE_ID] * (image.height // FACTOR * (image.width // FACTOR))


def random_pages(rng: random.Random, most: int = 2) -> dict[str, Any]:
    """Keywords of a request with pictures among random text."""
    images = [
        noise(FACTOR * rng.randint(1, 8), FACTOR * rng.randint(1, 8), rng.getrandbits(32))
        for _ in range(rng.randint(1, most))
    ]
    ids: list[int] = []
    for image in images:
        ids += [rng.randrange(490) for _ in range(rng.randint(1, 70))] + placeholders(image)
    ids += [rng.randrange(490) for _ in range(rng.randint(1, 70))]
    return {"input_token_ids": ids, "images": images}

"""The pages that scores are taken on: chosen once, frozen in `heldout.jsonl`.

    python -m models.nano.data.heldout --write      # once, before training
    python -m models.nano.data.heldout --check      # the list still gives the same texts

Their paragraphs and words are never trained on; half of them use faces that never are, either. A
line has what makes the page again: shape, layout, kind of text, seed, and the digest of its text.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from models.nano.data.batches import load_maker
from models.nano.data.draw import draw_appearance, draw_page
from models.nano.data.faces import Face, Metrics, cached_metrics, list_faces, restore_metrics
from models.nano.data.fetch import CACHE
from models.nano.data.pages import LAYOUTS, SHAPES, Mix, Page, PageMaker

LIST = Path(__file__).with_name("heldout.jsonl")
NUM_PAGES = {("natural", "seen"): 170, ("natural", "unseen"): 130,
             ("random", "seen"): 100, ("random", "unseen"): 100}  # fmt: skip
SHAPE_SHARES = {"wide": 0.30, "tall": 0.30, "sheet": 0.24, "half": 0.06, "card": 0.05,
                "strip": 0.05}  # fmt: skip
LAYOUT_SHARES = (0.20, 0.25, 0.20, 0.15, 0.10, 0.10)
DENSE = ("plain", "article", "columns")
MIN_WORDS = 120
"""Of the dense layouts on the large shapes."""


@dataclass(frozen=True)
class Entry:
    """A line of the list.

    Attributes:
        shape: Key of `SHAPES`.
        layout: Key of `LAYOUTS`.
        kind: natural or random.
        fonts: seen or unseen.
        seed: Of the page and its appearance.
        words: How many there are.
        sha256: Of the Markdown.
    """

    shape: str
    layout: str
    kind: str
    fonts: str
    seed: int
    words: int
    sha256: str


def digest(text: str) -> str:
    """Returns the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


class HeldOut:
    """Makes the held-out pages and their pictures."""

    def __init__(self, cache: Path, metrics: Metrics) -> None:
        """Loads both sides of the fonts and the held-out side of the texts."""
        self.faces: list[Face] = list_faces(cache)
        self._makers: dict[str, PageMaker] = {
            fonts: load_maker(cache, metrics, held_out_text=True, held_out_fonts=unseen)
            for fonts, unseen in (("seen", False), ("unseen", True))
        }

    def page(self, shape: str, layout: str, kind: str, fonts: str, seed: int) -> Page:
        """Returns a page."""
        shares = tuple(float(name == layout) for name in LAYOUTS)
        kinds = (1.0, 0.0, 0.0) if kind == "natural" else (0.0, 1.0, 0.0)
        return self._makers[fonts].page(seed, SHAPES[shape], Mix(kinds, shares))

    def picture(self, page: Page, seed: int) -> np.ndarray:
        """Returns [height, width, 3] uint8."""
        look = draw_appearance(np.random.Generator(np.random.PCG64([seed, 1])))
        return draw_page(page, self.faces, look, seed)

    def entry_page(self, entry: Entry) -> Page:
        """Returns the page of a line."""
        return self.page(entry.shape, entry.layout, entry.kind, entry.fonts, entry.seed)

    def choose(self) -> Iterator[Entry]:
        """Draws a list."""
        rng = np.random.Generator(np.random.PCG64(20_26))
        for (kind, fonts), count in NUM_PAGES.items():
            for _ in range(count):
                shape = str(rng.choice(list(SHAPE_SHARES), p=list(SHAPE_SHARES.values())))
                layout = str(rng.choice(list(LAYOUTS), p=LAYOUT_SHARES))
                large = SHAPES[shape].max_text > 800
                least = MIN_WORDS if large and layout in DENSE else 40 if large else 6
                while True:
                    seed = int(rng.integers(2**53))
                    page = self.page(shape, layout, kind, fonts, seed)
                    words = len(page.text.split())
                    if words >= least:
                        yield Entry(shape, layout, kind, fonts, seed, words, digest(page.text))
                        break


def read_list() -> list[Entry]:
    """Returns the frozen list."""
    return [Entry(**json.loads(line)) for line in LIST.read_text().splitlines()]


def main() -> None:
    """Writes or checks the list."""
    parser = argparse.ArgumentParser(description="The list of held-out pages.")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--write", action="store_true", help="choose a new list")
    parser.add_argument("--check", action="store_true", help="make every page of the list")
    args = parser.parse_args()
    held_out = HeldOut(args.cache, restore_metrics(cached_metrics(args.cache, workers=2)))
    if args.write:
        lines = [json.dumps(asdict(entry)) for entry in held_out.choose()]
        LIST.write_text("\n".join(lines) + "\n")
    if args.check:
        changed = [e for e in read_list() if digest(held_out.entry_page(e).text) != e.sha256]
        if changed:
            raise SystemExit(f"{len(changed)} pages have another text now; first: {changed[0]}")


if __name__ == "__main__":
    main()

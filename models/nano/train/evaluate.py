"""Scores a checkpoint on the held-out pages.

    python -m models.nano.train.evaluate --checkpoint DIR --out FILE [--pages N]

Pages are drawn by Pillow and read greedily; scores are told apart by text, fonts, layout, shape and
density. One batch holds pages of one shape.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from models.nano.config import PATCH
from models.nano.data.faces import cached_metrics, restore_metrics
from models.nano.data.fetch import CACHE
from models.nano.data.heldout import Entry, HeldOut, digest, read_list
from models.nano.data.pages import SHAPES
from models.nano.tokenizer import make_tokenizer
from models.nano.train.decode import read_pages
from models.nano.train.forward import Weights, make_tables, merge_order, padded_length
from models.nano.train.score import cell_counts, edit_distance
from models.nano.train.weights import load_checkpoint

ROOM = 64
"""Ids that a page may get beyond what its shape holds."""
DENSE_WORDS = 120
NUM_WORST = 6


@dataclass(frozen=True)
class Reading:
    """What became of a page.

    Attributes:
        entry: The page.
        want: Its Markdown.
        got: What was read.
        errors: Edit distance.
        ended: Whether the model stopped by itself.
    """

    entry: Entry
    want: str
    got: str
    errors: int
    ended: bool


_held_out: list[HeldOut] = []


def _open(cache: Path, metrics_path: Path) -> None:
    _held_out.append(HeldOut(cache, restore_metrics(metrics_path)))


def _draw(entry: Entry) -> tuple[str, np.ndarray]:
    page = _held_out[0].entry_page(entry)
    return page.text, _held_out[0].picture(page, entry.seed)


def draw_entries(
    entries: list[Entry], cache: Path, metrics_path: Path, workers: int
) -> list[tuple[str, np.ndarray]]:
    """Returns Markdown and picture of each page."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _open, (cache, metrics_path)) as pool:
        return list(pool.map(_draw, entries, chunksize=8))


def patches_of(pictures: np.ndarray, device: torch.device) -> Tensor:
    """Cuts [pages, height, width, 3] uint8 into what the vision encoder takes."""
    rgb = torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    count, _, height, width = rgb.shape
    grid = (height // PATCH, width // PATCH)
    split = rgb.reshape(count, 3, grid[0], PATCH, grid[1], PATCH).permute(0, 1, 3, 5, 2, 4)
    return merge_order(split, grid).permute(0, 4, 1, 2, 3).reshape(count, -1, 3 * PATCH**2)


def read_entries(
    weights: Weights,
    entries: list[Entry],
    drawn: list[tuple[str, np.ndarray]],
    batch: int,
    deadline: float,
) -> list[Reading]:
    """Reads pages, shape by shape, until `deadline` of the monotonic clock."""
    device = next(iter(weights.values())).device
    tokenizer = make_tokenizer()
    by_shape = defaultdict(list)
    for index, entry in enumerate(entries):
        by_shape[entry.shape].append(index)
    groups = [
        (name, places[i : i + batch])
        for name, places in by_shape.items() for i in range(0, len(places), batch)
    ]  # fmt: skip
    readings = []
    for name, places in groups:
        if time.monotonic() > deadline:
            print(f"no time for {len(places)} pages of {name}", flush=True)
            continue
        shape = SHAPES[name]
        num_image = shape.height * shape.width // (4 * PATCH**2)
        length = padded_length(num_image, shape.max_text + ROOM)
        tables = make_tables(shape.height, shape.width, length, device)
        patches = patches_of(np.stack([drawn[i][1] for i in places]), device)
        texts, ended = read_pages(weights, patches, tables, shape.max_text + ROOM)
        for place, ids, done in zip(places, texts, ended, strict=True):
            got, want = tokenizer.decode(ids, skip_special_tokens=False), drawn[place][0]
            errors = edit_distance(got, want)
            readings.append(Reading(entries[place], want, got, errors, done))
    return readings


def summary(readings: list[Reading]) -> dict[str, Any]:
    """Returns the scores of some pages."""
    chars = sum(len(r.want) for r in readings)
    cells = np.sum([cell_counts(r.got, r.want) for r in readings], 0)
    result = {
        "pages": len(readings),
        "characters": chars,
        "cer": round(sum(r.errors for r in readings) / max(chars, 1), 6),
        "cer_median_page": statistics.median(r.errors / max(len(r.want), 1) for r in readings),
        "perfect": round(sum(r.errors == 0 for r in readings) / len(readings), 4),
        "ended": round(sum(r.ended for r in readings) / len(readings), 4),
        "words_median": statistics.median(r.entry.words for r in readings),
    }
    if cells[2]:
        result["cell_f1"] = round(float(2 * cells[0] / (cells[1] + cells[2])), 4)
    return result


def report(readings: list[Reading]) -> dict[str, Any]:
    """Returns the scores of all groups, and the worst pages in full."""
    groups: dict[str, list[Reading]] = defaultdict(list)
    for r in readings:
        e = r.entry
        density = "dense" if e.words >= DENSE_WORDS else "light"
        groups["all"].append(r)
        groups[f"text {e.kind}, fonts {e.fonts}"].append(r)
        for name, value in (("layout", e.layout), ("shape", e.shape), ("density", density)):
            groups[f"{name} {value}, fonts {e.fonts}"].append(r)
    worst = sorted(readings, key=lambda r: -r.errors / max(len(r.want), 1))[:NUM_WORST]
    return {
        "scores": {name: summary(group) for name, group in sorted(groups.items())},
        "texts_changed": sum(digest(r.want) != r.entry.sha256 for r in readings),
        "worst": [asdict(r) for r in worst],
    }


def worst_picture(readings: list[Reading], drawn: dict[int, np.ndarray], file: Path) -> None:
    """Puts the pictures of the worst pages side by side."""
    worst = sorted(readings, key=lambda r: -r.errors / max(len(r.want), 1))[:NUM_WORST]
    pictures = [drawn[r.entry.seed] for r in worst]
    width, height = sum(p.shape[1] for p in pictures), max(p.shape[0] for p in pictures)
    sheet = np.full((height, width, 3), 128, np.uint8)
    left = 0
    for picture in pictures:
        sheet[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1]
    Image.fromarray(sheet).save(file)


def evaluate(
    checkpoint: Path, out: Path, cache: Path, metrics_path: Path, *,
    workers: int, pages: int, batch: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Scores the first pages of the list, spread over its groups; writes report and picture.

    Args:
        checkpoint: Folder with the weights.
        out: The JSON file; the picture gets its name with `-worst.png`.
        cache: Fonts and texts.
        metrics_path: What `faces.save_metrics` wrote.
        workers: Processes that draw.
        pages: How many; 0 for all.
        batch: Pages read at once.
        seconds: Time box of the reading.

    Returns:
        The report.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, _ = load_checkpoint(checkpoint)
    weights = {name: value.to(device) for name, value in weights.items()}
    entries = read_list()
    entries = entries[:: max(1, len(entries) // pages)][:pages] if pages else entries
    begun = time.monotonic()
    drawn = draw_entries(entries, cache, metrics_path, workers)
    drawn_s = time.monotonic() - begun
    readings = read_entries(weights, entries, drawn, batch, time.monotonic() + seconds)
    content = report(readings)
    content["seconds"] = {"draw": drawn_s, "read": time.monotonic() - begun - drawn_s}
    out.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    pictures = {e.seed: picture for e, (_, picture) in zip(entries, drawn, strict=True)}
    worst_picture(readings, pictures, out.with_name(f"{out.stem}-worst.png"))
    return content


def print_scores(content: dict[str, Any]) -> None:
    """Shows a report as a table."""
    for name, s in content["scores"].items():
        cells = f"  cell F1 {s['cell_f1']:.4f}" if "cell_f1" in s else ""
        print(
            f"{name:34} {s['pages']:4} pages  CER {100 * s['cer']:7.3f} %  "
            f"perfect {100 * s['perfect']:5.1f} %  ended {100 * s['ended']:5.1f} %{cells}"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Scores a checkpoint on the held-out pages.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--pages", type=int, default=0, help="how many; 0 for all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    path = cached_metrics(args.cache, args.workers)
    content = evaluate(
        args.checkpoint, args.out, args.cache, path, workers=args.workers, pages=args.pages,
        batch=args.batch, seconds=args.seconds,
    )  # fmt: skip
    print_scores(content)


if __name__ == "__main__":
    main()

"""Batches of pages as arrays, laid out by worker processes; painting is the device's work."""

import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.nano.data.corpus import Writer, load_corpus
from models.nano.data.faces import Metrics, glyph_index, list_faces, restore_metrics
from models.nano.data.pages import Mix, Page, PageMaker, Shape
from models.nano.tokenizer import IDS, char_ids

MAX_RULES, MAX_SHADES = 40, 6


@dataclass(frozen=True)
class Batch:
    """Pages of one shape, padded to equal lengths.

    Attributes:
        shape: Of the pages.
        texts: [pages, max_text] int16, Markdown and <|im_end|>, padded with <|endoftext|>.
        lengths: [pages] int16, ids that count.
        kinds: [pages, max_text] uint8, kind of text of each id.
        current: [pages, max_text] int16, glyph that shows the id, or -1.
        following: [pages, max_text + 1] int16, first glyph at or after the id, or -1.
        glyph: [pages, max_text] int32, index in the atlas, or -1 for padding.
        is_big: [pages, max_text] bool, which atlas.
        char: [pages, max_text] uint8, class of the glyph.
        corner: [pages, max_text, 2] int16, pen and baseline.
        centre: [pages, max_text, 2] float32.
        rules: [pages, MAX_RULES, 5] float32; `shades` alike.
        shades: [pages, MAX_SHADES, 5] float32.
    """

    shape: Shape
    texts: np.ndarray
    lengths: np.ndarray
    kinds: np.ndarray
    current: np.ndarray
    following: np.ndarray
    glyph: np.ndarray
    is_big: np.ndarray
    char: np.ndarray
    corner: np.ndarray
    centre: np.ndarray
    rules: np.ndarray
    shades: np.ndarray


def collate(pages: list[Page], shape: Shape) -> Batch:
    """Makes a batch of pages of one shape."""
    count, most = len(pages), shape.max_text
    texts = np.full((count, most), IDS["<|endoftext|>"], np.int16)
    lengths = np.zeros(count, np.int16)
    kinds = np.zeros((count, most), np.uint8)
    current = np.full((count, most), -1, np.int16)
    following = np.full((count, most + 1), -1, np.int16)
    glyph = np.full((count, most), -1, np.int32)
    is_big = np.zeros((count, most), bool)
    char = np.zeros((count, most), np.uint8)
    corner = np.zeros((count, most, 2), np.int16)
    centre = np.zeros((count, most, 2), np.float32)
    rules = np.zeros((count, MAX_RULES, 5), np.float32)
    shades = np.zeros((count, MAX_SHADES, 5), np.float32)
    for row, page in enumerate(pages):
        length, num_glyphs = len(page.text), page.char.size
        texts[row, :length] = char_ids(page.text)
        texts[row, length] = IDS["<|im_end|>"]
        lengths[row] = length + 1
        kinds[row, :length] = page.kinds
        current[row, :length] = page.current
        following[row, : length + 1] = page.following[: length + 1]
        glyph[row, :num_glyphs], is_big[row, :num_glyphs] = glyph_index(
            page.face.astype(np.int64), page.size, page.variant, page.char
        )
        char[row, :num_glyphs] = page.char
        corner[row, :num_glyphs] = page.corner
        centre[row, :num_glyphs] = page.centre
        rules[row, : len(page.rules)] = page.rules[:MAX_RULES]
        shades[row, : len(page.shades)] = page.shades[:MAX_SHADES]
    return Batch(shape, texts, lengths, kinds, current, following, glyph, is_big, char, corner,
                 centre, rules, shades)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What workers make.

    Attributes:
        shapes: Shape, pages a batch, and share of the batches.
        mix: Of texts and layouts.
        seed: Of the stage; no two stages share one.
    """

    shapes: tuple[tuple[Shape, int, float], ...]
    mix: Mix
    seed: int


def make_batch(maker: PageMaker, order: Order, number: int) -> Batch:
    """Returns batch `number` of an order, whoever makes it."""
    rng = np.random.Generator(np.random.PCG64([order.seed, number]))
    shares = np.array([share for _, _, share in order.shapes])
    shape, count, _ = order.shapes[int(rng.choice(len(shares), p=shares / shares.sum()))]
    seeds = rng.integers(2**63, size=count)
    return collate([maker.page(int(seed), shape, order.mix) for seed in seeds], shape)


def load_maker(
    cache: Path, metrics: Metrics, *, held_out_text: bool, held_out_fonts: bool
) -> PageMaker:
    """Returns a page maker over one side of each split."""
    writer = Writer(load_corpus(cache, held_out=held_out_text), metrics)
    return PageMaker(list_faces(cache), metrics, writer, held_out=held_out_fonts)


def _work(
    cache: Path,
    metrics_path: Path,
    orders: "multiprocessing.Queue[tuple[int, Order, int] | None]",
    done: "multiprocessing.Queue[tuple[int, int, Batch]]",
) -> None:
    metrics = restore_metrics(metrics_path)
    maker = load_maker(cache, metrics, held_out_text=False, held_out_fonts=False)
    while (item := orders.get()) is not None:
        epoch, order, number = item
        done.put((epoch, number, make_batch(maker, order, number)))


class Loader:
    """Worker processes and the batches that they make, in order."""

    def __init__(self, cache: Path, metrics_path: Path, workers: int, ahead: int) -> None:
        """Starts the workers.

        Args:
            cache: Fonts and texts.
            metrics_path: What `faces.save_metrics` wrote.
            workers: Processes.
            ahead: Batches to keep ready.
        """
        context = multiprocessing.get_context("spawn")
        self._orders = context.Queue()
        self._done = context.Queue()
        self._ahead = ahead
        self._epoch = 0
        self._workers = [
            context.Process(
                target=_work, args=(cache, metrics_path, self._orders, self._done), daemon=True
            )
            for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def batches(self, order: Order) -> Iterator[Batch]:
        """Yields batches 0, 1, ... of an order without end; a new order drops the old one's."""
        self._epoch += 1
        epoch, asked, ready = self._epoch, 0, {}
        for number in range(2**31):
            while asked < number + self._ahead:
                self._orders.put((epoch, order, asked))
                asked += 1
            while number not in ready:
                their_epoch, their_number, batch = self._get()
                if their_epoch == epoch:
                    ready[their_number] = batch
            yield ready.pop(number)

    def _get(self) -> tuple[int, int, Batch]:
        while True:
            try:
                return self._done.get(timeout=20)
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("a worker that lays out pages has ended") from None

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.terminate()
            worker.join()

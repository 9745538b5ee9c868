"""The training loop: stages, schedule, log, checkpoints."""

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from models.nano.data.batches import Batch, Loader
from models.nano.train.forward import Forward, Tables, Weights, compiled_if, make_tables, page_ids
from models.nano.train.heads import glyph_loss, initial_heads, text_loss
from models.nano.train.paint import Painted, Painter
from models.nano.train.stages import (
    GLYPH_BOUND,
    GLYPH_STEP,
    GUIDE_BOUND,
    GUIDE_STEP,
    STAGES,
    Stage,
)
from models.nano.train.weights import initial_weights, load_checkpoint, save_checkpoint

NO_DECAY = ("norm", "bias", "A_log", "conv1d", "embed")
RANDOM_ROW = 1


class BrokenRunError(RuntimeError):
    """The run does not learn what it must have learned by now."""


@dataclass(frozen=True)
class RunConfig:
    """A run; it and the versions in the log make it again, but for where time ends it.

    Attributes:
        out: Where log and checkpoint go.
        resume: A folder with a checkpoint, or None for fresh weights.
        start: First stage, index of `STAGES`.
        seed: Of weights, pages and appearance.
        minutes: Time box, from the start of the loop, compilation included.
        lr: Peak learning rate.
        warmup: Steps up to it.
        decay_from: Share of the time box after which it falls.
        final_lr: Share of the peak that it ends at; 1 keeps it.
        batch_scale: Shrinks the batches.
        compiled: Whether layers are compiled.
        max_steps: Ends the run after so many steps, 0 for never.
        log_every: Steps between two lines of the log.
        save_every_s: Seconds between two checkpoints.
    """

    out: Path
    resume: Path | None
    start: int
    seed: int
    minutes: float
    lr: float
    warmup: int
    decay_from: float
    final_lr: float
    batch_scale: float
    compiled: bool
    max_steps: int
    log_every: int
    save_every_s: float


class Run:
    """A run in progress."""

    def __init__(
        self,
        config: RunConfig,
        loader: Loader,
        painter: Painter,
        stages: tuple[Stage, ...] = STAGES,
    ) -> None:
        """Loads or draws the weights and writes the head of the log."""
        self.config, self.loader, self.painter, self.stages = config, loader, painter, stages
        self.device = painter.device
        on_gpu = self.device.type == "cuda"
        self._use(compiled=config.compiled)
        if config.resume is None:
            weights, heads = initial_weights(config.seed), initial_heads(config.seed)
        else:
            weights, heads = load_checkpoint(config.resume)
            heads = heads or initial_heads(config.seed)
        to_leaf = lambda value: value.to(self.device).requires_grad_()  # noqa: E731
        self.weights: Weights = {name: to_leaf(value) for name, value in weights.items()}
        self.heads: Weights = {name: to_leaf(value) for name, value in heads.items()}
        self.parameters = [*self.weights.values(), *self.heads.values()]
        decays = [
            value.dim() > 1 and not any(part in name for part in NO_DECAY)
            for name, value in [*self.weights.items(), *self.heads.items()]
        ]
        groups = [
            {"params": [p for p, d in zip(self.parameters, decays, strict=True) if d is wanted],
             "weight_decay": 0.02 * wanted}
            for wanted in (True, False)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.96), eps=1e-9, fused=on_gpu or None
        )
        self.tables: dict[tuple[int, int], Tables] = {}
        self.step = self.pages = 0
        self.begun = self.saved = time.monotonic()
        config.out.mkdir(parents=True, exist_ok=True)
        self._log_file = (config.out / "log.jsonl").open("a")
        head = {"config": {k: str(v) if isinstance(v, Path) else v for k, v in
                           asdict(config).items()}, "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "parameters": sum(value.numel() for value in self.weights.values())}  # fmt: skip
        self.log(head)

    def _use(self, *, compiled: bool) -> None:
        """Chooses compiled functions or plain ones: a run goes on where a compiler gives up."""
        self.compiled = compiled
        self.forward = Forward(torch.bfloat16, compiled=compiled)
        self._glyph_loss = compiled_if(compiled, glyph_loss, dynamic=True)
        self._text_loss = compiled_if(compiled, text_loss, dynamic=True)

    def log(self, line: dict[str, Any]) -> None:
        """Adds a line to the log and shows it."""
        text = json.dumps(line)
        self._log_file.write(text + "\n")
        self._log_file.flush()
        print(text, flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the loop could begin."""
        return time.monotonic() - self.begun

    @property
    def share(self) -> float:
        """Share of the time box that is over."""
        return self.elapsed / (60 * self.config.minutes)

    def learning_rate(self) -> float:
        """Returns the rate of the coming step."""
        config = self.config
        rate = config.lr * min(1.0, (self.step + 1) / config.warmup)
        if self.share > config.decay_from:
            done = min((self.share - config.decay_from) / (1 - config.decay_from), 1.0)
            half = 0.5 * (1 + math.cos(math.pi * done))
            rate *= config.final_lr + (1 - config.final_lr) * half
        return rate

    def train(self) -> None:
        """Runs the stages, and writes the checkpoint at the end of each and in between."""
        self.begun = self.saved = time.monotonic()
        for index in range(self.config.start, len(self.stages)):
            stage = self.stages[index]
            last = index == len(self.stages) - 1
            order = stage.order(self.config.seed * 100 + index, self.config.batch_scale)
            self._run_stage(stage, self.loader.batches(order), last=last)
            self.save()
            if self._over():
                break

    def _over(self) -> bool:
        most = self.config.max_steps
        return self.share >= 1.0 or (most > 0 and self.step >= most)

    def _run_stage(self, stage: Stage, batches: Iterator[Batch], *, last: bool) -> None:
        begun, steps, window = self.elapsed, 0, Window(self.config.log_every)
        random_loss: deque[float] = deque(maxlen=3)
        waited = 0.0
        while not self._over():
            asked = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - asked
            window.add(self.train_step(stage, batch))
            steps += 1
            if steps % self.config.log_every:
                continue
            line = window.line()
            random_loss.append(line["random_loss"])
            height, width = batch.shape.height, batch.shape.width
            self.log({"stage": stage.name, "step": self.step, "s": round(self.elapsed, 1),
                      "pages": self.pages, "wait_s": round(waited, 2),
                      "shape": f"{height}x{width}", **line})  # fmt: skip
            waited = 0.0
            self._check(line)
            settled = max(random_loss) < stage.done_below and steps >= stage.min_steps
            too_long = self.elapsed - begun > stage.max_share * 60 * self.config.minutes
            if not last and (settled or too_long):
                self.log({"stage_end": stage.name, "settled": settled, "steps": steps})
                return
            if time.monotonic() - self.saved > self.config.save_every_s:
                self.save()

    def train_step(self, stage: Stage, batch: Batch) -> dict[str, Tensor]:
        """Makes one step; returns what it measured, on the device."""
        painted = self.painter.paint(batch, self.config.seed * 10**9 + self.step)
        try:
            loss, measured = self.losses(stage, batch, painted)
            loss.backward()
        except (RuntimeError, TorchDynamoException) as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.compiled:
                raise
            self.log({"compile_failed": str(error)[:2000], "shape": str(batch.shape)})
            self._use(compiled=False)
            self.optimizer.zero_grad(set_to_none=True)
            loss, measured = self.losses(stage, batch, painted)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.pages += len(batch.texts)
        measured |= {"loss": loss.detach(), "grad": norm, "lr": torch.tensor(rate)}
        return measured

    def losses(
        self, stage: Stage, batch: Batch, painted: Painted
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, and its parts."""
        height, width, length = batch.shape.height, batch.shape.width, batch.shape.num_tokens
        key = (height, width)
        if key not in self.tables:
            self.tables[key] = make_tables(height, width, length, self.device)
        tables = self.tables[key]
        patches, image = self.forward.vision(self.weights, painted.patches, tables)
        ids = page_ids(painted.texts, tables.num_image_tokens, length)
        logits, guides = self.forward.text(self.weights, ids, image, tables, painted.targets)
        text, kinds = self._text_loss(logits, painted.labels, painted.kinds)
        merged_cells = painted.cells.reshape(len(ids), tables.num_image_tokens, -1)
        parts = {}
        for name, rows, cells in (
            ("patch", patches, painted.cells), ("merged", image, merged_cells)
        ):  # fmt: skip
            keys = ("norm.weight", "norm.bias", "weight", "bias")
            weights = [self.heads[f"{name}.{key}"] for key in keys]
            parts[name] = self._glyph_loss(rows, *weights, cells, self.forward.dtype)
        glyph = parts["patch"][0] + parts["merged"][0]
        loss = text + stage.glyph_weight * glyph + stage.guide_weight * guides.sum()
        measured = {
            "text": text.detach(), "kinds": kinds, "guide": guides.detach(),
            "glyph_patch": parts["patch"][1], "glyph_merged": parts["merged"][1],
        }  # fmt: skip
        return loss, measured

    def _check(self, line: dict[str, Any]) -> None:
        if not math.isfinite(line["loss"]):
            raise BrokenRunError(f"step {self.step}: the loss is {line['loss']}; look at the lr")
        if self.config.resume is not None or self.config.start:
            return
        period = range(self.step, self.step - self.config.log_every, -1)
        guide = sum(line["guide"]) / len(line["guide"])
        if GUIDE_STEP in period and guide > GUIDE_BOUND:
            raise BrokenRunError(
                f"step {self.step}: the guided heads miss by {guide:.2f} nats, expected below "
                f"{GUIDE_BOUND}; targets and pictures disagree, or nothing learns"
            )
        if GLYPH_STEP in period and line["glyph_merged"] < GLYPH_BOUND:
            raise BrokenRunError(
                f"step {self.step}: {line['glyph_merged']:.3f} of the glyphs are named, expected "
                f"{GLYPH_BOUND}; glyph labels and pictures disagree, or nothing learns"
            )

    def save(self) -> None:
        """Writes the checkpoint over the last one."""
        save_checkpoint(self.config.out, self.weights, self.heads)
        self.saved = time.monotonic()


class Window:
    """Means over the steps between two lines of the log; waits for the device once a line."""

    def __init__(self, size: int) -> None:
        """Takes how many steps a line covers."""
        self._steps: list[dict[str, Tensor]] = []
        self._size = size
        self._begun = time.monotonic()

    def add(self, measured: dict[str, Tensor]) -> None:
        """Adds a step."""
        self._steps.append(measured)

    def line(self) -> dict[str, Any]:
        """Returns the means and starts anew."""
        steps, self._steps = self._steps, []
        mean = {
            name: torch.stack([step[name].float() for step in steps]).cpu() for name in steps[0]
        }
        kinds = mean.pop("kinds").sum(0)
        line: dict[str, Any] = {}
        for row, name in ((0, "natural"), (RANDOM_ROW, "random")):
            count = max(float(kinds[row, 2]), 1.0)
            line[f"{name}_loss"] = round(float(kinds[row, 0]) / count, 5)
            line[f"{name}_right"] = round(float(kinds[row, 1]) / count, 5)
        for name, values in mean.items():
            means = values.mean(0)
            line[name] = (
                [round(v, 4) for v in means.tolist()] if means.dim() else round(float(means), 6)
            )
        now = time.monotonic()
        line["step_ms"] = round((now - self._begun) / len(steps) * 1e3, 1)
        self._begun = now
        return line

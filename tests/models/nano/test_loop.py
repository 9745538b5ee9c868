"""A run on the toy: it learns, stops when it should, and goes on from its checkpoint."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

from nano_toy import SHAPE, ToyLoader, toy_face, toy_glyphs  # noqa: E402
from PIL import Image, ImageFont  # noqa: E402

from models.nano.data.batches import Order  # noqa: E402
from models.nano.data.pages import FIRST_MIX, SHAPES  # noqa: E402
from models.nano.tokenizer import NUM_PROMPT_IDS  # noqa: E402
from models.nano.train.forward import padded_length  # noqa: E402
from models.nano.train.loop import BrokenRunError, Run, RunConfig  # noqa: E402
from models.nano.train.paint import Painter  # noqa: E402
from models.nano.train.plot import plot, read_log  # noqa: E402
from models.nano.train.stages import GUIDE_STEP, STAGES, Stage, smoke_stages  # noqa: E402
from models.nano.train.weights import load_checkpoint  # noqa: E402


class ToyStage(Stage):
    def order(self, seed: int, scale: float) -> Order:
        return Order(((SHAPE, 4, 1.0),), self.mix, seed)


TOY = (ToyStage("toy", (), FIRST_MIX, 1.0, 0.3, 0.0, 0, 1.0),)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyLoader, Painter]:
    font = tmp_path_factory.mktemp("font") / "face.ttf"
    font.write_bytes(ImageFont.load_default(20).font_bytes)
    _, metrics = toy_face(font)
    return ToyLoader(metrics), Painter(*toy_glyphs(font), torch.device("cpu"))


def config(out: Path, **changes: Any) -> RunConfig:  # noqa: ANN401 any field
    plain = RunConfig(
        out=out, resume=None, start=0, seed=1, minutes=30.0, lr=1e-3, warmup=2, decay_from=0.99,
        final_lr=1.0, batch_scale=1.0, compiled=False, max_steps=3, log_every=1, save_every_s=1e9,
    )  # fmt: skip
    return replace(plain, **changes)


def test_a_run_logs_saves_and_goes_on(tmp_path: Path, parts: tuple[ToyLoader, Painter]) -> None:
    loader, painter = parts
    first = Run(config(tmp_path / "a"), loader, painter, TOY)
    first.train()
    steps = read_log(tmp_path / "a/log.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[-1]["loss"] < steps[0]["loss"]
    plot(tmp_path / "a/log.jsonl", tmp_path / "a/plot.png")
    assert np.asarray(Image.open(tmp_path / "a/plot.png")).std() > 1

    weights, heads = load_checkpoint(tmp_path / "a")
    for name, value in {**first.weights, **first.heads}.items():
        kept = {**weights, **heads}[name]
        assert torch.equal(kept, value.detach().to(torch.bfloat16).float()), name
    again = Run(config(tmp_path / "b", resume=tmp_path / "a", seed=2), loader, painter, TOY)
    for name, value in again.weights.items():
        assert torch.equal(value.detach(), weights[name])
    again.train()
    resumed = read_log(tmp_path / "b/log.jsonl")
    assert resumed[0]["loss"] < steps[0]["loss"]


def test_the_same_seed_makes_the_same_run(tmp_path: Path, parts: tuple[ToyLoader, Painter]) -> None:
    losses = []
    for name in "ab":
        Run(config(tmp_path / name, max_steps=2), *parts, TOY).train()
        losses.append([line["loss"] for line in read_log(tmp_path / name / "log.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_that_does_not_learn_is_stopped(
    tmp_path: Path, parts: tuple[ToyLoader, Painter]
) -> None:
    run = Run(config(tmp_path), *parts, TOY)
    run.step = GUIDE_STEP
    line = {"loss": 9.0, "guide": [2.0, 2.0, 2.0, 2.0], "glyph_merged": 0.9}
    with pytest.raises(BrokenRunError, match=r"guided heads miss by 2\.00"):
        run._check(line)
    run._check({**line, "guide": [0.5] * 4})
    with pytest.raises(BrokenRunError, match="loss is nan"):
        run._check({**line, "loss": float("nan")})


def test_the_rate_warms_up_and_falls(tmp_path: Path, parts: tuple[ToyLoader, Painter]) -> None:
    changes = {"warmup": 10, "decay_from": 0.5, "final_lr": 0.1, "minutes": 1.0}
    run = Run(config(tmp_path, **changes), *parts, TOY)
    assert run.learning_rate() == pytest.approx(1e-4, rel=0.01)
    run.step = 50
    assert run.learning_rate() == 1e-3
    run.begun -= 45
    assert run.learning_rate() == pytest.approx(0.55e-3, rel=0.05)
    run.begun -= 60
    assert run.learning_rate() == pytest.approx(1e-4, rel=0.01)


def test_stages_fit_their_shapes() -> None:
    for stage in STAGES:
        assert sum(share for _, _, share in stage.shapes) == pytest.approx(1.0)
    for shape in SHAPES.values():
        assert shape.height % 32 == shape.width % 32 == 0
        num_image = shape.height * shape.width // 1024
        assert padded_length(num_image, shape.max_text) <= shape.num_tokens
        assert NUM_PROMPT_IDS + num_image + shape.max_text < 4096
    names = {name for stage in smoke_stages() for name, _, _ in stage.shapes}
    assert names == set(SHAPES)
    seed = random.randrange(10**6)
    assert STAGES[0].order(seed, 0.001).shapes[0][1] == 1


def test_the_log_says_what_ran(tmp_path: Path, parts: tuple[ToyLoader, Painter]) -> None:
    Run(config(tmp_path), *parts, TOY)
    head = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert head["config"]["seed"] == 1
    assert head["torch"] == torch.__version__
    assert 8e6 < head["parameters"] < 13e6

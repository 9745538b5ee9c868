"""Requests with pictures against what transformers recorded, and against each other."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import copy_checkpoint, edit_json, pack_into, pictures_checkpoint
from conftest import DATA, load_expected
from data.make_tiny_qwen3_5 import FIXTURES, make_image
from data.record_pictures import NUM_STEPS, PICTURES, prompt
from executor_client import Collector, run, wait_idle
from pictures import IMAGE_ID, noise, picture, placeholders, random_pages
from reference import qwen3_5
from reference.patchify import patchify
from reference.prompt_positions import prompt_positions
from reference.qwen3_5 import Qwen35Text, load_safetensors
from reference.vision_encoder import VisionEncoder

from runtime import (
    Executor,
    ExecutorConfig,
    FinishReason,
    OutputConfig,
    ProgressPhase,
    Request,
    SamplingConfig,
    _native,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALL = OutputConfig(
    return_context_logits=True, return_generation_logits=True, return_image_embeddings=True
)
TINY_IMAGES = {
    case: [picture(*image) for image in FIXTURES["tiny_qwen3_5"].cases[case].images]
    for case in ("image", "two_images")
}


@pytest.fixture
def start(engine_dir: Path) -> Iterator[Callable[..., Executor]]:
    """Starts executors on the CPU, the one backend with a vision encoder."""
    made = []

    def make(engine: Path = engine_dir, **config: Any) -> Executor:  # noqa: ANN401 - any field
        made.append(Executor(engine, ExecutorConfig(**{"num_threads": 1, **config})))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


@pytest.fixture(scope="module")
def pictures_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    return pack_into(pictures_checkpoint(root / "checkpoint"), root / "engine").path


@pytest.fixture(scope="module")
def text_engine(engine_dirs: dict[str, Path]) -> Path:
    return engine_dirs["tiny_ratio3"]


@pytest.mark.parametrize("tile", [384, 16])
@pytest.mark.parametrize("chunk", [256, 64, 7, 1])
@pytest.mark.parametrize("case", ["image", "two_images"])
def test_recorded_ids_and_logits(
    start: Callable[..., Executor], case: str, chunk: int, tile: int
) -> None:
    expected = load_expected("tiny_qwen3_5")["cases"][case]
    tensors = load_safetensors(DATA / "tiny_qwen3_5" / "expected_tensors.safetensors")
    greedy = expected["fp32"]["greedy"]
    executor = start(max_prefill_chunk=chunk, max_vision_tile=tile)
    (result,) = run(
        executor,
        Request(
            expected["input_ids"],
            len(greedy),
            images=TINY_IMAGES[case],
            output=ALL,
            ignore_end_ids=True,
        ),
    )
    assert result.token_ids == greedy
    np.testing.assert_allclose(result.context_logits, tensors[f"{case}.logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(
        result.generation_logits, tensors[f"{case}.decode_logits"], rtol=0, atol=1e-3
    )
    assert result.image_embeddings is not None
    # The first picture of both prompts is the same.
    np.testing.assert_allclose(
        result.image_embeddings[:15], tensors["image.vision.merged"], rtol=0, atol=2e-4
    )
    assert result.stats is not None
    times = result.stats
    assert 0 < times.vision_start_ns < times.vision_end_ns <= times.first_token_ns
    assert times.first_scheduled_ns <= times.prefill_start_ns < times.first_token_ns
    wait_idle(executor)


@pytest.mark.parametrize("case", ["image", "two_images"])
def test_recorded_positions(case: str) -> None:
    expected = load_expected("tiny_qwen3_5")["cases"][case]
    positions, delta = _native.prompt_positions(
        expected["input_ids"], TINY_IMAGES[case], IMAGE_ID, 32
    )
    np.testing.assert_array_equal(positions, expected["position_ids_thw"])
    assert delta == expected["rope_delta"]


@pytest.mark.parametrize("chunk", [256, 64, 5])
@pytest.mark.parametrize("case", PICTURES)
def test_other_shapes_and_heads_of_72(
    start: Callable[..., Executor], pictures_engine: Path, case: str, chunk: int
) -> None:
    tensors = load_safetensors(DATA / "pictures" / "expected.safetensors")
    ids = prompt(PICTURES[case])
    images = [picture(*shape.as_image) for shape in PICTURES[case]]
    positions, delta = _native.prompt_positions(ids, images, IMAGE_ID, 32)
    np.testing.assert_array_equal(positions, tensors[f"{case}.positions"])
    assert delta == tensors[f"{case}.rope_delta"][0]

    executor = start(pictures_engine, max_prefill_chunk=chunk)
    (result,) = run(
        executor, Request(ids, NUM_STEPS, images=images, output=ALL, ignore_end_ids=True)
    )
    assert result.token_ids == tensors[f"{case}.greedy"].astype(int).tolist()
    assert result.context_logits is not None
    np.testing.assert_allclose(result.image_embeddings, tensors[f"{case}.merged"], atol=2e-4)
    np.testing.assert_allclose(result.context_logits[-4:], tensors[f"{case}.logits"], atol=1e-3)
    np.testing.assert_allclose(
        result.generation_logits, tensors[f"{case}.decode_logits"], atol=1e-3
    )


def reference_logits(ids: list[int], images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of the pictures and logits of the prompt, by the NumPy model in float64."""
    folder = DATA / "tiny_qwen3_5"
    config = json.loads((folder / "config.json").read_text())
    weights = load_safetensors(folder / "model.safetensors")
    text = Qwen35Text(config, weights, np.float64)
    vision = VisionEncoder(config["vision_config"], weights)
    levels = np.tile(np.arange(256, dtype=np.float32) / 127.5 - 1, (3, 1))
    rows = np.concatenate(
        [
            vision.forward(
                patchify(image, levels, 16, 2, 2), image.shape[0] // 16, image.shape[1] // 16
            )[1]
            for image in images
        ]
    )
    embeddings = text.embed_tokens[ids].copy()
    embeddings[np.array(ids) == IMAGE_ID] = rows
    sizes = [(image.shape[0] // 32, image.shape[1] // 32) for image in images]
    positions, _ = prompt_positions(ids, sizes, IMAGE_ID)
    return rows, text.logits(text.forward(embeddings, positions, text.new_state()))


def contiguous_cos_sin(
    positions: np.ndarray, rope: dict[str, Any], head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Angles with the axes in blocks one after the other, which is not this model's layout."""
    rotary_dim = int(head_dim * rope["partial_rotary_factor"])
    inv_freq = 1.0 / rope["rope_theta"] ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    axis = np.repeat(np.arange(3), rope["mrope_section"])
    angles = positions[axis].T * inv_freq
    return np.cos(angles), np.sin(angles)


def test_the_axes_of_the_rotary_positions_are_interleaved(
    start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where the layout shows: with the axes in blocks, all greedy ids stay the same."""
    expected = load_expected("tiny_qwen3_5")["cases"]["two_images"]
    images = [make_image(*image) for image in FIXTURES["tiny_qwen3_5"].cases["two_images"].images]
    ids = expected["input_ids"]
    (got,) = run(start(), Request(ids, 1, images=TINY_IMAGES["two_images"], output=ALL))
    assert got.context_logits is not None
    assert got.image_embeddings is not None
    rows, logits = reference_logits(ids, images)
    assert np.abs(got.image_embeddings - rows).max() < 2e-4
    assert np.abs(got.context_logits - logits).max() < 1e-3
    monkeypatch.setattr(qwen3_5, "rotary_cos_sin", contiguous_cos_sin)
    _, logits = reference_logits(ids, images)
    assert np.abs(got.context_logits - logits).max() > 0.1


def test_no_bit_depends_on_tiles_chunks_threads_or_company(
    start: Callable[..., Executor], pictures_engine: Path
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    image = noise(224, 256, seed)
    ids = [*rng.sample(range(490), 33), *placeholders(image), *rng.sample(range(490), 90)]

    def page() -> Request:
        return Request(ids, 8, images=[image], output=ALL, ignore_end_ids=True)

    (whole,) = run(start(pictures_engine), page())
    for config in (
        {"max_vision_tile": 16, "max_prefill_chunk": 64},
        {"max_vision_tile": 112, "num_threads": 2},
    ):
        (cut,) = run(start(pictures_engine, **config), page())
        np.testing.assert_array_equal(cut.image_embeddings, whole.image_embeddings)
        np.testing.assert_array_equal(cut.context_logits, whole.context_logits)
        np.testing.assert_array_equal(cut.generation_logits, whole.generation_logits)

    # Beside streams the encoder works in slices of whatever time the rounds leave.
    collector = Collector(start(pictures_engine, num_threads=2))
    streams = [
        collector.submit(Request([stream + 1] * 9, 2000, ignore_end_ids=True))
        for stream in range(4)
    ]
    pages = [collector.submit(page()) for _ in range(3)]
    collector.finish(pages)
    for stream in streams:
        collector.executor.cancel_request(stream)
    collector.finish()
    for page_id in pages:
        got = collector.results[page_id]
        np.testing.assert_array_equal(got.image_embeddings, whole.image_embeddings)
        np.testing.assert_array_equal(got.context_logits, whole.context_logits)
        np.testing.assert_array_equal(got.generation_logits, whole.generation_logits)
    wait_idle(collector.executor)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_each_of_64_gets_what_it_gets_alone(
    start: Callable[..., Executor], num_threads: int
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    wanted: list[dict[str, Any]] = []
    for _ in range(64):
        keywords: dict[str, Any] = {
            "input_token_ids": [rng.randrange(490) for _ in range(rng.randint(1, 200))]
        }
        if rng.random() < 0.5:
            keywords = random_pages(rng)
        sampling = SamplingConfig(temperature=rng.choice([0.0, 0.9]), seed=rng.getrandbits(64))
        wanted.append(
            {
                **keywords,
                "max_tokens": rng.randint(1, 30),
                "sampling": sampling,
                "ignore_end_ids": True,
                "output": OutputConfig(return_generation_logits=True),
            }
        )
    alone = start(max_batch_size=1)
    solo = [run(alone, Request(**keywords))[0] for keywords in wanted]
    crowd = start(
        max_batch_size=5,
        max_num_tokens=160,
        max_kv_tokens=5 * 320,
        kv_page_size=16,
        num_threads=num_threads,
        max_rounds_in_flight=2,
    )
    collector = Collector(crowd)
    request_ids = []
    cancelled = set(rng.sample(range(64), 12))
    for index, keywords in enumerate(wanted):
        request_ids.append(collector.submit(Request(**keywords)))
        if rng.random() < 0.4:
            collector.poll(rng.uniform(0, 0.01))
        if index in cancelled:
            crowd.cancel_request(request_ids[-1])
    collector.finish()
    for index, (request_id, expected) in enumerate(zip(request_ids, solo, strict=True)):
        got = collector.results[request_id]
        if got.finish_reason is FinishReason.CANCELLED:
            assert index in cancelled
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
            continue
        assert got.token_ids == expected.token_ids, f"request {index}"
        np.testing.assert_array_equal(got.generation_logits, expected.generation_logits)
    wait_idle(crowd)


def test_what_does_not_fit_is_refused(start: Callable[..., Executor], text_engine: Path) -> None:
    executor = start()
    square = noise(64, 64, 1)
    for ids, images, parts in (
        ([1, 500, 500, 500, 2], [square], ("3 placeholders", "expected 4 for images[0]")),
        ([1, *[500] * 4, 2], [], ("0 pictures", "1 runs of placeholders (id 500)")),
        ([1, 2], [square], ("1 pictures", "0 runs")),
        ([*[500] * 8], [square, square], ("2 pictures", "1 runs")),
        ([*[500] * 2, 1, *[500] * 2], [square], ("1 pictures", "2 runs")),
        ([1, *[500] * 4], [noise(64, 48, 1)], ("images[0]: 64 x 48", "multiples of 32")),
        ([1, *[500] * 99], [noise(288, 352, 1)], ("288 x 352", "at most 65536 pixels")),
    ):
        with pytest.raises(ValueError, match="expected") as caught:
            executor.enqueue_request(Request(ids, 4, images=images))
        for part in parts:
            assert part in str(caught.value)
    small = start(max_image_pixels=4095)
    assert small.engine.max_image_pixels == 4095
    with pytest.raises(ValueError, match="at most 4095 pixels"):
        small.enqueue_request(Request([*[500] * 4], 4, images=[square]))
    text = start(text_engine)
    assert not text.engine.has_vision
    with pytest.raises(ValueError, match=r"^images: 1 pictures, expected none"):
        text.enqueue_request(Request([*[500] * 4], 4, images=[square]))
    wait_idle(executor)


def test_a_program_with_a_stage_out_of_place_is_refused(tmp_path: Path) -> None:
    from runtime import EngineError

    checkpoint = copy_checkpoint(DATA / "tiny_qwen3_5", tmp_path / "checkpoint")
    engine = pack_into(checkpoint, tmp_path / "engine").path
    edit_json(engine / "program.json", lambda p: p["steps"]["vision"][1].reverse())
    with pytest.raises(EngineError, match="stage 1 of vision has vision_rotary out of its place"):
        Executor(engine)
    edit_json(engine / "program.json", lambda p: p["steps"]["vision"].pop(1))
    with pytest.raises(EngineError, match="vision has 4 stages, expected 5"):
        Executor(engine)


def test_a_generated_placeholder_is_an_ordinary_token(start: Callable[..., Executor]) -> None:
    executor = start(max_scripted_tokens=8)
    square = noise(64, 64, 1)
    prompts = [[9, *placeholders(square), 8], [9, 8, 7]]
    for ids, images in zip(prompts, [[square], []], strict=True):
        (result,) = run(
            executor,
            Request(ids, 4, images=images, forced_tokens=[500, 500, 31, 7], ignore_end_ids=True),
        )
        assert result.token_ids == [500, 500, 31, 7]


def test_cancel_and_timeout_while_a_picture_is_encoded(
    start: Callable[..., Executor], pictures_engine: Path
) -> None:
    executor = start(pictures_engine, max_vision_tile=16)
    image = noise(256, 256, 3)
    ids = [4, *placeholders(image), 5]
    (expected,) = run(executor, Request(ids, 4, images=[image], ignore_end_ids=True))
    collector = Collector(executor)
    for attempt in range(12):
        first = collector.submit(Request(ids, 4, images=[image], allotted_time_ms=attempt + 1))
        second = collector.submit(Request(ids, 4, images=[image]))
        after = collector.submit(Request(ids, 4, images=[image], ignore_end_ids=True))
        time.sleep(0.001 * attempt)
        executor.cancel_request(second)
        collector.finish()
        assert collector.results[first].num_final == 1
        assert collector.results[after].token_ids == expected.token_ids
    reasons = {result.finish_reason for result in collector.results.values()}
    assert {FinishReason.CANCELLED, FinishReason.TIMED_OUT} <= reasons
    wait_idle(executor)


def test_progress_is_reported_when_asked_for(start: Callable[..., Executor]) -> None:
    executor = start(max_vision_tile=16, max_prefill_chunk=64)
    image = noise(256, 224, 3)
    ids = [*range(100), *placeholders(image), *range(40)]
    plain, asked = run(
        executor,
        Request(ids, 4, images=[image], ignore_end_ids=True),
        Request(ids, 4, images=[image], ignore_end_ids=True, return_progress=True),
    )
    assert plain.progress == []
    assert asked.token_ids == plain.token_ids
    # A reader who is late gets the last state only, so early ones may be missing here.
    order = [phase.value for phase, _ in asked.progress]
    assert order == sorted(order)
    assert order[-1] == ProgressPhase.DECODING.value
    assert order.count(ProgressPhase.DECODING.value) == 1
    assert len(order) > 2
    for phase in (ProgressPhase.ENCODING, ProgressPhase.PREFILL):
        fractions = [fraction for shown, fraction in asked.progress if shown is phase]
        assert fractions == sorted(fractions)
        assert all(0 <= fraction <= 1 for fraction in fractions)


def test_the_encoder_cache_keeps_to_its_budget(start: Callable[..., Executor]) -> None:
    one = 4 * 64 * 4  # bytes: tokens of 64 x 64 pixels, hidden size, float
    executor = start(encoder_cache_bytes=2 * one)
    images = [noise(64, 64, number, bytes([number])) for number in range(3)]
    ids = [3, *placeholders(images[0]), 4]

    def ask(*numbers: int) -> tuple[int, int, int]:
        for number in numbers:
            (result,) = run(
                executor, Request(ids, 2, images=[images[number]], output=ALL, ignore_end_ids=True)
            )
            results.setdefault(number, result)
            np.testing.assert_array_equal(result.context_logits, results[number].context_logits)
        load = executor.load()
        return load.encoder_cache_hits, load.encoder_cache_misses, load.encoder_cache_bytes

    results: dict[int, Any] = {}
    assert ask(0, 0, 1) == (1, 2, 2 * one)
    assert ask(0, 2) == (2, 3, 2 * one)  # 1 was used least recently, and goes
    assert ask(0, 1) == (3, 4, 2 * one)
    off = start()
    run(off, *[Request(ids, 2, images=[images[0]]) for _ in range(2)])
    assert off.load().encoder_cache_hits == off.load().encoder_cache_misses == 0

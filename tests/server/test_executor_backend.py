"""The backend over the executor's Python face: hand-over, cancelling, and a lost engine."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, seal
from fakes.app import on_loop
from fakes.backend import INFO
from fakes.runtime import Executor, LoadReport, RequestStats, Response

import runtime
from runtime import CapacityError, CudaError, EngineLost, FinishReason
from runtime.engine_directory import EngineDirectory
from server.backend import (
    CapacityExceededError,
    EndCause,
    EngineLostError,
    EngineRefusedError,
    GenerationRequest,
    Progress,
    ProgressPhase,
    QueueFullError,
    RepetitionGuard,
    RequestRefusedError,
    Sampling,
)
from server.backends.executor import ExecutorBackend, load_engine, open_directory
from server.config import EngineConfig
from server.images import PreparedImage

REQUEST = GenerationRequest(request_id="mine", prompt_ids=(1, 2), max_tokens=8)


class Bound:
    """A backend bound to the running loop, its executor, and the causes of its loss."""

    def __init__(self, stall_s: float = 60) -> None:
        self.executor = Executor()
        self.backend = ExecutorBackend(self.executor, INFO, stall_s)
        self.lost: list[str] = []
        self.backend.start(self.lost.append)


def final(number: int, reason: FinishReason = FinishReason.LENGTH, **fields: object) -> Response:
    return Response(number, is_final=True, finish_reason=reason, **fields)


@on_loop
async def test_one_take_a_step_serves_all_requests() -> None:
    bound = Bound()
    generations = [bound.backend.submit(REQUEST) for _ in range(3)]
    waits = [asyncio.ensure_future(g.next_event()) for g in generations]
    await asyncio.sleep(0)
    bound.executor.step(*(Response(i, f"t{i}", [i]) for i in (1, 2, 3)))
    events = await asyncio.gather(*waits)
    assert [(e.text, e.token_ids) for e in events] == [("t1", (1,)), ("t2", (2,)), ("t3", (3,))]
    assert bound.executor.num_takes == 1
    bound.executor.step(*(final(i) for i in (1, 2, 3)))
    for generation in generations:
        event = await generation.next_event()
        assert event.finished is not None
        assert event.finished.cause is EndCause.LENGTH
        generation.close()
    assert bound.backend.num_open == 0
    assert bound.executor.cancelled == []


@on_loop
async def test_late_reader_gets_merged_events() -> None:
    bound = Bound()
    generation = bound.backend.submit(REQUEST)
    for text in ("a", "b", "c"):
        bound.executor.step(Response(1, text, [1]))
        await asyncio.sleep(0.01)
    event = await generation.next_event()
    assert (event.text, event.token_ids, event.finished) == ("abc", (1, 1, 1), None)


@on_loop
async def test_request_in_the_executors_words() -> None:
    bound = Bound()
    full = replace(
        REQUEST,
        sampling=Sampling(0.5, 3, 0.9, 1.0, 7, 1.5, 0.25, -0.5, ((4, -2.0), (9, 3.0))),
        stop_strings=("END",),
        stop_token_ids=(9, 3),
        include_stop=True,
        skip_special_tokens=False,
        allotted_time_ms=100,
        min_tokens=5,
        token_records=True,
        top_logprobs=4,
        repetition_guard=RepetitionGuard(9, 4, 50),
    )
    bound.backend.submit(full)
    bound.backend.submit(replace(full, ignore_end_tokens=True))
    bound.backend.submit(replace(full, ignore_end_tokens=True, stop_token_ids=()))
    bound.backend.submit(REQUEST)
    first, second, third, fourth = bound.executor.requests.values()
    assert first.sampling.min_p == pytest.approx(1, abs=1e-7)
    assert first.sampling.min_p < 1
    ruled, plain = first.sampling, fourth.sampling
    assert ruled.logit_bias == {4: -2.0, 9: 3.0}
    assert (ruled.repetition_penalty, ruled.presence_penalty, ruled.frequency_penalty) == (
        *(1.5, 0.25),
        -0.5,
    )
    assert (plain.repetition_penalty, plain.presence_penalty, plain.logit_bias) == (1, 0, {})
    assert (first.min_tokens, fourth.min_tokens) == (5, 0)
    ends = [(r.end_ids, r.stop_ids, r.ignore_end_ids) for r in (first, second, third, fourth)]
    assert ends == [
        (None, [9, 3], False),
        (None, [9, 3], True),
        (None, [], True),
        (None, [], False),
    ]
    assert (first.output.token_records, first.output.top_logprobs) == (True, 4)
    assert (fourth.output.token_records, fourth.output.top_logprobs) == (False, None)
    guard = first.repetition_guard
    assert guard is not None
    assert (guard.max_period, guard.min_repeats, guard.min_repeated_tokens) == (9, 4, 50)
    assert fourth.repetition_guard is None
    assert (first.stop_strings, first.include_stop, first.skip_special_tokens) == (
        ["END"],
        True,
        False,
    )
    assert (first.allotted_time_ms, first.client_id, first.max_tokens) == (100, "mine", 8)


@on_loop
async def test_pictures_and_progress() -> None:
    bound = Bound()
    pixels = np.arange(32 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(32, 64, 3)
    image = PreparedImage(pixels, 100, 50, b"\x07" * 32)
    asked = replace(REQUEST, images=(image, image), report_progress=True)
    generation = bound.backend.submit(asked)
    sent = bound.executor.requests[1]
    assert sent.return_progress
    assert [(i.height, i.width) for i in sent.images] == [(32, 64)] * 2
    bound.executor.step(Response(1, progress=Phase("ENCODING", 0.5)))
    assert (await generation.next_event()).progress == Progress(ProgressPhase.ENCODING, 0.5)
    bound.executor.step(Response(1, progress=Phase("PREFILL")))
    bound.executor.step(Response(1, "a", [1], progress=Phase("DECODING")))
    await asyncio.sleep(0.01)
    # The newest progress goes with all that was merged.
    event = await generation.next_event()
    assert (event.text, event.progress) == ("a", Progress(ProgressPhase.DECODING))
    stats = RequestStats(vision_start_ns=3, vision_end_ns=4, prefill_start_ns=5)
    bound.executor.step(replace(final(1), stats=stats))
    finished = (await generation.next_event()).finished
    assert finished is not None
    times = finished.stats
    assert (times.vision_start_ns, times.vision_end_ns, times.prefill_start_ns) == (3, 4, 5)
    assert not bound.executor.requests.get(2)


class Phase:
    """A `runtime.Progress`, which only the executor makes."""

    def __init__(self, name: str, fraction: float | None = None) -> None:
        self.phase = getattr(runtime.ProgressPhase, name)
        self.fraction = fraction


def test_largest_picture_leaves_room_for_an_answer(engine_dir: Path) -> None:
    for config, pixels in (
        (EngineConfig(), 65_536),
        (EngineConfig(default_max_tokens=3800), 40 * 1024),
        (EngineConfig(default_max_tokens=4095), 4096),
        (EngineConfig(max_image_pixels=8192), 8192),
    ):
        info = load_engine(engine_dir, replace(config, num_threads=1), 1).backend.info
        assert (info.has_vision, info.image_token_id, info.image_factor) == (True, 500, 32)
        assert (info.min_image_pixels, info.max_image_pixels) == (4096, pixels), config


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        (final(1, FinishReason.END_ID, end_id=258), EndCause.END_TOKEN),
        (final(1, FinishReason.STOP_WORDS, stop_string="END"), EndCause.STOP_STRING),
        (final(1, FinishReason.CANCELLED), EndCause.CANCELLED),
        (final(1, FinishReason.TIMED_OUT), EndCause.TIMED_OUT),
        (final(1, FinishReason.REPETITION), EndCause.REPETITION),
    ],
)
@on_loop
async def test_every_end(response: Response, cause: EndCause) -> None:
    bound = Bound()
    generation = bound.backend.submit(REQUEST)
    bound.executor.step(response)
    finished = (await generation.next_event()).finished
    assert finished is not None
    assert finished.cause is cause
    assert finished.end_token_id == response.end_id
    assert finished.stop_string == response.stop_string
    assert finished.stats.first_token_ns is None


@on_loop
async def test_reader_that_leaves_cancels_and_the_table_empties() -> None:
    bound = Bound()
    generation = bound.backend.submit(REQUEST)
    generation.close()
    generation.close()
    assert bound.executor.cancelled == [1]
    bound.executor.step(Response(1, "late"))
    await asyncio.sleep(0.01)
    assert bound.backend.num_open == 1
    bound.executor.step(final(1, FinishReason.CANCELLED))
    await asyncio.sleep(0.01)
    assert bound.backend.num_open == 0
    generation.cancel()
    assert bound.executor.cancelled == [1]


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (CapacityError("full"), QueueFullError),
        (ValueError("end_ids: no"), RequestRefusedError),
        (EngineLost("gone"), EngineLostError),
        (CudaError("gone"), EngineLostError),
    ],
)
@on_loop
async def test_refusals(refusal: Exception, error: type[Exception]) -> None:
    bound = Bound()
    bound.executor.refusal = refusal
    with pytest.raises(error):
        bound.backend.submit(REQUEST)
    assert bound.backend.num_open == 0
    assert bound.lost == (["gone"] if error is EngineLostError else [])


@on_loop
async def test_request_over_the_cache_is_refused_before_it_waits() -> None:
    bound = Bound()
    with pytest.raises(CapacityExceededError) as caught:
        bound.backend.submit(replace(REQUEST, max_tokens=2047))
    assert (caught.value.needed_tokens, caught.value.available_tokens) == (2049, 2048)
    assert not bound.executor.requests


@pytest.mark.parametrize("way", ["error response", "dead while idle", "hang", "throws"])
@on_loop
async def test_lost_engine_fails_every_stream_once(way: str) -> None:
    bound = Bound(stall_s=0.5)
    generations = [bound.backend.submit(REQUEST) for _ in range(2)]
    match way:
        case "error response":
            bound.executor.step(Response(1, is_final=True, error="boom"))
        case "dead while idle":
            bound.executor.error = "boom"
        case "hang":
            bound.executor.report = LoadReport(silence_ns=700_000_000)
        case _:
            bound.executor.failure = CudaError("boom")
            bound.executor.step()
    for generation in generations:
        with pytest.raises(EngineLostError):
            await asyncio.wait_for(generation.next_event(), 1)
    assert len(bound.lost) == 1
    assert bound.backend.num_open == 0
    with pytest.raises(EngineLostError):
        bound.backend.submit(REQUEST)
    await asyncio.sleep(0.3)
    assert len(bound.lost) == 1


@on_loop
async def test_close_unbinds_and_shuts_down() -> None:
    bound = Bound()
    await asyncio.to_thread(bound.backend.close)
    await asyncio.sleep(0.01)
    assert bound.executor.stopped
    assert not asyncio.get_running_loop().remove_reader(bound.executor.response_fd)


def many_tokens(engine: Path) -> None:
    def add(raw: dict[str, Any]) -> None:
        raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 512, "content": "<new>"})

    edit_json(engine / "tokenizer.json", add)


def deep_template(engine: Path) -> None:
    (engine / "chat_template.jinja").write_text("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")


@pytest.mark.parametrize(
    ("edit", "part"), [(many_tokens, "has the token 512"), (deep_template, "does not compile")]
)
def test_engine_at_odds_with_itself_is_refused_in_one_line(
    engine_dir: Path, tmp_path: Path, edit: Callable[[Path], None], part: str
) -> None:
    engine = Path(shutil.copytree(engine_dir, tmp_path / "engine"))
    edit(engine)
    seal(engine)
    with pytest.raises(EngineRefusedError, match=part) as caught:
        load_engine(engine, EngineConfig(num_threads=1), 1)
    assert "\n" not in str(caught.value)


def test_placeholders_of_any_kind_are_looked_at(engine_dir: Path, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engine_dir, tmp_path / "engine"))
    edit_json(
        engine / "manifest.json",
        lambda raw: raw["model"]["config"].update({"image_token_id": [1], "video_token_id": "2"}),
    )
    seal(engine)
    loaded = load_engine(engine, EngineConfig(num_threads=1), 1)
    assert loaded.backend.info.placeholder_token_ids == frozenset()
    loaded.backend.close()


def test_rounds_in_flight_reach_the_executor(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(**values: int | str) -> runtime.ExecutorConfig:
        made.append(config(**values))
        return made[-1]

    config = runtime.ExecutorConfig
    monkeypatch.setattr(runtime, "ExecutorConfig", make)
    load_engine(engine_dir, EngineConfig(num_threads=1, max_rounds_in_flight=2), 1).backend.close()
    assert [one.max_rounds_in_flight for one in made] == [2]


def test_engine_replaced_while_it_is_loaded_is_refused(
    engine_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Path(shutil.copytree(engine_dirs["tiny_qwen3_5"], tmp_path / "engine"))

    def replace_engine(directory: EngineDirectory) -> tuple[None, None]:
        shutil.rmtree(directory.path)
        shutil.copytree(engine_dirs["tiny_ratio3"], directory.path)
        return None, None

    monkeypatch.setattr("server.backends.executor.load_prompt_parts", replace_engine)
    with pytest.raises(EngineRefusedError, match="replaced while it was loaded"):
        load_engine(engine, EngineConfig(num_threads=1), 1)


def test_runtime_that_is_not_built_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "runtime", None)
    with pytest.raises(EngineRefusedError, match="found no usable runtime") as caught:
        open_directory(tmp_path)
    assert "\n" not in str(caught.value)

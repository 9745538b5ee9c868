"""How requests end: end ids, lengths, stop strings, cancel, time; text and usage agree."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from conftest import DATA
from executor_client import Collected, Collector, run, wait_idle
from tokenizers import Tokenizer

from runtime import FinishReason, RepetitionLimits, Request, SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime import Executor

TOKENIZER = Tokenizer.from_file(str(DATA / "tiny_qwen3_5" / "tokenizer.json"))
END_ID = 504
IM_END = 507
MAX_DRAFT = 5
# No drafts, drafts that are all right, all wrong, and right for three tokens.
DRAFT_SCRIPTS: list[list[int]] = [[], [MAX_DRAFT], [0], [3]]


def byte_ids(data: bytes) -> list[int]:
    """One id a byte: the smallest pieces a text can come in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    return [order.index(byte) for byte in data]


def text_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
def scripted(make_executor: Callable[..., Executor]) -> Executor:
    return make_executor(max_draft_tokens=MAX_DRAFT, max_scripted_tokens=512)


def say(executor: Executor, ids: list[int], **keywords: object) -> Collected:
    """What comes back when the model says `ids`."""
    keywords.setdefault("max_tokens", len(ids))
    (result,) = run(executor, Request([1, 2, 3], forced_tokens=ids, **keywords))
    assert result.num_final == 1
    assert result.num_completion_tokens == len(result.token_ids)
    assert "".join(result.deltas) == result.text
    return result


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("end_id", [END_ID, IM_END])
def test_end_id_at_every_position_of_a_block(
    scripted: Executor, end_id: int, position: int, script: list[int]
) -> None:
    """Known bug P1: nothing after the end id is sent or counted."""
    ids = [*range(10, 10 + position), end_id, *range(40, 60)]
    result = say(scripted, ids, draft_script=script, end_ids=[END_ID, IM_END])
    assert result.token_ids == ids[: position + 1]
    assert result.finish_reason is FinishReason.END_ID
    assert result.end_id == end_id
    assert result.text == TOKENIZER.decode(ids[:position], skip_special_tokens=True)
    wait_idle(scripted)
    plain = say(scripted, list(range(10, 30)))
    assert plain.token_ids == list(range(10, 30))


def test_end_ids_can_be_ignored_and_come_from_the_engine_by_default(scripted: Executor) -> None:
    ids = [10, END_ID, 11]
    assert say(scripted, ids).token_ids == [10, END_ID]
    assert say(scripted, ids, ignore_end_ids=True).token_ids == ids
    assert say(scripted, ids, end_ids=[11]).token_ids == ids


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
@pytest.mark.parametrize("max_tokens", [1, 2, MAX_DRAFT, MAX_DRAFT + 1, MAX_DRAFT + 2, 17])
def test_max_tokens_is_exact(scripted: Executor, max_tokens: int, script: list[int]) -> None:
    """Known bug P2."""
    ids = list(range(10, 40))
    result = say(scripted, ids, max_tokens=max_tokens, draft_script=script)
    assert result.token_ids == ids[:max_tokens]
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_context_end_is_a_length_end(
    make_executor: Callable[..., Executor], script: list[int]
) -> None:
    executor = make_executor(
        max_batch_size=1, max_draft_tokens=MAX_DRAFT, max_scripted_tokens=512, max_kv_tokens=8192
    )
    context_len = executor.engine.context_len
    prompt = [index % 480 for index in range(context_len - 3)]
    forced = {"forced_tokens": [8, 9, 10, 11, 12], "draft_script": script} if script else {}
    (result,) = run(executor, Request(prompt, 100, ignore_end_ids=True, **forced))
    assert len(result.token_ids) == 3
    assert result.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match=f"fewer than the context of {context_len}"):
        executor.enqueue_request(Request([1] * context_len, 1))


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_stop_beats_length_where_it_comes_first(scripted: Executor, script: list[int]) -> None:
    """Known bug T6: one step commits many tokens; stop at 3 with the cap at 5, stop at 6."""
    ids = byte_ids(b"abXcdeY")
    stop_first = say(scripted, ids, max_tokens=5, stop_strings=["X"], draft_script=script)
    assert stop_first.finish_reason is FinishReason.STOP_WORDS
    assert stop_first.token_ids == ids[:3]
    assert stop_first.text == "ab"
    assert stop_first.stop_string == "X"
    length_first = say(scripted, ids, max_tokens=5, stop_strings=["Y"], draft_script=script)
    assert length_first.finish_reason is FinishReason.LENGTH
    assert length_first.token_ids == ids[:5]
    assert length_first.text == "abXcd"


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_stop_string_never_leaks_and_false_starts_come_whole(
    scripted: Executor, script: list[int]
) -> None:
    """Known bug T1."""
    for ids in (byte_ids(b"Report\n## END tail"), text_ids("Report\n## END tail")):
        result = say(scripted, ids, stop_strings=["\n## END"], draft_script=script)
        assert result.text == "Report"
        assert result.finish_reason is FinishReason.STOP_WORDS
    result = say(scripted, byte_ids(b"Report\n## ENTRY"), stop_strings=["\n## END"])
    assert result.text == "Report\n## ENTRY"
    assert result.finish_reason is FinishReason.LENGTH


def test_stop_inside_a_token(scripted: Executor) -> None:
    """Known bug T4: the cut is made in the text, not at token borders."""
    texts = {token_id: TOKENIZER.decode([token_id]) for token_id in range(256, 500)}
    inside = max(
        (id_ for id_, text in texts.items() if text.isascii()), key=lambda i: len(texts[i])
    )
    text = texts[inside]
    assert len(text) >= 3
    stop = text[1:-1]
    assert stop
    result = say(scripted, [10, inside, 11], stop_strings=[stop])
    assert result.text == TOKENIZER.decode([10]) + text[0]
    assert result.token_ids == [10, inside]
    assert result.stop_string == stop
    included = say(scripted, [10, inside, 11], stop_strings=[stop], include_stop=True)
    assert included.text == TOKENIZER.decode([10]) + text[:-1]


PIECES = ["漢字かな交じり文", "👩‍👩‍👧‍👦 family", "e\u0301 n\u0303", "naïve £5 → ½", "plain"]


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_deltas_are_whole_characters(scripted: Executor, script: list[int]) -> None:
    """Known bug D1: any split, any step size."""
    for text in PIECES:
        result = say(scripted, byte_ids(text.encode()), draft_script=script)
        assert result.text == text
        assert all("\ufffd" not in delta for delta in result.deltas)


def test_invalid_bytes_do_not_end_a_request(scripted: Executor) -> None:
    """Known bug D3."""
    data = b"left \x80 right \xf0\x9f"
    result = say(scripted, byte_ids(data))
    assert result.text == data.decode(errors="replace")


def test_special_tokens_are_hidden_unless_asked_for(scripted: Executor) -> None:
    """Known bug D5: one rule for deltas and collected text."""
    ids = [*byte_ids(b"ab"), 500, 505, *byte_ids(b"cd"), END_ID]
    assert say(scripted, ids).text == "abcd"
    shown = say(scripted, ids, skip_special_tokens=False)
    assert shown.text == "ab<|image_pad|><|pad|>cd"


def test_deltas_hold_each_token_once(scripted: Executor) -> None:
    """Known bugs S8, S9: deltas are not cumulative and the last response repeats nothing."""
    for keywords in ({}, {"end_ids": [60]}, {"stop_strings": ["zzz"]}):
        ids = [*range(10, 30), 60]
        result = say(scripted, ids, **keywords)
        assert result.token_ids == ids
        assert sum(map(len, result.deltas)) == len(result.text)


def test_cancel_ends_with_one_final_response(make_executor: Callable[..., Executor]) -> None:
    executor = make_executor(max_batch_size=2)
    collector = Collector(executor)
    running = [collector.submit(Request([1, 2], 4000, ignore_end_ids=True)) for _ in range(2)]
    waiting = collector.submit(Request([1, 2], 4000, ignore_end_ids=True))
    while not collector.results[running[0]].token_ids:
        collector.poll(0.1)
    for request_id in (waiting, *running, *running, 10**12):
        executor.cancel_request(request_id)
    collector.finish()
    for request_id in (waiting, *running):
        assert collector.results[request_id].finish_reason is FinishReason.CANCELLED
    assert collector.results[waiting].num_completion_tokens == 0
    wait_idle(executor)
    executor.cancel_request(running[0])  # long finished: harmless
    assert run(executor, Request([1, 2], 3, ignore_end_ids=True))[0].num_completion_tokens == 3


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_cancel_storm_leaves_nothing_behind(
    make_executor: Callable[..., Executor], rounds_in_flight: int
) -> None:
    """Known bugs S4, S12: seats, pages and tables come back after thousands of random cancels."""
    rng = random.Random(7)
    executor = make_executor(
        max_batch_size=4, max_queue_size=3000, max_rounds_in_flight=rounds_in_flight
    )
    collector = Collector(executor)
    live: list[int] = []
    for _ in range(2000):
        if len(live) < 60:
            live.append(
                collector.submit(
                    Request([rng.randrange(490)] * rng.randint(1, 30), 50, ignore_end_ids=True)
                )
            )
        if rng.random() < 0.9:
            executor.cancel_request(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.1:
            executor.cancel_request(rng.randrange(10**6))
        collector.poll()
    collector.finish()
    assert all(result.num_final == 1 for result in collector.results.values())
    wait_idle(executor)
    before = time.monotonic()
    assert run(executor, Request([1, 2], 5, ignore_end_ids=True))[0].num_completion_tokens == 5
    assert time.monotonic() - before < 2.0


def test_time_limit_is_looked_at_in_the_queue(make_executor: Callable[..., Executor]) -> None:
    """Known bug Q5: an expired request never reaches prefill."""
    executor = make_executor(max_batch_size=1)
    collector = Collector(executor)
    long = collector.submit(Request([1, 2], 4000, ignore_end_ids=True))
    while not collector.results[long].token_ids:
        collector.poll(0.1)
    expired = [
        collector.submit(Request([3] * 50, 5, allotted_time_ms=20, ignore_end_ids=True))
        for _ in range(5)
    ]
    collector.finish(expired)
    executor.cancel_request(long)
    collector.finish()
    for request_id in expired:
        result = collector.results[request_id]
        assert result.finish_reason is FinishReason.TIMED_OUT
        assert result.stats is not None
        assert result.stats.num_prefill_chunks == 0
    context_tokens = sum(e.num_context_tokens for e in executor.get_latest_iteration_stats())
    assert context_tokens <= 2


def test_time_limit_ends_a_running_request(make_executor: Callable[..., Executor]) -> None:
    executor = make_executor()
    (result,) = run(executor, Request([1, 2], 4000, allotted_time_ms=60, ignore_end_ids=True))
    assert result.finish_reason is FinishReason.TIMED_OUT
    assert result.token_ids
    wait_idle(executor)


LOOP = RepetitionLimits(max_period=4, min_repeats=3, min_repeated_tokens=7)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_repetition_ends_at_the_same_token_at_every_place_of_a_block(
    make_executor: Callable[..., Executor], script: list[int], rounds_in_flight: int
) -> None:
    executor = make_executor(
        max_draft_tokens=MAX_DRAFT, max_scripted_tokens=512, max_rounds_in_flight=rounds_in_flight
    )
    for first in range(MAX_DRAFT + 2):
        lead = list(range(10, 10 + first))
        for stretch, num_repeated in (([70], 7), ([70, 71], 7), ([70, 71, 72, 73], 12)):
            ids = lead + stretch * 20
            end = first + num_repeated
            got = say(executor, ids, draft_script=script, repetition_guard=LOOP)
            assert got.finish_reason is FinishReason.REPETITION
            assert got.token_ids == ids[:end]
            assert got.text == TOKENIZER.decode(ids[:end])
            assert got.stats is not None
            assert got.stats.num_accepted <= got.stats.num_drafted
            late = {"repetition_guard": LOOP, "min_tokens": end + 4, "max_tokens": 40}
            got = say(executor, ids, draft_script=script, **late)
            assert got.token_ids == ids[: end + 5]
            short = {"repetition_guard": LOOP, "max_tokens": end - 1}
            got = say(executor, ids, draft_script=script, **short)
            assert got.finish_reason is FinishReason.LENGTH
    steps = executor.get_latest_iteration_stats()
    assert steps
    wait_idle(executor)


def test_repetition_and_the_other_ends(scripted: Executor) -> None:
    """No loop, no guard, a longer period: goes on. A stop at the same token wins; so does an id."""
    stretch = [70, 71, 72, 73, 74]
    for ids, keywords in (
        (list(range(10, 60)), {"repetition_guard": LOOP}),
        (stretch * 10, {"repetition_guard": LOOP}),
        ([70] * 50, {}),
    ):
        assert say(scripted, ids, **keywords).finish_reason is FinishReason.LENGTH
    ids = byte_ids(b"aaaaaaaaa")
    got = say(scripted, ids, repetition_guard=LOOP, max_tokens=7)
    assert (got.finish_reason, got.num_completion_tokens) == (FinishReason.REPETITION, 7)
    got = say(scripted, ids, repetition_guard=LOOP, stop_strings=["aaaaaaa"])
    assert (got.finish_reason, got.text) == (FinishReason.STOP_WORDS, "")
    got = say(scripted, ids, repetition_guard=LOOP, stop_strings=["aab"])
    assert (got.finish_reason, got.text) == (FinishReason.REPETITION, "aaaaaaa")
    got = say(scripted, [*ids[:6], END_ID], repetition_guard=LOOP)
    assert got.finish_reason is FinishReason.END_ID
    for field, value in (("max_period", 513), ("min_repeats", 1), ("min_repeated_tokens", -1)):
        bad = Request([1], 2, repetition_guard=RepetitionLimits(**{field: value}))
        with pytest.raises(ValueError, match=f"repetition_guard.{field}: {value}, expected"):
            scripted.enqueue_request(bad)


@pytest.mark.parametrize("script", DRAFT_SCRIPTS)
def test_no_end_before_min_tokens(scripted: Executor, script: list[int]) -> None:
    """A stop string counts from there on only, and no end id comes, at each position of a block."""
    stop, ids = "|", text_ids("ab|cd|ef|gh|")
    assert TOKENIZER.decode(ids) == "ab|cd|ef|gh|"
    for min_tokens in range(len(ids) + 1):
        got = say(scripted, ids, stop_strings=[stop], min_tokens=min_tokens, draft_script=script)
        free = TOKENIZER.decode(ids[:min_tokens])
        later = TOKENIZER.decode(ids)[len(free) :]
        assert got.text == free + later.split(stop)[0]
        stops = stop in later
        assert got.finish_reason is (FinishReason.STOP_WORDS if stops else FinishReason.LENGTH)
        assert got.num_completion_tokens > min_tokens or not stops

    likely = SamplingConfig(logit_bias={END_ID: 1e4})
    for min_tokens in range(2 * MAX_DRAFT):
        (got,) = run(
            scripted,
            Request([1, 2, 3], 40, sampling=likely, min_tokens=min_tokens, draft_script=script),
        )
        assert got.finish_reason is FinishReason.END_ID
        assert got.num_completion_tokens == min_tokens + 1
        assert END_ID not in got.token_ids[:-1]

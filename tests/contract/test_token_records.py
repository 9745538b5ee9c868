"""Records of tokens: what they say of each token, and that they are cut and held as its text is."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import DATA
from executor_client import Collected, Collector, run, wait_idle
from reference.token_logprobs import token_logprobs
from tokenizers import Tokenizer

from runtime import FinishReason, OutputConfig, Request, SamplingConfig
from runtime._native import Vocabulary, plugins

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runtime import Executor, TokenRecord

TOKENIZER = Tokenizer.from_file(str(DATA / "tiny_qwen3_5" / "tokenizer.json"))
END_ID = 504
MAX_DRAFT = 7
MAX_TOP = plugins.MAX_TOP_LOGPROBS
# No drafts, drafts that are all right, all wrong, and a mix.
DRAFT_SCRIPTS: list[list[int]] = [[], [MAX_DRAFT], [0], [3, 0, 7, 1]]
CROWD = 64


def records(top_logprobs: int | None = None, *, logits: bool = False) -> OutputConfig:
    return OutputConfig(
        token_records=True, top_logprobs=top_logprobs, return_generation_logits=logits
    )


@pytest.fixture
def vocabulary(engine_dir: Path) -> Vocabulary:
    return Vocabulary(str(engine_dir / "vocab.bin"))


def byte_ids(data: bytes) -> list[int]:
    """One id a byte: the smallest pieces a text can come in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    return [order.index(byte) for byte in data]


def said(record: TokenRecord) -> tuple[Any, ...]:
    """All of a record, to be compared bit by bit."""
    candidates = [(c.id, c.piece, c.logprob) for c in record.candidates]
    return record.id, record.piece, record.logprob, record.rank, candidates


def check_records(got: Collected, num_top: int | None, vocabulary: Vocabulary) -> None:
    """One record a token; with logits, each is what the reference says of them."""
    assert [record.id for record in got.records] == got.token_ids
    for index, record in enumerate(got.records):
        if num_top is None:
            assert (record.logprob, record.rank, record.candidates) == (None, None, [])
            continue
        assert record.logprob is not None
        assert record.rank is not None
        assert record.logprob <= 0
        assert [c.piece for c in record.candidates] == [
            vocabulary.token_bytes(c.id) for c in record.candidates
        ]
        assert (record.id in [c.id for c in record.candidates]) >= (record.rank < num_top)
        if got.generation_logits is None:
            continue
        want = token_logprobs(got.generation_logits[index], record.id, num_top)
        assert record.rank == want.rank
        assert [c.id for c in record.candidates] == want.top_ids
        mine = [record.logprob, *(c.logprob for c in record.candidates)]
        exact = [want.logprob, *want.top_logprobs]
        np.testing.assert_allclose(mine, exact, rtol=2**-23, atol=2e-6)


RULED = SamplingConfig(
    temperature=1.4,
    top_k=30,
    seed=5,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={3: 50.0, 17: -100.0},
)


@pytest.mark.parametrize("script", DRAFT_SCRIPTS, ids=str)
@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_records_are_of_the_raw_logits(
    make_executor: Callable[..., Executor],
    vocabulary: Vocabulary,
    rounds_in_flight: int,
    script: list[int],
) -> None:
    """Of first tokens, accepted drafts and others, said or forced, whatever rules choose them."""
    executor = make_executor(
        max_draft_tokens=MAX_DRAFT, max_scripted_tokens=64, max_rounds_in_flight=rounds_in_flight
    )
    forced = {"forced_tokens": [(7 * i) % 480 for i in range(40)], "draft_script": script}
    drafted = {**forced, "force_tokens": False}
    wanted: list[tuple[int, dict[str, Any]]] = [
        (MAX_TOP, {}),
        (3, {"sampling": RULED}),
        (0, {"sampling": SamplingConfig(temperature=2.0, seed=9)}),
        (5, forced),
        (1, {"sampling": RULED, **drafted}),
        (4, {"sampling": RULED, "min_tokens": 24, "end_ids": [3], **forced}),
    ]
    results = run(
        executor,
        *[
            Request(
                [11 * index + i for i in range(1 + 9 * index)],
                24,
                output=records(num_top, logits=True),
                ignore_end_ids="end_ids" not in keywords,
                **keywords,
            )
            for index, (num_top, keywords) in enumerate(wanted)
        ],
    )
    for got, (num_top, _) in zip(results, wanted, strict=True):
        assert len(got.token_ids) == 24
        assert got.generation_logits is not None
        check_records(got, num_top, vocabulary)
    assert all(record.rank == 1 for record in results[0].records), "greedy takes the likeliest"
    assert any(record.rank != 1 for record in results[1].records)


def test_drafts_do_not_change_logprobs(make_executor: Callable[..., Executor]) -> None:
    """Known bug P9: accepted drafts had the logprob 0, and the list did not hold them."""
    executor = make_executor(max_draft_tokens=MAX_DRAFT, max_scripted_tokens=64)
    prompt = [5, 6, 7]
    (plain,) = run(executor, Request(prompt, 40, output=records(4), ignore_end_ids=True))
    for script in DRAFT_SCRIPTS[1:]:
        (drafted,) = run(
            executor,
            Request(
                prompt,
                40,
                output=records(4),
                ignore_end_ids=True,
                forced_tokens=plain.token_ids,
                force_tokens=False,
                draft_script=script,
            ),
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats is not None
        assert (drafted.stats.num_accepted > 0) == any(script)
        for mine, theirs in zip(drafted.records, plain.records, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert mine.logprob != 0
            assert mine.id == mine.candidates[0].id
            assert [c.id for c in mine.candidates] == [c.id for c in theirs.candidates]


def crowd_request(rng: random.Random) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "input_token_ids": [rng.randrange(490) for _ in range(rng.randint(1, 70))],
        "max_tokens": rng.randint(1, 24),
        "ignore_end_ids": rng.random() < 0.5,
        "stop_strings": rng.choice([[], [], ["e"], ["th"]]),
    }
    if rng.random() < 0.5:
        keywords["sampling"] = SamplingConfig(
            temperature=rng.choice([0.5, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            seed=rng.randrange(2**64),
        )
    if rng.random() < 0.75:
        keywords["output"] = records(rng.choice([None, 0, 1, 5, MAX_TOP]))
    if rng.random() < 0.4:
        keywords["forced_tokens"] = [rng.randrange(490) for _ in range(24)]
        keywords["force_tokens"] = False
        keywords["draft_script"] = rng.choice(DRAFT_SCRIPTS[1:])
    return keywords


@pytest.mark.parametrize(("num_threads", "rounds_in_flight"), [(1, 1), (2, 2)])
def test_each_of_64_has_the_records_it_has_alone(
    make_executor: Callable[..., Executor],
    vocabulary: Vocabulary,
    num_threads: int,
    rounds_in_flight: int,
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    wanted = [crowd_request(rng) for _ in range(CROWD)]
    drafts = {"max_draft_tokens": MAX_DRAFT, "max_scripted_tokens": 64}
    alone = make_executor(max_batch_size=1, **drafts)
    solo = [run(alone, Request(**keywords))[0] for keywords in wanted]
    crowd = make_executor(
        max_batch_size=5,
        max_num_tokens=160,
        max_kv_tokens=5 * 160,
        kv_page_size=16,
        num_threads=num_threads,
        max_rounds_in_flight=rounds_in_flight,
        **drafts,
    )
    collector = Collector(crowd)
    ids = []
    for index, keywords in enumerate(wanted):
        ids.append(collector.submit(Request(**keywords)))
        if rng.random() < 0.3:
            collector.poll(rng.uniform(0, 0.01))
        if index % 6 == 0:
            crowd.cancel_request(rng.choice(ids))
    collector.finish()
    for request_id, expected, keywords in zip(ids, solo, wanted, strict=True):
        got = collector.results[request_id]
        assert len(got.records) == (len(got.token_ids) if "output" in keywords else 0)
        mine, theirs = [said(r) for r in got.records], [said(r) for r in expected.records]
        if got.finish_reason is FinishReason.CANCELLED:
            theirs = theirs[: len(mine)]
        else:
            assert got.token_ids == expected.token_ids
        assert mine == theirs
        if "output" in keywords:
            check_records(got, keywords["output"].top_logprobs, vocabulary)
    wait_idle(crowd)


@pytest.fixture
def scripted(make_executor: Callable[..., Executor]) -> Executor:
    return make_executor(max_draft_tokens=MAX_DRAFT, max_scripted_tokens=512)


def say(executor: Executor, ids: list[int], **keywords: object) -> Collected:
    """What comes back when the model says `ids`."""
    keywords = {"max_tokens": len(ids), "output": records(2), **keywords}
    (result,) = run(executor, Request([1, 2, 3], forced_tokens=ids, **keywords))
    assert [record.id for record in result.records] == result.token_ids
    assert result.num_completion_tokens == len(result.records)
    return result


@pytest.mark.parametrize("script", DRAFT_SCRIPTS, ids=str)
@pytest.mark.parametrize("position", range(10))
def test_records_end_where_the_answer_does(
    scripted: Executor, vocabulary: Vocabulary, position: int, script: list[int]
) -> None:
    """End token, limit and stop string at each position of a block; the last token is listed."""
    ids = list(range(10, 30))
    ended = say(
        scripted, [*ids[:position], END_ID, *ids[position:]], draft_script=script, end_ids=[END_ID]
    )
    assert ended.finish_reason is FinishReason.END_ID
    assert [record.id for record in ended.records] == [*ids[:position], END_ID]
    assert ended.records[-1].piece == b"", "special tokens are hidden"
    limited = say(scripted, ids, draft_script=script, max_tokens=position + 1)
    assert [record.id for record in limited.records] == ids[: position + 1]
    letters = byte_ids(b"abcdefghijklm")
    stopped = say(
        scripted, letters, draft_script=script, stop_strings=["abcdefghijklm"[position:][:2]]
    )
    assert stopped.text == "abcdefghijklm"[:position]
    assert b"".join(record.piece for record in stopped.records) == b"abcdefghijklm"[: position + 2]
    for result in (ended, limited, stopped):
        check_records(result, 2, vocabulary)


def test_token_cut_by_a_stop_string_is_listed_whole(scripted: Executor) -> None:
    texts = {token_id: TOKENIZER.decode([token_id]) for token_id in range(256, 500)}
    inside = max((i for i, text in texts.items() if text.isascii()), key=lambda i: len(texts[i]))
    assert len(texts[inside]) >= 3
    result = say(scripted, [10, inside, 11], stop_strings=[texts[inside][1:-1]])
    assert result.text == TOKENIZER.decode([10]) + texts[inside][0]
    assert [record.piece for record in result.records] == [
        TOKENIZER.decode([10]).encode(),
        texts[inside].encode(),
    ]


def test_pieces_are_bytes_and_hidden_ones_empty(scripted: Executor) -> None:
    data = "é漢👩".encode()
    ids = [*byte_ids(data), 505, *byte_ids(b"\xff"), END_ID]
    result = say(scripted, ids)
    assert b"".join(record.piece for record in result.records) == data + b"\xff"
    assert [record.piece for record in result.records[:-3]] == [bytes([byte]) for byte in data]
    assert result.text == "é漢👩\ufffd"
    shown = say(scripted, ids, skip_special_tokens=False)
    assert shown.records[-1].piece == TOKENIZER.decode([END_ID], skip_special_tokens=False).encode()
    assert shown.text == "é漢👩<|pad|>\ufffd"


@pytest.mark.parametrize("script", DRAFT_SCRIPTS, ids=str)
def test_a_record_waits_with_its_text(scripted: Executor, script: list[int]) -> None:
    """Never before it, with it where it is a text of its own, and all of them in the end."""
    data = "ab\ncd\n## E\n\n## EN\nxyz é漢 tail\n##".encode()
    request_id = scripted.enqueue_request(
        Request(
            [1, 2, 3],
            len(data),
            forced_tokens=byte_ids(data),
            draft_script=script,
            stop_strings=["\n## END"],
            output=records(),
        )
    )
    text, pieces = "", b""
    deadline = time.monotonic() + 30
    final = False
    while not final:
        assert time.monotonic() < deadline
        for response in scripted.await_responses(1.0):
            assert response.request_id == request_id
            text += response.text
            pieces += b"".join(record.piece for record in response.records)
            # One byte a token: what is listed is the text so far, to the byte.
            assert pieces == text.encode()
            final = response.is_final
    assert text == data.decode()


def test_held_records_come_with_a_cancel(make_executor: Callable[..., Executor]) -> None:
    executor = make_executor(max_draft_tokens=MAX_DRAFT, max_scripted_tokens=512)
    collector = Collector(executor)
    ids = byte_ids(b"ab" + b"#" * 400)
    running = collector.submit(
        Request([1], 400, forced_tokens=ids, stop_strings=["#" * 500], output=records(1))
    )
    while len(collector.results[running].token_ids) < 5:
        collector.poll(0.1)
        got = collector.results[running]
        assert len(got.records) <= 2 or got.num_final
    executor.cancel_request(running)
    collector.finish()
    got = collector.results[running]
    assert [record.id for record in got.records] == got.token_ids
    assert got.text.encode() == b"".join(record.piece for record in got.records)


@pytest.mark.parametrize("script", DRAFT_SCRIPTS, ids=str)
def test_stop_id_keeps_its_text_where_asked(scripted: Executor, script: list[int]) -> None:
    ids = byte_ids(b"one two|three")
    (bar,) = byte_ids(b"|")
    (letter,) = byte_ids(b"w")
    for include_stop in (False, True):
        keywords: dict[str, Any] = {"include_stop": include_stop, "draft_script": script}
        got = say(scripted, ids, stop_ids=[bar], **keywords)
        assert got.text == ("one two|" if include_stop else "one two")
        assert (got.finish_reason, got.end_id) == (FinishReason.END_ID, bar)
        assert got.token_ids == ids[:8]
        # An end token is never text, not even where it is named as a stop too.
        ended = say(scripted, ids, end_ids=[bar], stop_ids=[bar, letter], **keywords)
        assert ended.text == ("one tw" if include_stop else "one t")
        assert ended.end_id == letter
        named = say(scripted, ids, end_ids=[bar], stop_ids=[bar], **keywords)
        assert (named.text, named.end_id) == ("one two", bar)
        # A stop string that the stop token completes is the earlier end.
        both = say(scripted, ids, stop_ids=[bar], stop_strings=["o|"], **keywords)
        assert both.text == ("one two|" if include_stop else "one two")
        reason = FinishReason.STOP_WORDS if include_stop else FinishReason.END_ID
        assert both.finish_reason is reason
        assert both.end_id == (None if include_stop else bar)
        ignored = say(scripted, [*ids, END_ID, bar], ignore_end_ids=True, stop_ids=[14], **keywords)
        assert ignored.token_ids == [*ids, END_ID, bar]


def test_wishes_that_are_refused(make_executor: Callable[..., Executor]) -> None:
    executor = make_executor()
    for output, found in (
        (OutputConfig(token_records=True, top_logprobs=MAX_TOP + 1), rf"{MAX_TOP + 1}, expected 0"),
        (OutputConfig(token_records=True, top_logprobs=-1), "-1, expected 0"),
        (OutputConfig(top_logprobs=0), "token_records with it"),
    ):
        with pytest.raises(ValueError, match=rf"output.top_logprobs: .*{found}"):
            executor.enqueue_request(Request([1], 1, output=output))
    with pytest.raises(ValueError, match="end_ids, stop_ids: 9 ids, expected at most 8"):
        executor.enqueue_request(Request([1], 1, stop_ids=list(range(8))))
    with pytest.raises(ValueError, match="stop_ids: id 512"):
        executor.enqueue_request(Request([1], 1, stop_ids=[512]))

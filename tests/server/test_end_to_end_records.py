"""Token records of the real engine through server and SDK."""

import math
from pathlib import Path

from fakes.app import ask, on_loop
from fakes.app import serving as fake_serving
from real_server import RealServer, decode, encode, recorded, serving, tokens

from deltaflash.v1 import generation_pb2
from deltaflash_client import (
    Capability,
    Completion,
    Delta,
    Finished,
    FinishReason,
    OutputOptions,
    SamplingOptions,
    StopMatch,
    TokenCandidate,
    TokenIds,
    TokenRecord,
)
from server import backend
from server.services.events import MAX_DELTA_CHARS, MAX_DELTA_RECORDS, delta_events

END_ID = 504


async def answer_to(server: RealServer, prompt: list[int], **options: object) -> Completion:
    """One answer, streamed and collected."""
    collected = await server.client.generate_text(TokenIds(prompt), **options)
    text = ""
    records: list[object] = []
    async for event in server.client.generate(TokenIds(prompt), **options):
        if isinstance(event, Delta):
            assert event.text or event.tokens
            text += event.text
            records += event.tokens
        if isinstance(event, Finished) and "output" in options:
            assert len(records) == event.usage.completion_tokens
    assert (text, tuple(records)) == (collected.text, collected.tokens)
    return collected


@on_loop
async def test_records_stream_with_the_text(engine_dir: Path) -> None:
    prompt, answer = recorded("tiny_qwen3_5", "text")
    async with serving(engine_dir) as server:
        plain = await answer_to(server, prompt, stopping=tokens(len(answer)))
        assert plain.tokens == ()
        for top_logprobs in (None, 0, 3, 20):
            output = OutputOptions(token_records=True, top_logprobs=top_logprobs)
            got = await answer_to(server, prompt, stopping=tokens(len(answer)), output=output)
            assert got.text == plain.text == decode(answer)
            assert [record.id for record in got.tokens] == answer
            whole = b"".join(record.piece for record in got.tokens)
            assert whole.decode(errors="replace") == got.text
            for record in got.tokens:
                assert len(record.candidates) == (top_logprobs or 0)
                if top_logprobs is None:
                    assert (record.logprob, record.rank) == (None, None)
                else:
                    check_greedy(record)
        await server.until_idle()


def check_greedy(record: TokenRecord) -> None:
    """The token is the likeliest, by numbers that can be logarithms of probabilities."""
    assert record.rank == 1
    assert record.logprob is not None
    assert record.logprob < 0
    logprobs = [candidate.logprob for candidate in record.candidates]
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(map(math.exp, logprobs)) < 1 + 1e-5
    first = TokenCandidate(record.id, record.piece, record.logprob)
    assert record.candidates[:1] in {(), (first,)}


@on_loop
async def test_logprobs_know_no_temperature_and_no_bias(engine_dir: Path) -> None:
    prompt, answer = recorded("tiny_qwen3_5", "text")
    async with serving(engine_dir) as server:
        biased = await answer_to(
            server,
            prompt,
            stopping=tokens(1),
            output=OutputOptions(token_records=True, top_logprobs=2),
            sampling=SamplingOptions(temperature=0.5, seed=1, logit_bias={answer[1]: 100.0}),
        )
        (record,) = biased.tokens
        assert record.id == answer[1]
        assert record.rank is not None
        assert record.rank > 1
        assert record.logprob is not None
        assert record.logprob < record.candidates[0].logprob
        assert record.candidates[0].id == answer[0]


@on_loop
async def test_records_are_cut_where_the_text_is(engine_dir: Path) -> None:
    """The last token of a stop string is listed, and so is the end token."""
    prompt, answer = recorded("tiny_qwen3_5", "text")
    output = OutputOptions(token_records=True, top_logprobs=1)
    async with serving(engine_dir) as server:
        stop = decode(answer[:6])[-2:]
        cut = await answer_to(
            server, prompt, stopping=tokens(24, stop_strings=[stop]), output=output
        )
        assert cut.finish_reason is FinishReason.STOP
        assert [record.id for record in cut.tokens] == answer[: len(cut.tokens)]
        assert stop not in cut.text
        assert stop in decode([record.id for record in cut.tokens])
        ended = await answer_to(
            server,
            prompt,
            stopping=tokens(24, min_tokens=2, ignore_eos=False),
            output=output,
            sampling=SamplingOptions(logit_bias={END_ID: 100.0}),
        )
        assert ended.stop_match == StopMatch(end_token_id=END_ID)
        assert [record.id for record in ended.tokens] == [*answer[:2], END_ID]
        assert ended.tokens[-1].piece == b""
        await server.until_idle()


@on_loop
async def test_stop_tokens_text_is_in_the_output_where_asked(engine_dir: Path) -> None:
    prompt, answer = recorded("tiny_qwen3_5", "text")
    place = next(i for i in range(3, len(answer)) if answer[i] not in answer[:i])
    async with serving(engine_dir) as server:
        for include in (False, True):
            got = await server.client.generate_text(
                TokenIds(prompt),
                stopping=tokens(
                    40,
                    stop_token_ids=[answer[place]],
                    stop_strings=["no such text"],
                    include_stop_in_output=include,
                ),
            )
            assert got.text == decode(answer[: place + include])
            assert got.stop_match == StopMatch(stop_token_id=answer[place])
            assert got.usage.completion_tokens == place + 1
        ended = await server.client.generate_text(
            TokenIds(prompt),
            stopping=tokens(
                40, stop_token_ids=encode("x"), include_stop_in_output=True, ignore_eos=False
            ),
            sampling=SamplingOptions(logit_bias={END_ID: 100.0}),
            output=OutputOptions(skip_special_tokens=False),
        )
        assert ended.text == ""
        assert ended.stop_match == StopMatch(end_token_id=END_ID)


@on_loop
async def test_server_says_what_it_can_list(engine_dir: Path) -> None:
    async with serving(engine_dir) as server:
        info = await server.client.server_info()
        assert info.limits.max_top_logprobs == 20
        assert {Capability.TOKEN_RECORDS, Capability.LOGPROBS} <= info.capabilities


@on_loop
async def test_records_only_where_asked() -> None:
    async with fake_serving() as served:
        for asked in (False, True):
            output = generation_pb2.OutputOptions(token_records=asked)
            call = served.generate(ask(output=output))
            deltas = [event.delta async for event in call if event.HasField("delta")]
            pieces = b"".join(token.piece for delta in deltas for token in delta.tokens)
            text = "".join(delta.text for delta in deltas)
            assert pieces.decode() == (text if asked else "")


def test_a_late_readers_records_come_in_bounded_deltas() -> None:
    count = 2 * MAX_DELTA_RECORDS + 1
    records = tuple(backend.TokenRecord(i, b"x") for i in range(count))
    text = "y" * (MAX_DELTA_CHARS + 5)
    deltas = list(delta_events(backend.TokenEvent(text, (), None, records)))
    assert [(len(d.text), len(d.tokens)) for d in deltas] == [
        (MAX_DELTA_CHARS, 0),
        (5, MAX_DELTA_RECORDS),
        (0, MAX_DELTA_RECORDS),
        (0, 1),
    ]
    assert [t.id for d in deltas for t in d.tokens] == list(range(count))
    assert list(delta_events(backend.TokenEvent("", (1,)))) == []
    (only,) = delta_events(backend.TokenEvent("", (1,), None, records[:1]))
    assert not only.tokens[0].HasField("logprob")

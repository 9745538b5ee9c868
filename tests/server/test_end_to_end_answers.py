"""Answers of the real engine through server and SDK: the recorded text, whole, however it ends."""

import asyncio
from pathlib import Path

import pytest
from fakes.app import on_loop
from real_server import (
    NO_RETRY,
    RealServer,
    decode,
    encode,
    fresh_random,
    read_all,
    recorded,
    serving,
    tokens,
)

from deltaflash_client import (
    Chat,
    ChatMessage,
    ChatRole,
    Client,
    Completion,
    Delta,
    ErrorReason,
    Finished,
    FinishReason,
    InvalidArgumentError,
    OutputOptions,
    Prompt,
    RepetitionGuard,
    SamplingOptions,
    Started,
    StopMatch,
    StoppingOptions,
    TokenIds,
)

END_ID, IM_END = 504, 507
RANDOM = 100.0
"""The highest temperature: nearly any token may come, the end tokens among them."""


@pytest.fixture(scope="session")
def ratio3_dir(engine_dirs: dict[str, Path]) -> Path:
    """An engine with two end tokens."""
    return engine_dirs["tiny_ratio3"]


async def ask_both(server: RealServer, prompt: Prompt, **options: object) -> Completion:
    """One answer, asked for in four ways that have to agree (known bugs M1, S8, S9)."""
    started, deltas, finished = await read_all(server.client.generate(prompt, **options))
    collected = await server.client.generate_text(prompt, **options)

    def blocking() -> tuple[Completion, str, list[object]]:
        with Client(server.address, NO_RETRY) as client:
            text = "".join(client.generate(prompt, **options).text())
            return (
                client.generate_text(prompt, **options),
                text,
                list(client.generate(prompt, **options)),
            )

    blocking_collected, blocking_text, events = await asyncio.to_thread(blocking)
    whole = "".join(deltas)
    assert all(deltas)
    assert sum(map(len, deltas)) == len(whole)
    assert {whole, collected.text, blocking_collected.text, blocking_text} == {whole}
    kinds = [type(event) for event in events]
    assert kinds[0] is Started
    assert kinds[-1] is Finished
    assert set(kinds[1:-1]) <= {Delta}
    for other in (collected, blocking_collected):
        assert other.finish_reason is finished.finish_reason
        assert other.stop_match == finished.stop_match
        assert other.usage == finished.usage
        assert other.seed == started.seed
    return collected


@pytest.mark.parametrize(
    ("checkpoint", "case"),
    [
        ("tiny_qwen3_5", "text"),
        ("tiny_qwen3_5", "long"),
        ("tiny_ratio3", "text"),
        ("tiny_ratio3", "medium"),
        ("tiny_ratio3", "long"),
    ],
)
@on_loop
async def test_recorded_greedy_answer(
    engine_dirs: dict[str, Path], checkpoint: str, case: str
) -> None:
    prompt, answer = recorded(checkpoint, case)
    async with serving(engine_dirs[checkpoint]) as server:
        for length in (1, 5, len(answer)):
            got = await ask_both(server, TokenIds(prompt), stopping=tokens(length))
            assert got.text == decode(answer[:length], checkpoint)
            assert got.finish_reason is FinishReason.LENGTH
            assert got.stop_match is None
            assert got.usage.prompt_tokens == len(prompt)
            assert got.usage.completion_tokens == length
            assert got.usage.total_tokens == len(prompt) + length
            assert got.seed is None
        await server.until_idle()


@on_loop
async def test_each_recorded_token_ends_the_answer_when_named(engine_dir: Path) -> None:
    """The ids themselves, which text alone may hide: each as stop token at its first place."""
    prompt, answer = recorded("tiny_qwen3_5", "text")
    async with serving(engine_dir) as server:
        for place, token_id in enumerate(answer):
            if token_id in answer[:place]:
                continue
            got = await server.client.generate_text(
                TokenIds(prompt), stopping=tokens(40, stop_token_ids=[token_id])
            )
            assert got.finish_reason is FinishReason.STOP
            assert got.stop_match == StopMatch(stop_token_id=token_id)
            assert got.usage.completion_tokens == place + 1
            assert got.text == decode(answer[:place])


@on_loop
async def test_text_and_chat_are_their_tokens(engine_dir: Path) -> None:
    text = "The quick brown fox, größer <|im_start|>"
    layout = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRead this.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    turns = [ChatMessage(ChatRole.SYSTEM, "Be brief."), ChatMessage(ChatRole.USER, "Read this.")]
    pairs: list[tuple[Prompt, list[int]]] = [
        (text, encode(text)),
        (Chat(turns, enable_thinking=True), encode(layout)),
        (Chat(turns), encode(f"{layout}\n</think>\n\n")),
    ]
    async with serving(engine_dir) as server:
        for prompt, ids in pairs:
            got = await server.client.generate_text(prompt, stopping=tokens(24))
            same = await server.client.generate_text(TokenIds(ids), stopping=tokens(24))
            assert got.usage.prompt_tokens == len(ids)
            assert got.text == same.text


@on_loop
async def test_same_prompt_twice_is_the_same_answer(engine_dir: Path) -> None:
    """Known bug K11: no state of one answer is taken up by the next."""
    prompt, answer = recorded("tiny_qwen3_5", "long")
    async with serving(engine_dir, {"max_batch_size": 2}) as server:
        for _ in range(6):
            got = await server.client.generate_text(TokenIds(prompt), stopping=tokens(16))
            assert got.text == decode(answer)


@on_loop
async def test_stop_strings_cut_streams_and_whole_answers_alike(engine_dir: Path) -> None:
    """Known bugs T1, T4, S9: no part of a stop string leaks, nothing behind it comes."""
    rng = fresh_random()
    prompt = TokenIds([5, 9, 33])
    async with serving(engine_dir) as server:
        full = (await server.client.generate_text(prompt, stopping=tokens(120))).text
        for _ in range(12):
            begin = rng.randrange(len(full) - 6)
            stop = full[begin : begin + rng.randint(1, 6)]
            if "\ufffd" in stop:
                continue
            place = full.find(stop)
            got = await ask_both(server, prompt, stopping=tokens(120, stop_strings=["\0", stop]))
            assert got.text == full[:place], stop
            assert got.finish_reason is FinishReason.STOP
            assert got.stop_match == StopMatch(stop_string=stop)
            shown = await server.client.generate_text(
                prompt,
                stopping=tokens(120, stop_strings=[stop], include_stop_in_output=True),
            )
            assert shown.text == full[: place + len(stop)]
            assert shown.usage == got.usage
        # A false start at the very end is released.
        got = await ask_both(server, prompt, stopping=tokens(120, stop_strings=[full[-3:] + "\0"]))
        assert got.text == full
        assert got.finish_reason is FinishReason.LENGTH


@on_loop
async def test_lengths_are_exact_up_to_the_context(engine_dir: Path) -> None:
    async with serving(engine_dir) as server:
        context = server.engine.backend.info.context_len
        for length in (1, 2, 3, 63, 64, 65, 129):
            got = await server.client.generate_text(TokenIds([3, 4]), stopping=tokens(length))
            assert got.usage.completion_tokens == length
            assert got.finish_reason is FinishReason.LENGTH
            assert got.stats.steps == length - 1
        for room in (1, 6):
            prompt = TokenIds([index % 490 for index in range(context - room)])
            stream = server.client.generate(prompt, stopping=tokens(50))
            started, _, finished = await read_all(stream)
            assert started.max_tokens == finished.usage.completion_tokens == room
            assert finished.finish_reason is FinishReason.LENGTH
        await server.until_idle()


@on_loop
async def test_end_tokens_end_the_answer_and_leave_no_text(ratio3_dir: Path) -> None:
    """Known bugs D5 and S9: the end token counts, but no mode shows it unless told to go on."""
    seen: set[int | None] = set()
    async with serving(ratio3_dir) as server:
        info = await server.client.model_info()
        assert info.end_token_ids == (END_ID, IM_END)
        for seed in range(24):
            sampling = SamplingOptions(temperature=RANDOM, seed=seed)
            prompt = TokenIds([1, 2, 3])
            stopping = StoppingOptions(max_tokens=3000)
            got = await server.client.generate_text(prompt, sampling=sampling, stopping=stopping)
            assert got.finish_reason is FinishReason.STOP
            assert got.stop_match is not None
            assert got.stop_match.end_token_id in {END_ID, IM_END}
            assert "<|" not in got.text
            if got.stop_match.end_token_id in seen:
                continue
            seen.add(got.stop_match.end_token_id)
            length = got.usage.completion_tokens
            for output in (None, OutputOptions(skip_special_tokens=False)):
                again = await ask_both(
                    server, prompt, sampling=sampling, stopping=stopping, output=output
                )
                assert again.usage.completion_tokens == length
                assert not again.text.endswith("|>")
            longer = await server.client.generate_text(
                prompt, sampling=sampling, stopping=tokens(length + 20)
            )
            assert longer.usage.completion_tokens == length + 20
            assert longer.text.startswith(got.text.rstrip("\ufffd"))
            shown = await server.client.generate_text(
                prompt,
                sampling=sampling,
                stopping=tokens(length),
                output=OutputOptions(skip_special_tokens=False),
            )
            assert shown.text.endswith(
                {END_ID: "<|endoftext|>", IM_END: "<|im_end|>"}[
                    got.stop_match.end_token_id or END_ID
                ]
            )
            if len(seen) == 2:
                break
    assert seen == {END_ID, IM_END}


@on_loop
async def test_rules_for_logits_change_the_answer(engine_dir: Path) -> None:
    prompt, answer = recorded("tiny_qwen3_5", "text")
    forced = next(i for i in range(100, 400) if i not in answer)
    async with serving(engine_dir) as server:
        limits = (await server.client.server_info()).limits
        assert limits.max_logit_biases == 256

        async def answer_to(**sampling: object) -> Completion:
            return await ask_both(
                server, TokenIds(prompt), sampling=SamplingOptions(**sampling), stopping=tokens(24)
            )

        plain = await answer_to()
        got = await answer_to(logit_bias={forced: 100.0})
        assert got.text == decode([forced] * 24)
        got = await answer_to(logit_bias={answer[0]: -100.0})
        assert got.text != plain.text
        others = [
            (await answer_to(**{name: value})).text
            for name, value in {
                "repetition_penalty": 3.0,
                "presence_penalty": 5.0,
                "frequency_penalty": 5.0,
            }.items()
        ]
        assert plain.text not in others
        off = await answer_to(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        assert off.text == plain.text
        await server.until_idle()


@on_loop
async def test_loops_end_the_answer(engine_dir: Path) -> None:
    """At the token at which the guard of the request, or else the server's, is full."""
    prompt, _ = recorded("tiny_qwen3_5", "text")
    loop = SamplingOptions(logit_bias={105: 100.0})

    async def answer_to(server: RealServer, **stopping: object) -> tuple[int, FinishReason]:
        got = await ask_both(
            server, TokenIds(prompt), sampling=loop, stopping=tokens(300, **stopping)
        )
        assert got.text == decode([105] * got.usage.completion_tokens)
        return got.usage.completion_tokens, got.finish_reason

    length, repetition = (300, FinishReason.LENGTH), FinishReason.REPETITION
    guard = RepetitionGuard(max_period=5, min_repeats=4, min_repeated_tokens=11)
    async with serving(engine_dir) as server:
        assert await answer_to(server) == length
        assert await answer_to(server, repetition_guard=RepetitionGuard()) == (256, repetition)
        assert await answer_to(server, repetition_guard=RepetitionGuard(enabled=False)) == length
        assert await answer_to(server, repetition_guard=guard) == (11, repetition)
        assert await answer_to(server, repetition_guard=guard, min_tokens=40) == (41, repetition)
        await server.until_idle()
    async with serving(engine_dir, repetition_guard=True) as server:
        assert await answer_to(server) == (256, repetition)
        assert await answer_to(server, repetition_guard=RepetitionGuard(enabled=False)) == length
        assert await answer_to(server, repetition_guard=guard) == (11, repetition)


@on_loop
async def test_nothing_ends_the_answer_before_min_tokens(engine_dir: Path) -> None:
    prompt, answer = recorded("tiny_qwen3_5", "text")
    stop = decode(answer[:1])
    async with serving(engine_dir) as server:
        context = server.engine.backend.info.context_len
        early = await server.client.generate_text(
            TokenIds(prompt), stopping=tokens(24, stop_token_ids=[answer[0]])
        )
        assert early.usage.completion_tokens == 1
        got = await server.client.generate_text(
            TokenIds(prompt), stopping=tokens(24, stop_token_ids=[answer[0]], min_tokens=9)
        )
        assert got.usage.completion_tokens > 9
        got = await server.client.generate_text(
            TokenIds(prompt), stopping=tokens(8, stop_strings=[stop], min_tokens=8)
        )
        assert got.finish_reason is FinishReason.LENGTH
        assert got.text == decode(answer[:8])
        with pytest.raises(InvalidArgumentError) as caught:
            await server.client.generate_text(
                TokenIds([3] * (context - 6)), stopping=tokens(9, min_tokens=7)
            )
        assert caught.value.reason is ErrorReason.PROMPT_TOO_LONG

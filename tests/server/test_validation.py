"""Every bad field is refused by name, at once; what cannot be done is refused, never ignored."""

import asyncio
import logging
import math
import time
from dataclasses import replace

import grpc
import pytest
from fakes.app import Details, ask, error_of, on_loop, serving
from fakes.backend import INFO, FakeBackend
from fakes.tokenizer import id_of

from deltaflash.v1 import control_pb2, documents_pb2, generation_pb2, inference_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def sampling(**fields: object) -> inference_pb2.GenerateRequest:
    return ask(sampling=generation_pb2.SamplingOptions(**fields))


def stopping(**fields: object) -> inference_pb2.GenerateRequest:
    return ask(stopping=generation_pb2.StoppingOptions(**fields))


def output(**fields: object) -> inference_pb2.GenerateRequest:
    return ask(output=generation_pb2.OutputOptions(**fields))


def speculation(**fields: object) -> inference_pb2.GenerateRequest:
    return ask(speculation=generation_pb2.SpeculationOptions(**fields))


def token_ids(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))


def chat(
    *turns: tuple[int, str | list[inference_pb2.ContentPart]],
) -> inference_pb2.GenerateRequest:
    messages = []
    for role, content in turns:
        parts = [inference_pb2.ContentPart(text=content)] if isinstance(content, str) else content
        messages.append(inference_pb2.ChatMessage(role=role, content=parts))
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))


GENERATE = "/deltaflash.v1.InferenceService/Generate"


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def chat_bytes(messages: bytes) -> bytes:
    """A request with a chat of these serialised messages."""
    number = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    return varint(number << 3 | 2) + varint(len(messages)) + messages


USER, SYSTEM = inference_pb2.CHAT_ROLE_USER, inference_pb2.CHAT_ROLE_SYSTEM
PICTURE = inference_pb2.ContentPart(image=generation_pb2.Image(data=b"x"))
NO_VALUES = (math.nan, math.inf, -math.inf)

FIELDS = [
    *[(sampling(temperature=x), "sampling.temperature") for x in (-0.1, 100.1, *NO_VALUES)],
    *[(sampling(top_k=x), "sampling.top_k") for x in (301, 2**32 - 1)],
    *[(sampling(top_p=x), "sampling.top_p") for x in (0, -0.5, 1.01, *NO_VALUES)],
    *[(sampling(min_p=x), "sampling.min_p") for x in (-0.01, 1.01, *NO_VALUES)],
    *[
        (sampling(repetition_penalty=x), "sampling.repetition_penalty")
        for x in (0, -1, 10.1, *NO_VALUES)
    ],
    *[(sampling(presence_penalty=x), "sampling.presence_penalty") for x in (-11, 11, *NO_VALUES)],
    *[(sampling(frequency_penalty=x), "sampling.frequency_penalty") for x in (-11, 11, math.nan)],
    (sampling(logit_bias={300: 1}), "sampling.logit_bias[300]"),
    *[(sampling(logit_bias={7: x}), "sampling.logit_bias[7]") for x in (101, -101, *NO_VALUES)],
    *[(stopping(max_tokens=x), "stopping.max_tokens") for x in (0, 4096, 2**32 - 1)],
    (sampling(logit_bias=dict.fromkeys(range(257), 1)), "sampling.logit_bias"),
    (stopping(max_tokens=4, min_tokens=5), "stopping.min_tokens"),
    (stopping(min_tokens=65), "stopping.min_tokens"),
    (stopping(stop_strings=["a"] * 17), "stopping.stop_strings"),
    (stopping(stop_strings=["a", ""]), "stopping.stop_strings[1]"),
    (stopping(stop_strings=["ü" * 129]), "stopping.stop_strings[0]"),
    (stopping(stop_token_ids=[1] * 8), "stopping.stop_token_ids"),
    (stopping(stop_token_ids=[1, 300]), "stopping.stop_token_ids[1]"),
    (output(top_logprobs=3), "output.top_logprobs"),
    (output(token_records=True, top_logprobs=21), "output.top_logprobs"),
    (output(top_logprobs=2**32 - 1), "output.top_logprobs"),
    (speculation(max_draft_tokens=0), "speculation.max_draft_tokens"),
    (ask(num_sequences=0), "num_sequences"),
    (ask(grammar=generation_pb2.Grammar()), "grammar"),
    (ask(grammar=generation_pb2.Grammar(regex="")), "grammar.regex"),
    (ask(lora_adapter=""), "lora_adapter"),
    *[(ask(priority=x), "priority") for x in (-101, 101, 2**31 - 1)],
    *[(ask(request_id=x), "request_id") for x in ("", "a b", "ü", "x" * 129, "a\n")],
    (ask(model=""), "model"),
    (token_ids(1, 300), "token_ids.ids[1]"),
    (token_ids(2**32 - 1), "token_ids.ids[0]"),
    (token_ids(id_of("<|image_pad|>")), "token_ids"),
    (ask("a <|image_pad|> b"), "text"),
    (chat((0, "hi")), "chat.messages[0].role"),
    (chat((99, "hi")), "chat.messages[0].role"),
    (chat((USER, "hi"), (SYSTEM, "no")), "chat.messages[1].role"),
    (chat((USER, [])), "chat.messages[0].content"),
    (chat((USER, [inference_pb2.ContentPart()])), "chat.messages[0].content[0]"),
    (chat((USER, "refuse")), "chat"),
]

FEATURES = [
    (speculation(enabled=True), "speculation.enabled"),
    (speculation(max_draft_tokens=3), "speculation.max_draft_tokens"),
    (ask(num_sequences=2), "num_sequences"),
    (ask(grammar=generation_pb2.Grammar(regex="a+")), "grammar"),
    (ask(lora_adapter="mine"), "lora_adapter"),
    (ask(priority=1), "priority"),
    (chat((USER, [PICTURE])), "chat.messages[0].content[0].image"),
]

FINE = [
    sampling(temperature=100, top_k=300, top_p=1, min_p=1, seed=2**64 - 1),
    sampling(temperature=0, top_p=1e-30, min_p=0, seed=0),
    sampling(repetition_penalty=1, presence_penalty=0, frequency_penalty=0),
    sampling(repetition_penalty=10, presence_penalty=-10, frequency_penalty=10),
    sampling(repetition_penalty=1e-30, logit_bias={0: 100, 299: -100}),
    sampling(logit_bias=dict.fromkeys(range(256), 1)),
    stopping(max_tokens=2000, min_tokens=2000),
    stopping(min_tokens=64),
    stopping(max_tokens=1, min_tokens=0, ignore_eos=True, include_stop_in_output=True),
    stopping(stop_strings=["a"] * 16, stop_token_ids=[0] * 7),
    stopping(stop_token_ids=[3], include_stop_in_output=True),
    output(skip_special_tokens=False, token_records=False),
    output(token_records=True),
    output(token_records=True, top_logprobs=20),
    output(top_logprobs=0),
    speculation(enabled=False),
    ask(num_sequences=1, priority=0, model="fake", request_id="!~"),
    token_ids(0, 299),
    ask("<|im_start|>"),
    chat((SYSTEM, ""), (USER, "hi")),
]


@on_loop
async def test_every_bad_field_is_named_at_once() -> None:
    async with serving() as served:
        for request, field in FIELDS:
            waits = []
            for _ in range(2):
                began = time.monotonic()
                error = Details(await error_of(served.generate(request)))
                waits.append(time.monotonic() - began)
            assert (error.code, error.reason, error.domain) == (
                INVALID,
                "INVALID_FIELD",
                "deltaflash",
            ), field
            assert error.fields == [field]
            assert error.descriptions[0]
            assert min(waits) < 0.05, field
        assert served.backend.requests == []


@on_loop
async def test_every_missing_feature_is_named() -> None:
    async with serving() as served:
        for request, feature in FEATURES:
            error = Details(await error_of(served.generate(request)))
            assert (error.code, error.reason) == (UNIMPLEMENTED, "FEATURE_UNIMPLEMENTED"), feature
            assert error.metadata == {"feature": feature}
        assert served.backend.requests == []


@on_loop
async def test_engine_without_records() -> None:
    info = replace(INFO, has_token_records=False, max_top_logprobs=0)
    async with serving(FakeBackend(info=info)) as served:
        for request, feature in (
            (output(token_records=True), "output.token_records"),
            (output(token_records=True, top_logprobs=2), "output.top_logprobs"),
            (output(top_logprobs=0), "output.top_logprobs"),
        ):
            error = Details(await error_of(served.generate(request)))
            assert error.code is UNIMPLEMENTED
            assert error.metadata == {"feature": feature}
        server = (await served.control.GetServerInfo(control_pb2.GetServerInfoRequest())).server
        assert server.limits.max_top_logprobs == 0
        capability = control_pb2.Capability
        assert capability.CAPABILITY_TOKEN_RECORDS not in server.capabilities
        assert capability.CAPABILITY_LOGPROBS not in server.capabilities


@on_loop
async def test_values_at_the_limits_are_taken() -> None:
    async with serving() as served:
        for request in FINE:
            await served.collect(request)
        assert len(served.backend.requests) == len(FINE)


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(),
        ask(""),
        token_ids(),
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()),
        inference_pb2.GenerateRequest(chat=inference_pb2.Chat()),
    ],
    ids=["absent", "empty-text", "no-ids", "no-ids-message", "no-messages"],
)
@on_loop
async def test_empty_prompt(request_: inference_pb2.GenerateRequest) -> None:
    async with serving() as served:
        error = Details(await error_of(served.generate(request_)))
        assert (error.code, error.reason) == (INVALID, "EMPTY_PROMPT")


@on_loop
async def test_prompt_over_the_context() -> None:
    async with serving() as served:
        longest = INFO.context_len - 1
        many = chat((USER, "x" * 5000))
        for request in (ask("x" * (longest + 1)), token_ids(*[1] * (longest + 1)), many):
            error = Details(await error_of(served.generate(request)))
            assert (error.code, error.reason) == (INVALID, "PROMPT_TOO_LONG")
            assert int(error.metadata["prompt_tokens"]) > 300 or request is many
            assert error.metadata["max_prompt_tokens"] == str(longest)


@on_loop
async def test_huge_text_is_refused_before_it_is_tokenised() -> None:
    async with serving() as served:
        request = ask("word " * 4_000_000)
        began = time.monotonic()
        error = Details(await error_of(served.generate(request)))
        assert error.reason == "PROMPT_TOO_LONG"
        assert time.monotonic() - began < 0.5


@on_loop
async def test_names_that_lead_nowhere() -> None:
    async with serving() as served:
        error = Details(await error_of(served.generate(ask(model="other"))))
        assert (error.code, error.reason) == (NOT_FOUND, "UNKNOWN_MODEL")
        assert error.metadata == {"model": "other"}
        request = control_pb2.GetModelInfoRequest(model="other")
        assert Details(await error_of(served.control.GetModelInfo(request))).code is NOT_FOUND
        unknown = control_pb2.CancelRequest(request_id="nobody")
        error = Details(await error_of(served.control.Cancel(unknown)))
        assert (error.code, error.reason) == (NOT_FOUND, "UNKNOWN_REQUEST")
        assert error.metadata == {"request_id": "nobody"}
        bad = control_pb2.CancelRequest(request_id="")
        assert Details(await error_of(served.control.Cancel(bad))).fields == ["request_id"]
        late = control_pb2.DrainRequest(wait_ms=3_600_001)
        assert Details(await error_of(served.control.Drain(late))).fields == ["wait_ms"]


@on_loop
async def test_many_violations_fit_into_the_trailers() -> None:
    async with serving() as served:
        error = Details(await error_of(served.generate(token_ids(*[2**32 - 1] * 4000))))
        assert error.fields == [f"token_ids.ids[{i}]" for i in range(16)]


ONE = b"\x12\x03\x0a\x01a"  # ContentPart(text="a") as a field of ChatMessage
FLOODS = {  # field numbers of the wire contract: a few bytes an entry
    "messages": chat_bytes(b"\x0a\x00" * 500_000),
    "turns": chat_bytes((b"\x0a\x07\x08\x02" + ONE) * 200_000),
    "parts": chat_bytes(b"\x0a" + varint(500_000 * 2 + 2) + b"\x08\x02" + b"\x12\x00" * 500_000),
    "biases": sampling(logit_bias=dict.fromkeys(range(300, 200_000), math.nan)).SerializeToString(),
    "stop ids": stopping(stop_token_ids=[1] * 5_000_000).SerializeToString(),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@on_loop
async def test_many_small_entries_hold_nobody_up(flood: bytes) -> None:
    async with serving() as served:
        send = served.channel.unary_stream(GENERATE)
        call = send(flood)
        answer = asyncio.ensure_future(error_of(call))
        slowest_s = 0.0
        while not answer.done():
            began = time.monotonic()
            await asyncio.sleep(0.001)
            slowest_s = max(slowest_s, time.monotonic() - began)
        assert Details(answer.result()).reason == "INVALID_FIELD"
        assert slowest_s < 1


@pytest.mark.parametrize(
    "body", [b"\xff", b"\x0a\x7f", b"\x0a\x02\xc3\x28"], ids=["tag", "length", "utf8"]
)
@pytest.mark.parametrize("method", [GENERATE, "/deltaflash.v1.ControlService/Cancel"])
@on_loop
async def test_bytes_that_do_not_parse(
    method: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        send = served.channel.unary_stream(method)
        error = Details(await error_of(send(body)))
        assert (error.code, error.reason) == (INVALID, "INVALID_FIELD")
        assert error.fields == ["request"]
        await served.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@on_loop
async def test_calls_without_an_implementation() -> None:
    async with serving() as served:
        for call, feature in (
            (
                served.documents.ParsePage(documents_pb2.ParsePageRequest()),
                "DocumentsService.ParsePage",
            ),
            (
                served.documents.ParseDocument(documents_pb2.ParseDocumentRequest()),
                "DocumentsService.ParseDocument",
            ),
            (
                served.control.SwapEngine(control_pb2.SwapEngineRequest(engine="x")),
                "ControlService.SwapEngine",
            ),
        ):
            error = Details(await error_of(call))
            assert (error.code, error.metadata) == (UNIMPLEMENTED, {"feature": feature})


@pytest.mark.parametrize(
    ("value", "reason"),
    [("1", ""), ("7", ""), ("x", "INVALID_FIELD"), ("0", "INVALID_FIELD"), ("-1", "INVALID_FIELD")],
)
@on_loop
async def test_schema_revision_of_the_caller(value: str, reason: str) -> None:
    async with serving() as served:
        call = served.generate(metadata=(("deltaflash-schema-revision", value),))
        if reason:
            assert Details(await error_of(call)).reason == reason
        else:
            assert [event async for event in call]

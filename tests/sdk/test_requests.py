"""What the caller asks for is on the wire, and what it does not say is absent there."""

from pathlib import Path

import grpc
import pytest
from sdk.callers import Ask, both_clients
from sdk.scripted_server import Script, finished, started

import deltaflash
from deltaflash.v1 import control_pb2, documents_pb2, generation_pb2, inference_pb2
from deltaflash_client import (
    SCHEMA_REVISION,
    AsyncClient,
    Capability,
    Chat,
    ChatMessage,
    ChatRole,
    Client,
    ClientConfig,
    FinishReason,
    Grammar,
    Image,
    Keepalive,
    OutputOptions,
    PageOptions,
    Pdf,
    ProgressPhase,
    RepetitionGuard,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    Tls,
    TokenIds,
)
from deltaflash_client._encode import (
    generate_request,
    parse_document_request,
    parse_page_request,
)
from deltaflash_client.config import channel_arguments


def test_nothing_said_is_nothing_sent() -> None:
    assert generate_request("hi", {}) == inference_pb2.GenerateRequest(text="hi")
    said_nothing = {"sampling": SamplingOptions(), "stopping": StoppingOptions()}
    request = generate_request("", said_nothing)
    assert request.WhichOneof("prompt") == "text"
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()


def test_zero_is_not_absent() -> None:
    options = SamplingOptions(temperature=0.0, top_k=0, seed=0)
    request = generate_request("hi", {"sampling": options, "priority": 0})
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert request.HasField("priority")


def test_every_option_is_sent() -> None:
    guard = RepetitionGuard(False, 9, 4, 50)
    request = generate_request(
        TokenIds([1, 2]),
        {
            "request_id": "a",
            "model": "m",
            "sampling": SamplingOptions(0.5, 4, 0.9, 0.1, 1.1, 0.2, 0.3, {5: -1.0}, 2**64 - 1),
            "stopping": StoppingOptions(9, 1, ["x"], [3], True, True, guard),
            "output": OutputOptions(False, True, 2),
            "speculation": SpeculationOptions(True, 3),
            "num_sequences": 2,
            "grammar": Grammar(regex="a+"),
            "lora_adapter": "l",
            "priority": -3,
        },
    )
    fields = inference_pb2.GenerateRequest.DESCRIPTOR.fields
    absent = {f.name for f in fields} - {d.name for d, _ in request.ListFields()}
    assert absent == {"text", "chat"}
    for part in (request.sampling, request.stopping, request.output, request.speculation):
        assert len(part.ListFields()) == len(part.DESCRIPTOR.fields)
    assert request.stopping.repetition_guard == generation_pb2.RepetitionGuard(
        enabled=False, max_period=9, min_repeats=4, min_repeated_tokens=50
    )
    assert request.sampling.logit_bias == {5: -1.0}
    assert request.grammar.WhichOneof("kind") == "regex"


def test_chat_with_pictures() -> None:
    chat = Chat(
        [
            ChatMessage(ChatRole.SYSTEM, "Be short."),
            ChatMessage(ChatRole.USER, ["Read", Image(b"png", "image/png"), Image(b"raw")]),
        ],
        enable_thinking=False,
    )
    sent = generate_request(chat, {}).chat
    assert [m.role for m in sent.messages] == [
        inference_pb2.CHAT_ROLE_SYSTEM,
        inference_pb2.CHAT_ROLE_USER,
    ]
    text, first, second = sent.messages[1].content
    assert text.text == "Read"
    assert first.image.mime_type == "image/png"
    assert not second.image.HasField("mime_type")
    assert sent.HasField("enable_thinking")
    assert not sent.HasField("add_generation_prompt")


def test_pages_and_documents() -> None:
    page = PageOptions("Read", 1024, 4096, SamplingOptions(top_k=1), StoppingOptions(max_tokens=5))
    sent = parse_page_request(Image(b"a"), page, {"request_id": "p"})
    assert sent.options.instruction == "Read"
    assert sent.options.stopping.max_tokens == 5
    assert not sent.options.HasField("output")
    pdf = parse_document_request(Pdf(b"%PDF", dpi=200), {"max_parallel_pages": 2})
    assert pdf.WhichOneof("document") == "pdf"
    assert not pdf.pdf.HasField("first_page")
    empty = parse_document_request([], {})
    assert empty == documents_pb2.ParseDocumentRequest(pages=documents_pb2.PageImages())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: generate_request("hi", {"stopping": StoppingOptions(max_tokens=-1)}),
        lambda: generate_request("hi", {"sampling": SamplingOptions(seed=2**64)}),
        lambda: generate_request("hi", {"stopping": StoppingOptions(stop_strings="END")}),
        lambda: generate_request(b"hi", {}),
        lambda: generate_request(Chat([ChatMessage("robot", "hi")]), {}),
        Grammar,
        lambda: Grammar(regex="a", ebnf="b"),
        lambda: Tls(private_key=b"k"),
        lambda: Keepalive(time_s=0),
    ],
)
def test_what_cannot_be_sent_is_refused(wrong: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        wrong()


@pytest.mark.parametrize(
    ("ours", "wire"),
    [
        (FinishReason, generation_pb2.FinishReason),
        (ProgressPhase, generation_pb2.ProgressPhase),
        (Capability, control_pb2.Capability),
    ],
)
def test_enums_equal_those_of_the_contract(ours: type, wire: object) -> None:
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    assert [prefix + member.name for member in ours] == list(wire.keys())


@both_clients
def test_metadata_goes_with_every_call(script: Script, ask: Ask) -> None:
    script.answers = [lambda _r, _c: iter([started(), finished()])]
    config = ClientConfig(token="secret", metadata={"tenant": "t"})  # noqa: S106
    ask(script.target, config=config)
    (metadata,) = script.metadata
    assert metadata["authorization"] == "Bearer secret"
    assert metadata["tenant"] == "t"
    assert metadata["deltaflash-schema-revision"] == str(SCHEMA_REVISION)
    assert metadata["user-agent"].startswith("deltaflash-client/")
    assert "secret" not in repr(config)


def test_channel_arguments() -> None:
    config = ClientConfig(
        max_message_bytes=7,
        keepalive=Keepalive(20.0, 5.0, without_calls=True),
        tls=Tls(server_name="n"),
        channel_options=[("grpc.enable_retries", 1)],
    )
    arguments = dict(channel_arguments(config))
    assert arguments["grpc.max_send_message_length"] == 7
    assert arguments["grpc.max_receive_message_length"] == 7
    assert arguments["grpc.keepalive_time_ms"] == 20_000
    assert arguments["grpc.keepalive_timeout_ms"] == 5_000
    assert arguments["grpc.keepalive_permit_without_calls"] == 1
    assert arguments["grpc.http2.max_pings_without_data"] == 0
    assert arguments["grpc.ssl_target_name_override"] == "n"
    assert arguments["grpc.enable_retries"] == 1
    assert dict(channel_arguments(ClientConfig()))["grpc.enable_retries"] == 0


def test_the_stubs_are_a_namespace_package() -> None:
    for folder in deltaflash.__path__:
        assert not list(Path(folder).rglob("__init__.py"))


def test_an_asyncio_client_needs_a_loop() -> None:
    with pytest.raises(RuntimeError):
        AsyncClient("localhost:1")


def test_a_closed_client_refuses_calls(script: Script) -> None:
    client = Client(script.target)
    client.close()
    with pytest.raises((ValueError, grpc.RpcError)):
        client.server_info()

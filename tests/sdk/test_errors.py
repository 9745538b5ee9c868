"""A status reaches the caller at once, as the right class and with all its details."""

import time

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from sdk.callers import Ask, ask_blocking, both_clients
from sdk.scripted_server import Events, Script, delta, fail, finished, started

from deltaflash.v1 import errors_pb2, inference_pb2
from deltaflash_client import (
    ClientConfig,
    DeadlineExceededError,
    DeltaFlashError,
    ErrorReason,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)
from deltaflash_client.errors import error_from_status, parse_details

ONCE = ClientConfig(retry=RetryPolicy(max_attempts=1))


@both_clients
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_status_arrives_within_1_s(script: Script, ask: Ask, num_before: int) -> None:
    def answer(_r: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from [started(), delta("a"), delta("b")][:num_before]
        fail(
            context,
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            violations={"sampling.top_p": "expected above 0 to 1, got 7"},
        )

    script.answers = [answer]
    before_s = time.monotonic()
    with pytest.raises(InvalidArgumentError) as caught:
        ask(script.target)
    assert time.monotonic() - before_s < 1
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason is ErrorReason.INVALID_FIELD
    assert error.field_violations == (
        FieldViolation("sampling.top_p", "expected above 0 to 1, got 7"),
    )
    assert "sampling.top_p" in str(error)
    assert len(script.requests) == 1


@both_clients
@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK,)]
)
def test_every_code_has_its_class(script: Script, ask: Ask, code: grpc.StatusCode) -> None:
    script.answers = [lambda _r, context: fail(context, code)]
    with pytest.raises(DeltaFlashError) as caught:
        ask(script.target, config=ONCE)
    assert caught.value.code is code
    assert type(caught.value) is type(error_from_status(code, "", ()))
    assert caught.value.reason is None


def test_overload_names_delay_and_facts(script: Script) -> None:
    script.answers = [
        lambda _r, context: fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 2.5)
    ]
    with pytest.raises(ResourceExhaustedError) as caught:
        ask_blocking(script.target)
    assert caught.value.reason is ErrorReason.QUEUE_FULL
    assert caught.value.retry_delay_s == 2.5
    assert caught.value.metadata == {"max_queued": "4"}


def test_reasons_equal_those_of_the_contract() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert names == set(ErrorReason.__members__)
    assert all(member.value == member.name for member in ErrorReason)


def trailers(reason: str, domain: str) -> list[tuple[str, bytes]]:
    status = status_pb2.Status(code=3)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    return [("other", b"x"), ("grpc-status-details-bin", status.SerializeToString())]


def test_an_unknown_reason_and_a_foreign_domain() -> None:
    assert parse_details(trailers("OF_TOMORROW", "deltaflash")).reason is ErrorReason.UNSPECIFIED
    assert parse_details(trailers("QUEUE_FULL", "googleapis.com")).reason is None


def test_broken_details_do_not_hide_the_error() -> None:
    error = error_from_status(
        grpc.StatusCode.INTERNAL, "boom", [("grpc-status-details-bin", b"\xff\xff\xff")]
    )
    assert isinstance(error, InternalError)
    assert error.message == "boom"


@both_clients
def test_messages_over_4_mib_both_ways(script: Script, ask: Ask) -> None:
    large = "x" * (5 * 1024 * 1024)
    script.answers = [lambda request, _c: iter([started(), delta(request.text + "y"), finished()])]
    assert len(ask(script.target, large).text) == len(large) + 1


@both_clients
def test_a_message_over_the_own_limit_is_not_sent(script: Script, ask: Ask) -> None:
    config = ClientConfig(max_message_bytes=1000)
    script.answers = [lambda _r, _c: iter([started(), finished()])]
    ask(script.target, "x" * 900, config)
    with pytest.raises(ResourceExhaustedError) as caught:
        ask(script.target, "x" * 1001, config)
    assert caught.value.reason is ErrorReason.MESSAGE_TOO_LARGE
    assert len(script.requests) == 1


@both_clients
def test_the_transports_refusal_of_size_is_no_overload(script: Script, ask: Ask) -> None:
    config = ClientConfig(
        max_message_bytes=100 * 1024 * 1024, retry=RetryPolicy(retry_queue_full=True)
    )
    with pytest.raises(ResourceExhaustedError) as caught:
        ask(script.target, "x" * (64 * 1024 * 1024 + 1), config)
    assert caught.value.reason is None
    assert script.requests == []


@both_clients
def test_a_timeout_covers_a_stream_that_has_begun(script: Script, ask: Ask) -> None:
    def slow(_r: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield started()
        while context.is_active():
            time.sleep(0.01)

    script.answers = [slow]
    before_s = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        ask(script.target, timeout_s=0.3)
    assert 0.25 < time.monotonic() - before_s < 1.3
    assert script.ended.wait(1)
    assert len(script.requests) == 1


@both_clients
def test_nobody_listens(ask: Ask) -> None:
    with pytest.raises(UnavailableError):
        ask("127.0.0.1:1", config=ONCE)

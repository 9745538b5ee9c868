"""A request is sent again only where nothing can have been seen of it."""

import time

import grpc
import pytest
from sdk.callers import Ask, both_clients
from sdk.scripted_server import Answer, Events, Script, delta, fail, finished, started

from deltaflash.v1 import inference_pb2
from deltaflash_client import (
    ClientConfig,
    DeltaFlashError,
    RetryPolicy,
    UnavailableError,
)
from deltaflash_client.errors import error_from_status
from deltaflash_client.retry import Attempts

FAST = RetryPolicy(initial_backoff_s=0.01)
FAST_QUEUE = RetryPolicy(initial_backoff_s=0.01, retry_queue_full=True)


def failing(
    code: grpc.StatusCode,
    reason: str | None = None,
    delay_s: float | None = None,
    events: tuple[inference_pb2.GenerateResponse, ...] = (),
) -> Answer:
    def answer(_r: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events
        fail(context, code, reason, delay_s)

    return answer


def good(_r: inference_pb2.GenerateRequest, _c: grpc.ServicerContext) -> Events:
    yield from [started(), delta("ok"), finished()]


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
TABLE = [
    # first answer, policy, calls in all, answered
    (failing(UNAVAILABLE), FAST, 2, True),
    (failing(UNAVAILABLE, "ENGINE_LOST"), FAST, 2, True),
    (failing(UNAVAILABLE), RetryPolicy(max_attempts=1), 1, False),
    (failing(UNAVAILABLE, events=(started(),)), FAST, 1, False),
    (failing(UNAVAILABLE, events=(started(), delta("a"))), FAST, 1, False),
    (failing(UNAVAILABLE, events=(inference_pb2.GenerateResponse(),)), FAST, 1, False),
    (failing(EXHAUSTED, "QUEUE_FULL", 0.05), FAST, 1, False),
    (failing(EXHAUSTED, "QUEUE_FULL", 0.05), FAST_QUEUE, 2, True),
    (failing(EXHAUSTED, "QUEUE_FULL"), FAST_QUEUE, 2, True),
    (failing(EXHAUSTED, "CAPACITY_EXCEEDED"), FAST_QUEUE, 1, False),
    (failing(EXHAUSTED, "MESSAGE_TOO_LARGE"), FAST_QUEUE, 1, False),
    (failing(EXHAUSTED), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.INVALID_ARGUMENT, "QUEUE_FULL"), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.CANCELLED), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.DEADLINE_EXCEEDED), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.DATA_LOSS), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.ABORTED), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.INTERNAL), FAST_QUEUE, 1, False),
    (failing(grpc.StatusCode.UNKNOWN), FAST_QUEUE, 1, False),
]


@both_clients
@pytest.mark.parametrize(("first", "policy", "num_calls", "answered"), TABLE)
def test_what_is_sent_again(
    script: Script, ask: Ask, first: Answer, policy: RetryPolicy, num_calls: int, answered: bool
) -> None:
    script.answers = [first, good]
    try:
        text = ask(script.target, config=ClientConfig(retry=policy), request_id="mine").text
    except DeltaFlashError:
        text = None
    assert (text == "ok") is answered
    assert [request.request_id for request in script.requests] == ["mine"] * num_calls


@both_clients
def test_attempts_are_bounded(script: Script, ask: Ask) -> None:
    script.answers = [failing(UNAVAILABLE)]
    with pytest.raises(UnavailableError):
        ask(script.target, config=ClientConfig(retry=FAST))
    assert len(script.requests) == 3


@both_clients
def test_the_servers_delay_is_honoured(script: Script, ask: Ask) -> None:
    script.answers = [failing(EXHAUSTED, "QUEUE_FULL", 0.4), good]
    assert ask(script.target, config=ClientConfig(retry=FAST_QUEUE)).text == "ok"
    first_s, second_s = script.arrivals_s
    assert 0.4 <= second_s - first_s < 1.4


@both_clients
def test_no_wait_goes_past_the_timeout(script: Script, ask: Ask) -> None:
    script.answers = [failing(UNAVAILABLE, "SWAPPING", 30.0), good]
    before_s = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        ask(script.target, config=ClientConfig(retry=FAST), timeout_s=5)
    assert time.monotonic() - before_s < 1
    assert caught.value.retry_delay_s == 30.0
    assert len(script.requests) == 1


def test_the_wait_grows_to_its_limit_and_varies() -> None:
    policy = RetryPolicy(
        max_attempts=5000, initial_backoff_s=0.1, max_backoff_s=1.0, multiplier=2.0
    )
    error = error_from_status(UNAVAILABLE, "", ())
    for attempt, full_s in [(1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (4000, 1.0)]:
        delays = [policy.delay_s(attempt, error) for _ in range(50)]
        assert all(full_s / 2 <= delay <= full_s for delay in delays)
        assert len(set(delays)) > 1


def test_attempts_share_one_timeout() -> None:
    attempts = Attempts(RetryPolicy(), 10.0)
    assert 9 < attempts.remaining_s() <= 10
    assert Attempts(RetryPolicy(), None).remaining_s() is None


@pytest.mark.parametrize(
    "bad", [{"max_attempts": 0}, {"initial_backoff_s": 9.0}, {"multiplier": 0.5}]
)
def test_a_policy_without_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)

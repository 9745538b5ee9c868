"""When a request is sent again, and how long to wait before."""

import random
import time
from dataclasses import dataclass

from deltaflash_client.errors import (
    DeltaFlashError,
    ErrorReason,
    ResourceExhaustedError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retrying.

    Only a call that ended with UNAVAILABLE before its first event is sent again, and with
    `retry_queue_full` one that the full queue refused. Nothing else ever is: not an answer that had
    begun, not a call that was cancelled, ran out of time or lost data.

    Attributes:
        max_attempts: How often one request is sent in all, 1 and up; 1 never retries.
        initial_backoff_s: Wait before the second attempt, seconds; it varies by -50 % to 0.
        max_backoff_s: The longest wait, seconds. A longer wait asked for by the server is granted.
        multiplier: Growth of the wait from attempt to attempt, 1 and up.
        retry_queue_full: Also retry when the server's queue is full, after the delay it names.
    """

    max_attempts: int = 3
    initial_backoff_s: float = 0.2
    max_backoff_s: float = 5.0
    multiplier: float = 2.0
    retry_queue_full: bool = False

    def __post_init__(self) -> None:
        """Refuses limits that make no sense."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: expected 1 or more, got {self.max_attempts}")
        if not 0 <= self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError(
                "initial_backoff_s: expected 0 to max_backoff_s "
                f"({self.max_backoff_s}), got {self.initial_backoff_s}"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier: expected 1 or more, got {self.multiplier}")

    def allows(self, error: DeltaFlashError) -> bool:
        """Whether a call that had no event yet may be sent again after this error."""
        if isinstance(error, UnavailableError):
            return True
        return (
            self.retry_queue_full
            and isinstance(error, ResourceExhaustedError)
            and error.reason is ErrorReason.QUEUE_FULL
        )

    def delay_s(self, attempt: int, error: DeltaFlashError) -> float:
        """Returns the wait after a failed attempt, seconds.

        Args:
            attempt: The number of the attempt that failed, from 1.
            error: Why it failed; a delay it names is the least.
        """
        # The exponent is bounded: a float power overflows, and the wait is capped long before.
        backoff = self.initial_backoff_s * self.multiplier ** min(attempt - 1, 64)
        jittered = min(backoff, self.max_backoff_s) * random.uniform(0.5, 1.0)  # noqa: S311
        return max(jittered, error.retry_delay_s or 0.0)


class Attempts:
    """The attempts of one request: how many there were, and what is left of its time."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None) -> None:
        """Starts the clock.

        Args:
            policy: Limits of retrying.
            timeout_s: Time for all attempts and the waits between them, seconds; None is no limit.
        """
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._failed = 0

    def remaining_s(self) -> float | None:
        """Returns the time left, seconds, 0 and up; None without a limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def delay_before_next_s(self, error: DeltaFlashError) -> float | None:
        """Counts a failed attempt; returns the wait before the next, None if there is to be none.

        Args:
            error: Why the attempt failed.
        """
        self._failed += 1
        if self._failed >= self._policy.max_attempts or not self._policy.allows(error):
            return None
        delay_s = self._policy.delay_s(self._failed, error)
        remaining_s = self.remaining_s()
        if remaining_s is not None and delay_s >= remaining_s:
            return None
        return delay_s

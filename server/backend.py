"""The backend protocol: what the services need from an engine, in words of no engine.

A backend is made on any thread, then bound to one event loop by `start`; from there on every
method but `close` is called on that loop and returns without blocking.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.images import PreparedImage


class EndCause(enum.Enum):
    """Why a generation ended."""

    END_TOKEN = enum.auto()
    STOP_STRING = enum.auto()
    LENGTH = enum.auto()
    CANCELLED = enum.auto()
    TIMED_OUT = enum.auto()
    REPETITION = enum.auto()


class EngineRefusedError(Exception):
    """The engine directory cannot be served; one line: what was found, what is needed, the fix."""


class EngineConfigError(Exception):
    """The engine does not take a value of its configuration; the message names the value."""


class BackendError(Exception):
    """What a backend may raise at a request; its subclasses say what it means."""


class RequestRefusedError(BackendError):
    """The engine found a value in the request that it does not take."""


class QueueFullError(BackendError):
    """The waiting queue is at its limit.

    Attributes:
        num_queued: Requests that wait.
        max_queued: How many may.
    """

    def __init__(self, num_queued: int, max_queued: int) -> None:
        """Takes the two counts."""
        super().__init__(f"{num_queued} requests wait already, the limit is {max_queued}")
        self.num_queued = num_queued
        self.max_queued = max_queued


class CapacityExceededError(BackendError):
    """The request alone needs more than the engine has, so waiting does not help.

    Attributes:
        needed_tokens: Tokens of KV cache it needs.
        available_tokens: Tokens of KV cache there are.
    """

    def __init__(self, needed_tokens: int, available_tokens: int) -> None:
        """Takes the two counts."""
        super().__init__(
            f"prompt and answer need {needed_tokens} tokens of KV cache, the engine has "
            f"{available_tokens}; ask for a smaller max_tokens"
        )
        self.needed_tokens = needed_tokens
        self.available_tokens = available_tokens


class EngineLostError(BackendError):
    """The engine thread, its device or its driver is gone for good."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that is loaded, and its limits.

    Attributes:
        name: The model's name, by which requests may call for it.
        engine_id: Content digest of the engine directory.
        architecture: Architecture of the model.
        precision: Number formats in short.
        backend: Who runs it.
        context_len: Longest prompt plus answer, tokens.
        vocab_size: Size of the vocabulary, tokens.
        end_token_ids: Tokens that end an answer by themselves, ascending.
        placeholder_token_ids: Tokens that stand for pictures; no text prompt may hold them.
        default_max_tokens: Length of an answer that names none, tokens.
        max_batch_size: Requests that run at once.
        max_queued: Requests that may wait beyond those.
        kv_capacity_tokens: Tokens that prompt and answer of one request may have together.
        max_stop_token_ids: Most stop tokens of one request beside the model's own.
        max_logit_biases: Most biased tokens of one request.
        has_token_records: True when events can carry token records.
        max_top_logprobs: Most candidates of one, 0 where they have no logprobs.
        max_draft_tokens: Most draft tokens in one round, 0 without a drafter.
        has_vision: True when the engine has a vision encoder.
        min_image_pixels: Smallest picture after resizing, pixels, 0 without vision.
        max_image_pixels: Largest picture after resizing, pixels, 0 without vision.
        image_factor: Sides of a resized picture are multiples of it, pixels; a square of it is one
            token.
        image_token_id: The token that stands for a square of a picture; one of
            placeholder_token_ids.
    """

    name: str
    engine_id: str
    architecture: str
    precision: str
    backend: str
    context_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    placeholder_token_ids: frozenset[int]
    default_max_tokens: int
    max_batch_size: int
    max_queued: int
    kv_capacity_tokens: int
    max_stop_token_ids: int
    max_logit_biases: int = 0
    has_token_records: bool = False
    max_top_logprobs: int = 0
    max_draft_tokens: int = 0
    has_vision: bool = False
    min_image_pixels: int = 0
    max_image_pixels: int = 0
    image_factor: int = 32
    image_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy, and then the filters have no effect.

    Attributes:
        temperature: Divides the logits.
        top_k: How many of the most likely tokens stay, 0 keeps all.
        top_p: The smallest set of likeliest tokens with this probability stays.
        min_p: Tokens below this share of the likeliest token's probability go.
        seed: Starts the random stream; None draws one.
        repetition_penalty: Divides a positive, multiplies a negative logit of a token seen in
            prompt or output.
        presence_penalty: Subtracted from the logit of a token in the output.
        frequency_penalty: Subtracted from it for each time it is there.
        logit_bias: Token ids, and what is added to their logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """Ends an answer whose newest tokens are one stretch of tokens over and over.

    Attributes:
        max_period: The longest stretch that is looked for, tokens, 1 to 512.
        min_repeats: How many times it has to come in a row, 2 to 1024.
        min_repeated_tokens: How many tokens all repeats have together at least, 0 to 65536.
    """

    max_period: int = 64
    min_repeats: int = 8
    min_repeated_tokens: int = 256


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request.

    Attributes:
        request_id: Name in logs, not longer than 128 characters.
        prompt_ids: The prompt, 1 to context_len - 1 tokens; one placeholder for each token of each
            picture.
        max_tokens: Most tokens to generate; prompt and answer fit into the context.
        sampling: How tokens are chosen.
        stop_strings: Texts that end the answer.
        stop_token_ids: Tokens that end the answer beside the model's own.
        ignore_end_tokens: The model's end tokens do not end the answer.
        include_stop: The text holds the stop string, or what the stop token stands for, that ended
            it.
        skip_special_tokens: Special tokens leave no text.
        allotted_time_ms: Time for waiting and running, at least 1; None has no limit.
        min_tokens: No end token, stop or repetition ends the answer before, 0 to max_tokens.
        repetition_guard: Which repetition ends the answer; None lets it repeat.
        images: The pictures in the order of their placeholders.
        report_progress: Events say where the request stands.
        token_records: Events carry a record of every token.
        top_logprobs: Candidates of a record, 0 to max_top_logprobs; None: no logprob and rank
            either. Needs token_records.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end_tokens: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    allotted_time_ms: int | None = None
    min_tokens: int = 0
    repetition_guard: RepetitionGuard | None = None
    images: tuple["PreparedImage", ...] = ()
    report_progress: bool = False
    token_records: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """How a generation ran; times of the monotonic clock in ns, None for what never happened."""

    arrival_ns: int | None = None
    first_scheduled_ns: int | None = None
    vision_start_ns: int | None = None
    vision_end_ns: int | None = None
    prefill_start_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation.

    Attributes:
        cause: Why it ended.
        num_completion_tokens: Tokens generated, the one that ended it included.
        stats: How it ran.
        end_token_id: The token that ended it, with END_TOKEN: one of the model's or of the
            request's stop_token_ids.
        stop_string: The stop string that ended it, with STOP_STRING.
    """

    cause: EndCause
    num_completion_tokens: int
    stats: GenerationStats
    end_token_id: int | None = None
    stop_string: str | None = None


class ProgressPhase(enum.Enum):
    """What the engine does for a request, in this order; a phase may be left out."""

    QUEUED = enum.auto()
    ENCODING = enum.auto()
    PREFILL = enum.auto()
    DECODING = enum.auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands: its phase, and the part of it that is done, 0 to 1, if known."""

    phase: ProgressPhase
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """One of the likeliest tokens at a position.

    Attributes:
        id: The token.
        piece: Its bytes.
        logprob: Natural logarithm of its probability by the raw logits.
    """

    id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One generated token.

    Attributes:
        id: The token.
        piece: Its bytes; empty for a special token that leaves no text.
        logprob: Natural logarithm of its probability by the raw logits, with top_logprobs.
        rank: How many tokens were likelier, plus one, with top_logprobs.
        candidates: The likeliest tokens, likeliest first.
    """

    id: int
    piece: bytes
    logprob: float | None = None
    rank: int | None = None
    candidates: tuple[TokenCandidate, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What came since the last event: text and tokens, and with the last one the end.

    Attributes:
        text: New text, whole characters.
        token_ids: New tokens.
        finished: Set in the last event.
        records: Records of the tokens whose text is out, if asked for. A token whose text is held
            back waits with it.
        progress: Where the request stands, the newest news of it, if it was asked for.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    records: tuple[TokenRecord, ...] = ()
    progress: Progress | None = None


def merge_events(events: Sequence[TokenEvent]) -> TokenEvent:
    """Returns one event that says what several in a row say; at most the last one has the end.

    Of progress it has the newest.
    """
    return TokenEvent(
        "".join([event.text for event in events]),
        tuple([token_id for event in events for token_id in event.token_ids]),
        events[-1].finished,
        tuple([record for event in events for record in event.records]),
        next((event.progress for event in reversed(events) if event.progress), None),
    )


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is now.

    Attributes:
        num_running: Requests that hold a slot.
        num_queued: Requests that wait for one.
        num_running_tokens: Tokens reserved in the KV cache by running requests.
        num_queued_tokens: Prompt tokens of waiting requests.
        slots_used: Slots in use.
        slots_total: Slots of the engine.
        pages_used: KV pages in use or reserved.
        pages_total: KV pages of the engine.
        silence_ns: Time since the engine last made progress while it had work.
        oldest_queued_ns: How long the oldest waiting request has waited.
    """

    num_running: int
    num_queued: int
    num_running_tokens: int
    num_queued_tokens: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    silence_ns: int
    oldest_queued_ns: int


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One step of the engine."""

    iteration: int
    timestamp_ns: int
    latency_ns: int
    num_active: int
    num_queued: int
    num_context_tokens: int
    num_generation_rows: int
    num_emitted_tokens: int
    num_drafted: int
    num_accepted: int
    pages_used: int
    slots_used: int
    num_completed: int


class Generation(Protocol):
    """A running request, owned by the one who submitted it: always `close` it, in a `finally`."""

    async def next_event(self) -> TokenEvent:
        """Waits for the next event; what came since the last call arrives as one event.

        Raises:
            EngineLostError: The engine is gone; no event follows.
        """
        ...

    def cancel(self) -> None:
        """Asks the engine to end it; an event with cause CANCELLED still comes, unless it ended."""
        ...

    def close(self) -> None:
        """Gives it up: ends it in the engine if it still runs, and drops what comes from it."""
        ...


class Backend(Protocol):
    """An engine that generates tokens."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded; does not change."""
        ...

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Binds the backend to the running event loop.

        Args:
            on_lost: Called on the loop, once, with the cause, when the engine is gone. Every open
                generation has failed by then.
        """
        ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Hands a request to the engine.

        Raises:
            RequestRefusedError: A value that the engine does not take.
            QueueFullError: The waiting queue is at its limit.
            CapacityExceededError: It needs more KV cache than there is.
            EngineLostError: The engine is gone.
        """
        ...

    def load(self) -> Load:
        """Returns the load of this instant, nearly."""
        ...

    def iteration_stats(self) -> list[IterationStats]:
        """Returns the steps since the last call, as far as they were kept."""
        ...

    def close(self) -> None:
        """Ends what runs and frees the engine; blocks, on any thread; not on a live loop's."""
        ...

"""The events of a stream, as they come from the service."""

import enum
from dataclasses import dataclass

from deltaflash_client.errors import DeltaFlashError


class ProgressPhase(enum.StrEnum):
    """What a request is doing; UNSPECIFIED stands for a phase this client does not know."""

    UNSPECIFIED = "unspecified"
    QUEUED = "queued"
    PREPROCESSING = "preprocessing"
    ENCODING = "encoding"
    PREFILL = "prefill"
    DECODING = "decoding"


class FinishReason(enum.StrEnum):
    """Why an answer ended; UNSPECIFIED stands for a reason this client does not know."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REPETITION = "repetition"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted.

    Attributes:
        request_id: The id under which `cancel` finds the request.
        model: Name of the model that answers.
        prompt_tokens: Length of the prompt, tokens.
        image_tokens: The image placeholders among them.
        max_tokens: The limit that holds for this answer, tokens.
        seed: The seed in use; None when the answer is greedy.
    """

    request_id: str
    model: str
    prompt_tokens: int
    image_tokens: int
    max_tokens: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands: its phase, and the part of it that is done, 0 to 1, if known."""

    phase: ProgressPhase
    fraction: float | None


@dataclass(frozen=True, slots=True)
class PageInfo:
    """What became of a page's picture before the model saw it; all in pixels."""

    source_width: int
    source_height: int
    model_width: int
    model_height: int


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """One of the likeliest tokens at a position: id, own bytes, log probability in nats."""

    id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One generated token.

    Attributes:
        id: The token's id.
        piece: The token's own bytes, which need not be whole characters.
        logprob: Natural logarithm of its probability, if asked for.
        rank: 1 for the likeliest token, if asked for.
        candidates: The likeliest tokens at this position, likeliest first.
    """

    id: int
    piece: bytes
    logprob: float | None
    rank: int | None
    candidates: tuple[TokenCandidate, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The text, and if asked for the tokens, that came since the last delta."""

    text: str
    tokens: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended an answer: exactly one of the three is not None, or none for an unknown kind."""

    end_token_id: int | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the whole request."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """How the request ran on the server; durations in microseconds.

    Attributes:
        steps: Rounds of the model.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: Those that were accepted.
        drafted_per_position: Rounds in which draft position i was verified.
        accepted_per_position: Rounds in which draft position i was accepted.
        queue_us: Waiting for a slot.
        preprocess_us: Decoding, resizing, tokenising.
        vision_us: Vision encoder.
        prefill_us: From the first prefill chunk to the first token.
        decode_us: From the first token to the last.
        time_to_first_token_us: From arrival to the first token; None without a token.
        total_us: From arrival to end.
    """

    steps: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    queue_us: int
    preprocess_us: int
    vision_us: int
    prefill_us: int
    decode_us: int
    time_to_first_token_us: int | None
    total_us: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; the last event."""

    finish_reason: FinishReason
    stop_match: StopMatch | None
    usage: Usage
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class PageFailed:
    """A page of a document was not read; the last event of the page.

    Attributes:
        error: What `parse_page` would have raised for it.
    """

    error: DeltaFlashError


@dataclass(frozen=True, slots=True)
class DocumentStarted:
    """The document was opened: the id under which `cancel` finds it, and its pages to read."""

    request_id: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class DocumentFinished:
    """Every page is complete or failed, or the document was cancelled; the last event.

    Attributes:
        num_pages: Pages that had their Finished event.
        usage: Token counts, summed over them.
        total_us: From arrival to end, microseconds.
        num_failed_pages: Pages that had a PageFailed event.
        cancelled: `cancel` named the document; pages may be missing.
    """

    num_pages: int
    usage: Usage
    total_us: int
    num_failed_pages: int = 0
    cancelled: bool = False


GenerationEvent = Started | Progress | PageInfo | Delta | Finished
"""What a `GenerationStream` yields; PageInfo comes with pages only."""


@dataclass(frozen=True, slots=True)
class PageEvent:
    """An event of one page of a document; `page_index` counts the document's pages from 0."""

    page_index: int
    event: GenerationEvent | PageFailed


DocumentEvent = DocumentStarted | PageEvent | DocumentFinished
"""What a `DocumentStream` yields."""

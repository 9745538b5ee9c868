"""What the control service says about a server, its engine and its load."""

import enum
from dataclasses import dataclass


class Capability(enum.StrEnum):
    """A feature that not every server or engine has; UNSPECIFIED is one unknown to this client."""

    UNSPECIFIED = "unspecified"
    TEXT_PROMPT = "text_prompt"
    TOKEN_PROMPT = "token_prompt"  # noqa: S105
    CHAT = "chat"
    IMAGE_INPUT = "image_input"
    PARSE_PAGE = "parse_page"
    PARSE_DOCUMENT = "parse_document"
    TOKEN_RECORDS = "token_records"  # noqa: S105
    LOGPROBS = "logprobs"
    SPECULATION = "speculation"
    NUM_SEQUENCES = "num_sequences"
    GRAMMAR = "grammar"
    LORA = "lora"
    PRIORITY = "priority"
    SWAP_ENGINE = "swap_engine"


class CancelStatus(enum.StrEnum):
    """What `cancel` found."""

    UNSPECIFIED = "unspecified"
    CANCELLING = "cancelling"
    ALREADY_FINISHED = "already_finished"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for; `proto/deltaflash/v1/control.proto` has units and ranges."""

    max_prompt_tokens: int
    max_tokens: int
    max_message_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_images: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_biases: int
    max_top_logprobs: int
    max_queued: int
    max_document_pages: int
    max_request_ms: int | None
    min_keepalive_ms: int
    max_image_side_ratio: int
    max_parallel_pages: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server process.

    Attributes:
        version: Version of the server.
        schema_revision: Revision of the wire contract that it speaks.
        minimum_client_revision: The lowest revision of a client that it accepts.
        limits: Limits of a request.
        capabilities: What it can do with its engine.
        default_max_tokens: Length of an answer that names no max_tokens.
    """

    version: str
    schema_revision: int
    minimum_client_revision: int
    limits: Limits
    capabilities: frozenset[Capability]
    default_max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The engine that is loaded.

    Attributes:
        name: Name by which requests may call for it.
        engine_id: Content digest of the engine directory.
        architecture: Architecture of the model.
        context_length: Longest prompt plus answer, tokens.
        vocab_size: Size of the vocabulary, tokens.
        end_token_ids: Tokens that end an answer by themselves.
        precision: Number formats in short.
        has_drafter: Whether it can draft.
        max_draft_tokens: Most draft tokens in one round.
        has_vision: Whether it reads pictures.
        max_image_pixels: Largest picture after resizing, pixels.
        backend: Who runs it.
    """

    name: str
    engine_id: str
    architecture: str
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    precision: str
    has_drafter: bool
    max_draft_tokens: int
    has_vision: bool
    max_image_pixels: int
    backend: str


@dataclass(frozen=True, slots=True)
class LoadInfo:
    """A snapshot of the load.

    Attributes:
        running: Requests that hold a slot.
        queued: Requests that wait for one.
        slots_used: Slots in use.
        slots_total: Slots of the engine.
        kv_pages_used: KV pages in use or reserved.
        kv_pages_total: KV pages of the engine.
        running_tokens: Tokens for which the running requests have reserved KV pages.
        queued_tokens: Prompt tokens of the waiting requests.
        engine_silence_ms: Time since the engine's last sign of life, milliseconds.
        queue_age_ms: How long the oldest waiting request has waited, milliseconds.
        draining: Whether the server admits nothing new.
    """

    running: int
    queued: int
    slots_used: int
    slots_total: int
    kv_pages_used: int
    kv_pages_total: int
    running_tokens: int
    queued_tokens: int
    engine_silence_ms: int
    queue_age_ms: int
    draining: bool


@dataclass(frozen=True, slots=True)
class DrainState:
    """Requests that a drain still has to finish: those with a slot and those that wait."""

    running: int
    queued: int

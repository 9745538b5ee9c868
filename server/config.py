"""Configuration of a server, made at start-up and handed down."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from server.images.limits import ImageLimits

MIB = 1024 * 1024
MAX_TIME_S = 1e9
"""Thirty years; beyond, nanoseconds and timers overflow."""
MAX_INT32 = 2**31 - 1
"""The executor and gRPC take numbers up to this."""
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the executor runs an engine; 0 and None leave a value to the executor.

    Attributes:
        device: Where the engine runs, `cpu` or `cuda`.
        max_batch_size: Requests that run at once.
        max_queue_size: Requests that may wait beyond those.
        max_num_tokens: Token budget of one step.
        max_prefill_chunk: Longest piece of a prompt in one step, tokens.
        max_kv_tokens: Size of the KV pool, tokens; None is the executor's choice.
        default_max_tokens: Length of an answer that names none, tokens.
        max_draft_tokens: Draft tokens in one round; 0 does not draft.
        max_rounds_in_flight: Rounds launched before the first is read, 1 or 2.
        num_threads: Threads of the CPU backend; 0 takes all cores.
        max_image_pixels: Largest picture after resizing, pixels; the engine's own limit holds too.
        encoder_cache_bytes: Memory for encoded pictures that come again; 0 keeps none.
        stall_s: An engine that has work and makes no progress for so long counts as lost.
    """

    device: str = "cpu"
    max_batch_size: int = 8
    max_queue_size: int = 256
    max_num_tokens: int = 512
    max_prefill_chunk: int = 256
    max_kv_tokens: int | None = None
    default_max_tokens: int = 1024
    max_draft_tokens: int = 0
    max_rounds_in_flight: int = 1
    num_threads: int = 0
    max_image_pixels: int = 4 * 1024 * 1024
    encoder_cache_bytes: int = 0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if self.device not in DEVICES:
            raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {self.device}")
        for name in ("max_batch_size", "max_num_tokens", "max_prefill_chunk", "default_max_tokens"):
            _require(name, getattr(self, name), 1)
        _require("max_image_pixels", self.max_image_pixels, 1024)
        _require("encoder_cache_bytes", self.encoder_cache_bytes, 0, most=2**53)
        for name in ("max_queue_size", "max_draft_tokens", "num_threads"):
            _require(name, getattr(self, name), 0)
        _require("max_rounds_in_flight", self.max_rounds_in_flight, 1, most=2)
        if self.max_kv_tokens is not None:
            _require("max_kv_tokens", self.max_kv_tokens, 1, most=2**53)
        _require_time("stall_s", self.stall_s)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server listens, limits and ends.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        max_message_bytes: Largest serialised request or response.
        min_keepalive_ms: Shortest time between pings that a client may keep.
        grace_s: How long running requests may go on after SIGTERM.
        write_timeout_s: A stream whose reader takes nothing for so long is ended.
        warmup_timeout_s: How long the first generation may take before the start has failed.
        max_request_ms: Longest time of one request, waiting included; None has no limit.
        retry_delay_ms: When a caller refused for a full queue or a loading engine may come again.
        tokenizer_threads: Threads for long prompts.
        max_stop_strings: Most stop strings of one request.
        max_stop_string_bytes: Longest stop string, bytes of UTF-8.
        repetition_guard: An answer that repeats itself ends, where a request does not say.
        images: What pictures and documents may be.
        decode_workers: Processes that decode pictures and render pages.
        max_images: Most pictures of one chat.
        max_parallel_pages: Most pages of one document in the engine at once; one seat is always
            left to others.
        max_held_image_bytes: Memory for the pictures of all requests, as sent and decoded.
        log_level: Level of the root logger.
        ready_file: File that gets the address once the server serves.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_message_bytes: int = 64 * MIB
    min_keepalive_ms: int = 1000
    grace_s: float = 30.0
    write_timeout_s: float = 30.0
    warmup_timeout_s: float = 120.0
    max_request_ms: int | None = None
    retry_delay_ms: int = 1000
    tokenizer_threads: int = 2
    max_stop_strings: int = 16
    max_stop_string_bytes: int = 256
    repetition_guard: bool = False
    images: ImageLimits = field(default_factory=ImageLimits)
    decode_workers: int = 1
    max_images: int = 16
    max_parallel_pages: int = 4
    max_held_image_bytes: int = 1024 * MIB
    log_level: str = "INFO"
    ready_file: Path | None = None

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if not 0 <= self.port <= 65535:  # noqa: PLR2004
            raise ValueError(f"port: expected 0 to 65535, got {self.port}")
        for name in ("max_message_bytes", "tokenizer_threads", "max_stop_string_bytes"):
            _require(name, getattr(self, name), 1)
        _require("decode_workers", self.decode_workers, 1, most=64)
        _require("max_parallel_pages", self.max_parallel_pages, 1, most=64)
        _require("max_held_image_bytes", self.max_held_image_bytes, 1, most=2**53)
        for name in ("max_bytes", "max_pixels", "max_document_bytes", "max_pages", "memory_bytes"):
            _require(f"images.{name}", getattr(self.images, name), 1, most=2**53)
        _require_time("images.decode_timeout_s", self.images.decode_timeout_s)
        for name in ("min_keepalive_ms", "retry_delay_ms", "max_stop_strings", "max_images"):
            _require(name, getattr(self, name), 0)
        if self.max_message_bytes > 2**31 - 1 - MIB:
            raise ValueError(f"max_message_bytes: at most 2046 MiB, got {self.max_message_bytes}")
        if self.max_request_ms is not None:
            _require("max_request_ms", self.max_request_ms, 1, most=2**53)
        _require_time("write_timeout_s", self.write_timeout_s)
        _require_time("warmup_timeout_s", self.warmup_timeout_s)
        if not 0 <= self.grace_s <= MAX_TIME_S:
            raise ValueError(f"grace_s: expected 0 to 1e9 seconds, got {self.grace_s}")
        if self.log_level not in logging.getLevelNamesMapping():
            raise ValueError(f"log_level: expected a level of logging, got {self.log_level}")


def _require(name: str, value: int, least: int, most: int = MAX_INT32) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}")


def _require_time(name: str, value: float) -> None:
    if not 0 < value <= MAX_TIME_S:
        raise ValueError(f"{name}: expected more than 0 and at most 1e9 seconds, got {value}")

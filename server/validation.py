"""Limits of requests: every field is checked, and what cannot be done is refused, not ignored."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from deltaflash.v1 import generation_pb2, inference_pb2
from server.backend import EngineInfo, RepetitionGuard, Sampling
from server.config import ServerConfig
from server.errors import (
    MAX_VIOLATIONS,
    EmptyPromptError,
    FeatureUnimplementedError,
    InvalidFieldError,
    MessageTooLargeError,
    PromptTooLongError,
    UnknownModelError,
    Violation,
)

MAX_NAME_CHARS = 128
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHAT_PARTS = 16 * 1024
"""Most messages and parts of a chat: an empty one is two bytes on the wire, and much more here."""


@dataclass(slots=True)
class Findings:
    """What is wrong with a request: bad fields, and good ones that this server cannot do."""

    violations: list[Violation] = field(default_factory=list)
    unimplemented: list[str] = field(default_factory=list)

    def bad(self, path: str, description: str) -> None:
        """Notes a field out of its range."""
        self.violations.append(Violation(path, description))

    def lacks(self, path: str) -> None:
        """Notes a field that asks for a missing feature."""
        self.unimplemented.append(path)

    @property
    def full(self) -> bool:
        """True when more violations would not reach the caller."""
        return len(self.violations) >= MAX_VIOLATIONS

    def raise_any(self) -> None:
        """Ends the check.

        Raises:
            InvalidFieldError: A field is out of its range.
            FeatureUnimplementedError: All fields are good, but one cannot be done.
        """
        if self.violations:
            raise InvalidFieldError(self.violations)
        if self.unimplemented:
            raise FeatureUnimplementedError(self.unimplemented[0])

    def check_range(
        self, path: str, value: float, low: float, high: float, *, above_low: bool = False
    ) -> None:
        """Notes a number outside [low, high], or (low, high]; NaN and infinity are outside."""
        if not (low < value <= high if above_low else low <= value <= high):
            begin = f"above {low:g}" if above_low else f"{low:g}"
            self.bad(path, f"expected {begin} to {high:.17g}, got {value:.9g}")

    def check_name(self, path: str, value: str, most: int = MAX_NAME_CHARS) -> None:
        """Notes a name that is not 1 to `most` printable ASCII characters without spaces."""
        if not 0 < len(value) <= most or not all("!" <= c <= "~" for c in value):
            self.bad(path, f"expected 1 to {most} printable ASCII characters without spaces")


@dataclass(frozen=True, slots=True)
class Stopping:
    """Checked `StoppingOptions`; `max_tokens` is None when the request names none."""

    max_tokens: int | None
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_end_tokens: bool
    include_stop: bool
    repetition_guard: RepetitionGuard | None


@dataclass(frozen=True, slots=True)
class Output:
    """Checked `OutputOptions`; `top_logprobs` is None when absent."""

    skip_special_tokens: bool
    token_records: bool
    top_logprobs: int | None


def check_message_size(num_bytes: int, config: ServerConfig) -> None:
    """Refuses a serialised request over the limit.

    Raises:
        MessageTooLargeError: It is.
    """
    if num_bytes > config.max_message_bytes:
        raise MessageTooLargeError(
            f"the request has {num_bytes} bytes, the limit is {config.max_message_bytes}",
            metadata={"bytes": str(num_bytes), "max_bytes": str(config.max_message_bytes)},
        )


class Named(Protocol):
    """A request that the caller may name."""

    @property
    def request_id(self) -> str:
        """The name, empty when absent."""
        ...

    def HasField(self, field_name: Any) -> bool:  # noqa: ANN401, N802 as protobuf has it
        """Whether a field is present."""
        ...


def check_request_id(request: Named, most: int = MAX_NAME_CHARS) -> str | None:
    """Returns the caller's name for a request, None when absent.

    Args:
        request: The request.
        most: Longest name, characters.

    Raises:
        InvalidFieldError: It is no such name.
    """
    if not request.HasField("request_id"):
        return None
    findings = Findings()
    findings.check_name("request_id", request.request_id, most)
    findings.raise_any()
    return request.request_id


def check_model(model: str | None, info: EngineInfo) -> None:
    """Refuses a model that is not loaded.

    Args:
        model: The name in the request; None when absent.
        info: What is loaded.

    Raises:
        InvalidFieldError: It cannot be a model's name.
        UnknownModelError: It is another model's name.
    """
    if model is None or model == info.name:
        return
    if not 0 < len(model) <= MAX_NAME_CHARS:
        raise InvalidFieldError(
            [Violation("model", f"expected 1 to {MAX_NAME_CHARS} characters, got {len(model)}")]
        )
    raise UnknownModelError(f"this server serves {info.name}", metadata={"model": model})


def check_sampling(
    options: generation_pb2.SamplingOptions, info: EngineInfo, findings: Findings, path: str
) -> Sampling:
    """Checks `SamplingOptions`.

    Args:
        options: The message; an absent one has only absent fields.
        info: What is loaded.
        findings: Takes what is wrong.
        path: Path of the message in the request, with a dot at its end.

    Returns:
        The values, meaningless when there are findings. The seed is None when absent.
    """
    temperature, min_p = options.temperature, options.min_p
    top_p = options.top_p if options.HasField("top_p") else 1.0
    findings.check_range(f"{path}temperature", temperature, 0, 100)
    findings.check_range(f"{path}top_k", options.top_k, 0, info.vocab_size)
    findings.check_range(f"{path}top_p", top_p, 0, 1, above_low=True)
    findings.check_range(f"{path}min_p", min_p, 0, 1)
    repetition = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    findings.check_range(f"{path}repetition_penalty", repetition, 0, 10, above_low=True)
    findings.check_range(f"{path}presence_penalty", options.presence_penalty, -10, 10)
    findings.check_range(f"{path}frequency_penalty", options.frequency_penalty, -10, 10)
    biases = sorted(options.logit_bias.items())
    _check_count(f"{path}logit_bias", len(biases), info.max_logit_biases, findings)
    for token_id, bias in biases[: info.max_logit_biases]:
        name = f"{path}logit_bias[{token_id}]"
        if token_id >= info.vocab_size:
            findings.bad(name, f"expected a token below {info.vocab_size}")
        findings.check_range(name, bias, -100, 100)
    seed = options.seed if options.HasField("seed") else None
    return Sampling(
        temperature=temperature,
        top_k=options.top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(biases),
    )


def check_stopping(
    options: generation_pb2.StoppingOptions,
    info: EngineInfo,
    config: ServerConfig,
    findings: Findings,
    path: str,
) -> Stopping:
    """Checks `StoppingOptions`; arguments and result as `check_sampling`."""
    max_tokens = options.max_tokens if options.HasField("max_tokens") else None
    limit = info.context_len - 1
    if max_tokens is not None:
        findings.check_range(f"{path}max_tokens", max_tokens, 1, limit)
    longest = info.default_max_tokens if max_tokens is None else max_tokens
    findings.check_range(f"{path}min_tokens", options.min_tokens, 0, longest)
    _check_count(
        f"{path}stop_strings", len(options.stop_strings), config.max_stop_strings, findings
    )
    for index, text in enumerate(options.stop_strings[: config.max_stop_strings]):
        num_bytes = len(text.encode())
        if not 0 < num_bytes <= config.max_stop_string_bytes:
            findings.bad(
                f"{path}stop_strings[{index}]",
                f"expected 1 to {config.max_stop_string_bytes} bytes, got {num_bytes}",
            )
    ids = options.stop_token_ids
    _check_count(f"{path}stop_token_ids", len(ids), info.max_stop_token_ids, findings)
    for index, token_id in enumerate(ids[: info.max_stop_token_ids]):
        if token_id >= info.vocab_size:
            findings.bad(
                f"{path}stop_token_ids[{index}]",
                f"expected a token below {info.vocab_size}, got {token_id}",
            )
    return Stopping(
        max_tokens,
        options.min_tokens,
        tuple(dict.fromkeys(options.stop_strings[: config.max_stop_strings])),
        tuple(dict.fromkeys(ids[: info.max_stop_token_ids])),
        options.ignore_eos,
        options.include_stop_in_output,
        check_repetition_guard(options, config, findings, f"{path}repetition_guard."),
    )


def check_repetition_guard(
    stopping: generation_pb2.StoppingOptions, config: ServerConfig, findings: Findings, path: str
) -> RepetitionGuard | None:
    """Checks the `RepetitionGuard` of `StoppingOptions`; returns what holds, None if off."""
    if not stopping.HasField("repetition_guard"):
        return RepetitionGuard() if config.repetition_guard else None
    options, default = stopping.repetition_guard, RepetitionGuard()
    guard = RepetitionGuard(
        options.max_period if options.HasField("max_period") else default.max_period,
        options.min_repeats if options.HasField("min_repeats") else default.min_repeats,
        options.min_repeated_tokens
        if options.HasField("min_repeated_tokens")
        else default.min_repeated_tokens,
    )
    findings.check_range(f"{path}max_period", guard.max_period, 1, 512)
    findings.check_range(f"{path}min_repeats", guard.min_repeats, 2, 1024)
    findings.check_range(f"{path}min_repeated_tokens", guard.min_repeated_tokens, 0, 65536)
    return None if options.HasField("enabled") and not options.enabled else guard


def check_output(
    options: generation_pb2.OutputOptions, info: EngineInfo, findings: Findings, path: str
) -> Output:
    """Checks `OutputOptions`; arguments and result as `check_sampling`."""
    top_logprobs = options.top_logprobs if options.HasField("top_logprobs") else None
    if top_logprobs is not None:
        name = f"{path}top_logprobs"
        if top_logprobs > 0 and not options.token_records:
            findings.bad(name, "needs token_records")
        elif info.max_top_logprobs == 0:
            findings.lacks(name)
        else:
            findings.check_range(name, top_logprobs, 0, info.max_top_logprobs)
    if options.token_records and not info.has_token_records:
        findings.lacks(f"{path}token_records")
    return Output(
        options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        options.token_records,
        top_logprobs if options.token_records else None,
    )


def check_speculation(
    options: generation_pb2.SpeculationOptions, info: EngineInfo, findings: Findings, path: str
) -> None:
    """Checks `SpeculationOptions`."""
    drafts = info.max_draft_tokens > 0
    if options.HasField("enabled") and options.enabled != drafts:
        findings.lacks(f"{path}enabled")
    if options.HasField("max_draft_tokens"):
        name = f"{path}max_draft_tokens"
        limit = info.max_draft_tokens if drafts else 2**32 - 1
        findings.check_range(name, options.max_draft_tokens, 1, limit)
        if options.max_draft_tokens != info.max_draft_tokens:
            findings.lacks(name)


def check_extras(request: inference_pb2.GenerateRequest, findings: Findings) -> None:
    """Checks the fields that no backend serves yet."""
    if request.HasField("num_sequences"):
        if request.num_sequences == 0:
            findings.bad("num_sequences", "expected 1 or more, got 0")
        elif request.num_sequences > 1:
            findings.lacks("num_sequences")
    if request.HasField("grammar"):
        kind = request.grammar.WhichOneof("kind")
        if kind is None:
            findings.bad("grammar", "expected json_schema, regex or ebnf")
        else:
            num_bytes = len(getattr(request.grammar, kind).encode())
            if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
                findings.bad(
                    f"grammar.{kind}", f"expected 1 to {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}"
                )
            findings.lacks("grammar")
    if request.HasField("lora_adapter"):
        if not 0 < len(request.lora_adapter) <= MAX_NAME_CHARS:
            findings.bad("lora_adapter", f"expected 1 to {MAX_NAME_CHARS} characters")
        findings.lacks("lora_adapter")
    check_priority(request.priority, findings)


def check_priority(priority: int, findings: Findings) -> None:
    """Checks a place in the waiting queue; only the middle one is served."""
    findings.check_range("priority", priority, -100, 100)
    if priority != 0:
        findings.lacks("priority")


def check_prompt(
    request: inference_pb2.GenerateRequest,
    info: EngineInfo,
    findings: Findings,
    reads_pictures: bool = False,
) -> None:
    """Checks the form of the prompt, before it is tokenised.

    Args:
        request: The request.
        info: What is loaded.
        findings: Takes what is wrong.
        reads_pictures: A chat may have pictures; their own form is checked elsewhere.

    Raises:
        EmptyPromptError: There is none.
        PromptTooLongError: There are too many token ids.
    """
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise EmptyPromptError("the prompt has no token")
        case "token_ids":
            _check_token_ids(request.token_ids, info, findings)
        case "chat":
            _check_chat(request.chat, findings, reads_pictures)
        case _:
            raise EmptyPromptError("the request has no prompt: expected text, token_ids or chat")


def check_prompt_ids(
    prompt_ids: tuple[int, ...], info: EngineInfo, path: str, num_pictures: int = 0
) -> None:
    """Checks a tokenised prompt.

    Args:
        prompt_ids: The prompt.
        info: What is loaded.
        path: Its field in the request.
        num_pictures: How many placeholders it has to have, one a picture.

    Raises:
        EmptyPromptError: It has no token.
        PromptTooLongError: It leaves no room in the context.
        InvalidFieldError: It has another number of placeholders.
    """
    if not prompt_ids:
        raise EmptyPromptError("the prompt has no token")
    if len(prompt_ids) > info.context_len - 1:
        raise PromptTooLongError(len(prompt_ids), info.context_len - 1)
    if num_pictures == 0 and info.placeholder_token_ids.isdisjoint(prompt_ids):
        return
    found = sum(token_id in info.placeholder_token_ids for token_id in prompt_ids)
    if not found == num_pictures == prompt_ids.count(info.image_token_id):
        raise InvalidFieldError(
            [
                Violation(
                    path,
                    f"holds {found} placeholder tokens of pictures; {num_pictures} pictures come "
                    "with it",
                )
            ]
        )


def _check_count(path: str, count: int, limit: int, findings: Findings) -> None:
    if count > limit:
        findings.bad(path, f"expected at most {limit} entries, got {count}")


def _check_token_ids(prompt: inference_pb2.TokenIds, info: EngineInfo, findings: Findings) -> None:
    if not prompt.ids:
        raise EmptyPromptError("the prompt has no token")
    if len(prompt.ids) > info.context_len - 1:
        raise PromptTooLongError(len(prompt.ids), info.context_len - 1)
    if max(prompt.ids) < info.vocab_size:
        return
    for index, token_id in enumerate(prompt.ids):
        if findings.full:
            break
        if token_id >= info.vocab_size:
            findings.bad(
                f"token_ids.ids[{index}]",
                f"expected a token below {info.vocab_size}, got {token_id}",
            )


def _check_chat(chat: inference_pb2.Chat, findings: Findings, reads_pictures: bool) -> None:
    if not chat.messages:
        raise EmptyPromptError("the chat has no messages")
    num_parts = 0
    for number, message in enumerate(chat.messages):
        num_parts += max(1, len(message.content))
        if num_parts > MAX_CHAT_PARTS:
            findings.bad("chat", f"expected at most {MAX_CHAT_PARTS} messages and parts")
        if num_parts > MAX_CHAT_PARTS or findings.full:
            break
        path = f"chat.messages[{number}]"
        if message.role == inference_pb2.CHAT_ROLE_SYSTEM:
            if number > 0:
                findings.bad(f"{path}.role", "a system message may only be the first")
        elif message.role not in {
            inference_pb2.CHAT_ROLE_USER,
            inference_pb2.CHAT_ROLE_ASSISTANT,
        }:
            findings.bad(f"{path}.role", f"expected a role of ChatRole, got {message.role}")
        if not message.content:
            findings.bad(f"{path}.content", "expected one part or more")
        for index, part in enumerate(message.content):
            kind = part.WhichOneof("part")
            if kind is None:
                findings.bad(f"{path}.content[{index}]", "expected text or image")
            elif kind == "image" and not reads_pictures:
                findings.lacks(f"{path}.content[{index}].image")

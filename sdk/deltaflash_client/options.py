"""What a request may ask for. None, everywhere, leaves the choice to the server's default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self, TypedDict


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: Divides the logits, 0 to 100; 0, the default, is greedy.
        top_k: How many of the likeliest tokens stay; 0 keeps all.
        top_p: The smallest set of likeliest tokens with this probability stays, above 0 to 1.
        min_p: Tokens below this share of the likeliest one's probability go, 0 to 1.
        repetition_penalty: Divides logits of tokens seen in prompt or output, above 0 to 10.
        presence_penalty: Subtracted from logits of tokens seen in the output, -10 to 10.
        frequency_penalty: The same, once for each time a token was seen, -10 to 10.
        logit_bias: Token id to what is added to its logit, -100 to 100.
        seed: Starts the request's random stream, any unsigned 64-bit number.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """Ends an answer whose newest tokens are one stretch of tokens over and over.

    Attributes:
        enabled: False lets the answer repeat itself; the default is True.
        max_period: The longest stretch that is looked for, tokens, 1 to 512.
        min_repeats: How many times it has to come in a row, 2 to 1024.
        min_repeated_tokens: How many tokens all repeats have together at least, 0 to 65536.
    """

    enabled: bool | None = None
    max_period: int | None = None
    min_repeats: int | None = None
    min_repeated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """When the answer ends.

    Attributes:
        max_tokens: The most tokens to generate, 1 and up.
        min_tokens: Nothing ends the answer before this many tokens.
        stop_strings: Texts that end the answer wherever they appear in it.
        stop_token_ids: Tokens that end the answer.
        ignore_eos: The model's end tokens do not end the answer (for load tests).
        include_stop_in_output: The text holds the stop string or stop token.
        repetition_guard: Whether and when a loop ends the answer, with reason REPETITION.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None
    repetition_guard: RepetitionGuard | None = None

    def __post_init__(self) -> None:
        """Refuses one string in place of a sequence of strings."""
        if isinstance(self.stop_strings, str):
            raise TypeError("stop_strings: expected a sequence of strings, got one string")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the answer carries.

    Attributes:
        skip_special_tokens: Special tokens leave no text; the default is True.
        token_records: Deltas carry a record of every token.
        top_logprobs: How many likeliest candidates each record lists; needs token_records. Also 0
            makes the records carry the chosen token's log probability.
    """

    skip_special_tokens: bool | None = None
    token_records: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Speculative drafting: it changes the speed, never the distribution of the answer.

    Attributes:
        enabled: False drafts nothing.
        max_draft_tokens: The most draft tokens verified in one round, 1 and up.
    """

    enabled: bool | None = None
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A rule that the text follows, in exactly one of three languages."""

    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        """Refuses none and more than one."""
        given = [x for x in (self.json_schema, self.regex, self.ebnf) if x is not None]
        if len(given) != 1:
            raise ValueError(f"Grammar: expected one of json_schema, regex, ebnf, got {len(given)}")


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How pages are read.

    Attributes:
        instruction: What the model is told to do with the page.
        min_pixels: The picture is enlarged to at least this many pixels.
        max_pixels: The picture is reduced to at most this many pixels.
        sampling: How tokens are chosen.
        stopping: When the text of a page ends.
        output: What the answer carries.
        speculation: Drafting.
    """

    instruction: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    sampling: SamplingOptions | None = None
    stopping: StoppingOptions | None = None
    output: OutputOptions | None = None
    speculation: SpeculationOptions | None = None


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every call that starts a request.

    Attributes:
        request_id: The caller's name for the request, refused while a live request has it.
        model: Name of the model; absent, the one that is loaded.
        priority: Place in the waiting queue, -100 to 100, higher first.
        timeout_s: Seconds until the call ends with DeadlineExceededError, retries included.
    """

    request_id: str | None
    model: str | None
    priority: int | None
    timeout_s: float | None


class GenerateOptions(CallOptions, total=False):
    """Keyword arguments of `generate` and `generate_text`.

    Attributes:
        sampling: How tokens are chosen.
        stopping: When the answer ends.
        output: What the answer carries.
        speculation: Drafting.
        num_sequences: Answers to generate; the service refuses more than 1 today.
        grammar: A rule for the text; the service refuses it today.
        lora_adapter: Name of an adapter; the service refuses it today.
    """

    sampling: SamplingOptions | None
    stopping: StoppingOptions | None
    output: OutputOptions | None
    speculation: SpeculationOptions | None
    num_sequences: int | None
    grammar: Grammar | None
    lora_adapter: str | None


class DocumentOptions(CallOptions, total=False):
    """Keyword arguments of `parse_document`.

    Attributes:
        options: How every page is read.
        max_parallel_pages: The most pages in work at once, 1 to 64.
    """

    options: PageOptions | None
    max_parallel_pages: int | None


@dataclass(frozen=True, slots=True)
class Pdf:
    """A document as a PDF file.

    Attributes:
        data: The file as it is.
        first_page: The first page to read, from 0.
        num_pages: How many pages to read; None reads to the end.
        dpi: Resolution of the rendering, dots per inch, 36 to 600.
    """

    data: bytes
    first_page: int | None = None
    num_pages: int | None = None
    dpi: int | None = None

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        first_page: int | None = None,
        num_pages: int | None = None,
        dpi: int | None = None,
    ) -> Self:
        """Reads a document from a file; arguments as the attributes."""
        return cls(Path(path).read_bytes(), first_page, num_pages, dpi)

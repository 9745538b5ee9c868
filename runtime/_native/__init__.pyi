"""The C++ half of the runtime: executor, text handling and the CPU ops."""

from collections.abc import Mapping, Sequence
import enum
import os

import numpy
import numpy.typing

from runtime._native import plugins as plugins


class CapacityError(RuntimeError):
    """No page, slot or queue place is left."""

class EngineError(RuntimeError):
    """Engine directory, plugin or manifest disagree; nothing can start."""

class CudaError(RuntimeError):
    """A device call failed."""

class EngineLost(RuntimeError):
    """The engine thread has ended; every request it held is failed."""

class Vocabulary:
    """What the token ids of a model stand for: a table id -> bytes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Reads `vocab.bin` of an engine directory.

        Args:
            path: The file; `runtime.vocabulary.write_vocabulary` writes it.

        Raises:
            EngineError: The file cannot be read, or is not a vocabulary.
        """

    @staticmethod
    def from_tokens(tokens: Sequence[bytes], special_ids: Sequence[int] = [], unused_ids: Sequence[int] = []) -> Vocabulary:
        """
        Makes a table without a file.

        Args:
            tokens: The bytes of each id.
            special_ids: Ids of control tokens.
            unused_ids: Ids that no token owns; their bytes are empty.

        Raises:
            ValueError: An id is out of range, or an unused one has bytes.
        """

    def __len__(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; empty if it is unused or out of range."""

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is a control token."""

    def is_unused(self, token_id: int) -> bool:
        """Returns whether no token has this id."""

class Detokenizer:
    """
    The text of one sequence, token by token.

    Joined, the returned texts are the bytes of the shown tokens put together and decoded as UTF-8
    with `errors="replace"`. Each of them is whole characters. Not for use by two threads at a time.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        """
        Starts an empty sequence.

        Args:
            vocabulary: The bytes of the tokens.
            skip_special_tokens: Leave control tokens out of the text, as if they had not been there.
        """

    def append(self, token_id: int) -> str:
        """Adds one token and returns the text that is certain with it."""

    def finish(self) -> str:
        """Ends the sequence and returns U+FFFD for an incomplete character."""

class StopMatcher:
    """
    Finds stop strings in a text that arrives in pieces.

    The match that ends first in the text wins, and of those that end at the same byte the longest,
    wherever the pieces are cut. Not for use by two threads at a time.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """
        Starts an empty text.

        Args:
            stops: The stop strings.
            include_stop: Cut the text right after the stop instead of right before it.

        Raises:
            ValueError: A stop string is empty.
        """

    def push(self, text: str) -> tuple[str, str | None]:
        """
        Adds a piece of text; pieces after a match are ignored.

        Args:
            text: The piece.

        Returns:
            The text that can go out, and the stop that has matched or None.
        """

    def finish(self) -> str:
        """Ends the text and returns what was held back, nothing after a match."""

    @property
    def matched_stop(self) -> str | None:
        """The stop that matched, or None."""

class TextStream:
    """
    The text of one sequence: decodes its tokens and looks for stop strings.

    Text, token count and stop agree on the token that ended the sequence. Not for use by two threads
    at a time.
    """

    def __init__(self, vocabulary: Vocabulary, *, stops: Sequence[str] = [], include_stop: bool = False, skip_special_tokens: bool = True, min_tokens: int = 0) -> None:
        """
        Starts an empty sequence.

        Args:
            vocabulary: The bytes of the tokens.
            stops: Stop strings.
            include_stop: End the text right after the stop instead of right before it.
            skip_special_tokens: Leave control tokens out of the text.
            min_tokens: A stop string counts only in the text that comes after so many tokens.

        Raises:
            ValueError: A stop string is empty.
        """

    def push(self, token_id: int) -> bool:
        """
        Adds one token; those after a stop are neither decoded nor counted.

        Args:
            token_id: The token.

        Returns:
            Whether a stop string is complete, with this token or before.
        """

    def finish(self) -> bool:
        """
        Ends the sequence for another reason and releases what was held back.

        Returns:
            Whether a stop string is complete.
        """

    def take_text(self) -> str:
        """Returns the text released since the last call."""

    @property
    def num_tokens(self) -> int:
        """Tokens pushed, up to and with the one that completed the stop string."""

    @property
    def num_tokens_released(self) -> int:
        """
        Of these, how many have had all of their text released: the first ones.
        """

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the sequence, or None."""

class RepetitionGuard:
    """
    Finds the token with which a sequence has repeated itself too often.

    Not for use by two threads at a time.
    """

    def __init__(self, limits: RepetitionLimits, *, min_tokens: int = 0) -> None:
        """
        Starts an empty sequence.

        Args:
            limits: What counts as a repetition.
            min_tokens: The first so many tokens never end the sequence.

        Raises:
            ValueError: Names the limit that is out of range.
        """

    def push(self, token_id: int) -> bool:
        """Adds one token and returns whether the newest ones are a repetition."""

class Image:
    """A resized picture."""

    def __init__(self, pixels: numpy.typing.NDArray[numpy.uint8], digest: bytes = b'') -> None:
        """
        pixels: [height, width, 3], RGB, C-contiguous, copied; height and width are multiples
        of EngineInfo.image_factor. digest: of the pixels; with one, ExecutorConfig.
        encoder_cache_bytes may keep what the encoder makes of them.
        """

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def digest(self) -> bytes: ...

class ProgressPhase(enum.Enum):
    """Where a request is."""

    QUEUED = 0

    ENCODING = 1

    PREFILL = 2

    DECODING = 3

class Progress:
    """Where a request is, and how far."""

    @property
    def phase(self) -> ProgressPhase: ...

    @property
    def fraction(self) -> float | None:
        """Of the phase, 0 to 1; None for phases that have no measure."""

def prompt_positions(input_token_ids: Sequence[int], images: Sequence[Image], image_token_id: int, image_factor: int) -> tuple[numpy.typing.NDArray[numpy.int32], int]:
    """
    Rotary positions [3, num_tokens] of a prompt, and what is added to the index of a
    token behind it; for tests.

    Raises:
        ValueError: the runs of placeholders do not fit the pictures.
    """

class FinishReason(enum.Enum):
    """Why a request ended."""

    NOT_FINISHED = 0

    END_ID = 1

    LENGTH = 2

    STOP_WORDS = 3

    CANCELLED = 4

    TIMED_OUT = 5

    REPETITION = 6

class RepetitionLimits:
    """Which repetition ends an answer."""

    def __init__(self, *, max_period: int = 64, min_repeats: int = 8, min_repeated_tokens: int = 256) -> None:
        """
        max_period: 1 to 512, the longest n-gram looked for, tokens. min_repeats: 2 to 1024,
        how often it has to come in a row. min_repeated_tokens: 0 to 65536, how many tokens
        all of them have to be.
        """

    @property
    def max_period(self) -> int: ...

    @max_period.setter
    def max_period(self, arg: int, /) -> None: ...

    @property
    def min_repeats(self) -> int: ...

    @min_repeats.setter
    def min_repeats(self, arg: int, /) -> None: ...

    @property
    def min_repeated_tokens(self) -> int: ...

    @min_repeated_tokens.setter
    def min_repeated_tokens(self, arg: int, /) -> None: ...

class SamplingConfig:
    """How the next token is chosen."""

    def __init__(self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int | None = None, repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] = {}) -> None:
        """
        temperature >= 0 (0 = greedy); top_k >= 0 (0 = off); top_p in (0, 1]; min_p in [0, 1);
        seed: 64 bits, drawn at random if None. Before these, and for greedy too:
        repetition_penalty > 0 (1 = off) of tokens in prompt or output; presence_penalty and
        frequency_penalty of tokens in the output, 0 = off; logit_bias: id to what is added, at
        most MAX_LOGIT_BIASES.
        """

    @property
    def temperature(self) -> float: ...

    @temperature.setter
    def temperature(self, arg: float, /) -> None: ...

    @property
    def top_k(self) -> int: ...

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def top_p(self) -> float: ...

    @top_p.setter
    def top_p(self, arg: float, /) -> None: ...

    @property
    def min_p(self) -> float: ...

    @min_p.setter
    def min_p(self, arg: float, /) -> None: ...

    @property
    def seed(self) -> int | None: ...

    @seed.setter
    def seed(self, arg: int | None, /) -> None: ...

    @property
    def repetition_penalty(self) -> float: ...

    @repetition_penalty.setter
    def repetition_penalty(self, arg: float, /) -> None: ...

    @property
    def presence_penalty(self) -> float: ...

    @presence_penalty.setter
    def presence_penalty(self, arg: float, /) -> None: ...

    @property
    def frequency_penalty(self) -> float: ...

    @frequency_penalty.setter
    def frequency_penalty(self, arg: float, /) -> None: ...

    @property
    def logit_bias(self) -> dict[int, float]: ...

    @logit_bias.setter
    def logit_bias(self, arg: Mapping[int, float], /) -> None: ...

class OutputConfig:
    """What comes back besides text and token ids."""

    def __init__(self, *, token_records: bool = False, top_logprobs: int | None = None, return_context_logits: bool = False, return_generation_logits: bool = False, return_image_embeddings: bool = False) -> None:
        """
        token_records: responses carry a TokenRecord of every token. top_logprobs: candidates
        of a record, 0 to MAX_TOP_LOGPROBS; None: no logprob and rank either. Logits and what
        became of pictures come with the final response.
        """

    @property
    def token_records(self) -> bool: ...

    @token_records.setter
    def token_records(self, arg: bool, /) -> None: ...

    @property
    def top_logprobs(self) -> int | None: ...

    @top_logprobs.setter
    def top_logprobs(self, arg: int | None, /) -> None: ...

    @property
    def return_context_logits(self) -> bool: ...

    @return_context_logits.setter
    def return_context_logits(self, arg: bool, /) -> None: ...

    @property
    def return_generation_logits(self) -> bool: ...

    @return_generation_logits.setter
    def return_generation_logits(self, arg: bool, /) -> None: ...

    @property
    def return_image_embeddings(self) -> bool: ...

    @return_image_embeddings.setter
    def return_image_embeddings(self, arg: bool, /) -> None: ...

class ExecutorConfig:
    """Sizes and limits of an executor."""

    def __init__(self, *, device: str = 'cpu', provider: str = '', max_batch_size: int = 8, max_num_tokens: int = 512, max_prefill_chunk: int = 256, max_queue_size: int = 256, max_queued_tokens: int = 1048576, kv_page_size: int = 32, max_kv_tokens: int = 0, default_max_tokens: int = 1024, max_draft_tokens: int = 0, max_rounds_in_flight: int = 1, num_threads: int = 0, iter_stats_max_iterations: int = 1000, max_scripted_tokens: int = 0, ring_history: int = 0, max_admission_passes: int = 16, max_image_pixels: int = 4194304, encoder_cache_bytes: int = 0, max_vision_tile: int = 384) -> None:
        """
        device: "cpu" or "cuda". provider: of segments, "cublaslt" or "exact" on cuda;
        "" = the device's first. max_batch_size: sequences that run at once. max_num_tokens: token budget of one step.
        max_prefill_chunk: longest piece of one prompt in a step. max_queue_size,
        max_queued_tokens: what may wait. kv_page_size: tokens of a KV page. max_kv_tokens:
        size of the KV pool, 0 = max_batch_size * min(context, 4096). default_max_tokens: for
        requests without max_tokens. max_draft_tokens: longest draft. max_rounds_in_flight:
        steps launched but not read, 1 or 2. num_threads: 0 = all cores. max_scripted_tokens:
        > 0 turns the test hooks of Request on. ring_history: L of the replay ring's flush
        rule, 0 = absorb at start. max_admission_passes: requests that may pass one that does
        not fit. max_image_pixels: of one picture, within the engine's limit. encoder_cache_bytes:
        for encoded pictures that have a digest, 0 = off. max_vision_tile: patches that go
        through a stage of the encoder together, a multiple of 16.
        """

    @property
    def device(self) -> str: ...

    @device.setter
    def device(self, arg: str, /) -> None: ...

    @property
    def provider(self) -> str: ...

    @provider.setter
    def provider(self, arg: str, /) -> None: ...

    @property
    def max_batch_size(self) -> int: ...

    @max_batch_size.setter
    def max_batch_size(self, arg: int, /) -> None: ...

    @property
    def max_num_tokens(self) -> int: ...

    @max_num_tokens.setter
    def max_num_tokens(self, arg: int, /) -> None: ...

    @property
    def max_prefill_chunk(self) -> int: ...

    @max_prefill_chunk.setter
    def max_prefill_chunk(self, arg: int, /) -> None: ...

    @property
    def max_queue_size(self) -> int: ...

    @max_queue_size.setter
    def max_queue_size(self, arg: int, /) -> None: ...

    @property
    def max_queued_tokens(self) -> int: ...

    @max_queued_tokens.setter
    def max_queued_tokens(self, arg: int, /) -> None: ...

    @property
    def kv_page_size(self) -> int: ...

    @kv_page_size.setter
    def kv_page_size(self, arg: int, /) -> None: ...

    @property
    def max_kv_tokens(self) -> int: ...

    @max_kv_tokens.setter
    def max_kv_tokens(self, arg: int, /) -> None: ...

    @property
    def default_max_tokens(self) -> int: ...

    @default_max_tokens.setter
    def default_max_tokens(self, arg: int, /) -> None: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @max_draft_tokens.setter
    def max_draft_tokens(self, arg: int, /) -> None: ...

    @property
    def max_rounds_in_flight(self) -> int: ...

    @max_rounds_in_flight.setter
    def max_rounds_in_flight(self, arg: int, /) -> None: ...

    @property
    def num_threads(self) -> int: ...

    @num_threads.setter
    def num_threads(self, arg: int, /) -> None: ...

    @property
    def iter_stats_max_iterations(self) -> int: ...

    @iter_stats_max_iterations.setter
    def iter_stats_max_iterations(self, arg: int, /) -> None: ...

    @property
    def max_scripted_tokens(self) -> int: ...

    @max_scripted_tokens.setter
    def max_scripted_tokens(self, arg: int, /) -> None: ...

    @property
    def ring_history(self) -> int: ...

    @ring_history.setter
    def ring_history(self, arg: int, /) -> None: ...

    @property
    def max_admission_passes(self) -> int: ...

    @max_admission_passes.setter
    def max_admission_passes(self, arg: int, /) -> None: ...

    @property
    def max_image_pixels(self) -> int: ...

    @max_image_pixels.setter
    def max_image_pixels(self, arg: int, /) -> None: ...

    @property
    def encoder_cache_bytes(self) -> int: ...

    @encoder_cache_bytes.setter
    def encoder_cache_bytes(self, arg: int, /) -> None: ...

    @property
    def max_vision_tile(self) -> int: ...

    @max_vision_tile.setter
    def max_vision_tile(self, arg: int, /) -> None: ...

class Request:
    """One call."""

    def __init__(self, input_token_ids: Sequence[int], max_tokens: int | None = None, *, sampling: SamplingConfig = ..., output: OutputConfig = ..., end_ids: Sequence[int] | None = None, ignore_end_ids: bool = False, stop_ids: Sequence[int] = [], stop_strings: Sequence[str] = [], include_stop: bool = False, skip_special_tokens: bool = True, allotted_time_ms: int | None = None, client_id: str = '', forced_tokens: Sequence[int] = [], draft_script: Sequence[int] = [], force_tokens: bool = True, fail_after_tokens: int = 0, min_tokens: int = 0, repetition_guard: RepetitionLimits | None = None, images: Sequence[Image] = [], return_progress: bool = False) -> None:
        """
        max_tokens: >= 1, None = ExecutorConfig.default_max_tokens. min_tokens: at most
        max_tokens; before, no end id comes and no stop string or repetition counts. end_ids:
        None = the engine's. stop_ids: end the text beside those; the text of one is part of it
        with include_stop. repetition_guard: None = off. allotted_time_ms: from enqueue.
        images: one for each run of placeholders (EngineInfo.image_token_id) among the ids,
        which is as long as the picture has tokens. return_progress: responses say where the
        request is before its first token. The others are test hooks: forced_tokens, what the
        target says in place of its own choice; draft_script, how many drafts of it are right in
        each round; force_tokens, False if it is only drafted and not said; fail_after_tokens,
        after how many tokens of this request the loop fails.
        """

    @property
    def input_token_ids(self) -> list[int]: ...

    @input_token_ids.setter
    def input_token_ids(self, arg: Sequence[int], /) -> None: ...

    @property
    def max_tokens(self) -> int | None: ...

    @max_tokens.setter
    def max_tokens(self, arg: int | None, /) -> None: ...

    @property
    def sampling(self) -> SamplingConfig: ...

    @sampling.setter
    def sampling(self, arg: SamplingConfig, /) -> None: ...

    @property
    def output(self) -> OutputConfig: ...

    @output.setter
    def output(self, arg: OutputConfig, /) -> None: ...

    @property
    def end_ids(self) -> list[int] | None: ...

    @end_ids.setter
    def end_ids(self, arg: Sequence[int] | None, /) -> None: ...

    @property
    def ignore_end_ids(self) -> bool: ...

    @ignore_end_ids.setter
    def ignore_end_ids(self, arg: bool, /) -> None: ...

    @property
    def stop_ids(self) -> list[int]: ...

    @stop_ids.setter
    def stop_ids(self, arg: Sequence[int], /) -> None: ...

    @property
    def stop_strings(self) -> list[str]: ...

    @stop_strings.setter
    def stop_strings(self, arg: Sequence[str], /) -> None: ...

    @property
    def include_stop(self) -> bool: ...

    @include_stop.setter
    def include_stop(self, arg: bool, /) -> None: ...

    @property
    def skip_special_tokens(self) -> bool: ...

    @skip_special_tokens.setter
    def skip_special_tokens(self, arg: bool, /) -> None: ...

    @property
    def repetition_guard(self) -> RepetitionLimits | None: ...

    @repetition_guard.setter
    def repetition_guard(self, arg: RepetitionLimits | None, /) -> None: ...

    @property
    def allotted_time_ms(self) -> int | None: ...

    @allotted_time_ms.setter
    def allotted_time_ms(self, arg: int | None, /) -> None: ...

    @property
    def client_id(self) -> str: ...

    @client_id.setter
    def client_id(self, arg: str, /) -> None: ...

    @property
    def forced_tokens(self) -> list[int]: ...

    @forced_tokens.setter
    def forced_tokens(self, arg: Sequence[int], /) -> None: ...

    @property
    def draft_script(self) -> list[int]: ...

    @draft_script.setter
    def draft_script(self, arg: Sequence[int], /) -> None: ...

    @property
    def force_tokens(self) -> bool: ...

    @force_tokens.setter
    def force_tokens(self, arg: bool, /) -> None: ...

    @property
    def fail_after_tokens(self) -> int: ...

    @fail_after_tokens.setter
    def fail_after_tokens(self, arg: int, /) -> None: ...

    @property
    def min_tokens(self) -> int: ...

    @min_tokens.setter
    def min_tokens(self, arg: int, /) -> None: ...

    @property
    def images(self) -> list[Image]: ...

    @images.setter
    def images(self, arg: Sequence[Image], /) -> None: ...

    @property
    def return_progress(self) -> bool: ...

    @return_progress.setter
    def return_progress(self, arg: bool, /) -> None: ...

class RequestStats:
    """Steady-clock times (ns) and counts of one request."""

    @property
    def arrival_ns(self) -> int: ...

    @property
    def first_scheduled_ns(self) -> int: ...

    @property
    def vision_start_ns(self) -> int: ...

    @property
    def vision_end_ns(self) -> int: ...

    @property
    def prefill_start_ns(self) -> int: ...

    @property
    def first_token_ns(self) -> int: ...

    @property
    def last_token_ns(self) -> int: ...

    @property
    def num_prefill_chunks(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_drafted(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...

class TokenCandidate:
    """One of the likeliest tokens."""

    @property
    def id(self) -> int: ...

    @property
    def piece(self) -> bytes:
        """The token's bytes, which need not be whole characters."""

    @property
    def logprob(self) -> float: ...

class TokenRecord:
    """One emitted token; logprobs are of the raw logits, natural logarithms."""

    @property
    def id(self) -> int: ...

    @property
    def piece(self) -> bytes:
        """
        The token's bytes, which need not be whole characters; empty for a hidden special token.
        """

    @property
    def logprob(self) -> float | None: ...

    @property
    def rank(self) -> int | None:
        """1 + how many tokens were likelier."""

    @property
    def candidates(self) -> list[TokenCandidate]:
        """Likeliest first."""

class Response:
    """What became of a request since its last response."""

    @property
    def request_id(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def records(self) -> list[TokenRecord]: ...

    @property
    def is_final(self) -> bool: ...

    @property
    def finish_reason(self) -> FinishReason: ...

    @property
    def stop_string(self) -> str | None: ...

    @property
    def end_id(self) -> int | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_completion_tokens(self) -> int: ...

    @property
    def error(self) -> str | None: ...

    @property
    def stats(self) -> RequestStats: ...

    def take_context_logits(self) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        Moves out fp32 [num_prompt_tokens, vocab_size]; None unless asked for, and final.
        """

    def take_generation_logits(self) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        Moves out fp32 [num_completion_tokens, vocab_size]; None unless asked for, and final.
        """

    @property
    def progress(self) -> Progress | None: ...

    def take_image_embeddings(self) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        Moves out fp32 [tokens of all pictures, hidden_size]; None unless asked for, and final.
        """

class IterationStats:
    """One iteration of the loop."""

    @property
    def iteration(self) -> int: ...

    @property
    def timestamp_ns(self) -> int: ...

    @property
    def latency_ns(self) -> int: ...

    @property
    def num_active(self) -> int: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_context_tokens(self) -> int: ...

    @property
    def num_generation_rows(self) -> int: ...

    @property
    def num_emitted_tokens(self) -> int: ...

    @property
    def num_drafted(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...

    @property
    def num_completed(self) -> int: ...

    @property
    def pages_used(self) -> int: ...

    @property
    def slots_used(self) -> int: ...

    @property
    def vision_ns(self) -> int: ...

class LoadReport:
    """How busy an executor is."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...

    @property
    def slots_used(self) -> int: ...

    @property
    def slots_total(self) -> int: ...

    @property
    def pages_used(self) -> int: ...

    @property
    def pages_total(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def silence_ns(self) -> int: ...

    @property
    def oldest_queued_ns(self) -> int: ...

    @property
    def encoder_cache_bytes(self) -> int: ...

    @property
    def encoder_cache_hits(self) -> int: ...

    @property
    def encoder_cache_misses(self) -> int: ...

class EngineInfo:
    """What an engine says of itself."""

    @property
    def engine_id(self) -> str: ...

    @property
    def model_name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def end_ids(self) -> list[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def has_vision(self) -> bool: ...

    @property
    def image_token_id(self) -> int: ...

    @property
    def image_factor(self) -> int: ...

    @property
    def min_image_pixels(self) -> int: ...

    @property
    def max_image_pixels(self) -> int: ...

    @property
    def vision_bytes(self) -> int: ...

class Executor:
    """
    Generates tokens with one engine, on a loop thread of its own. Every method may be called from any thread.
    """

    def __init__(self, engine_dir: str | os.PathLike[str], config: ExecutorConfig = ...) -> None:
        """
        Loads an engine directory and starts the loop.

        Raises:
            EngineError: the engine does not fit itself or this runtime.
            ValueError: the config cannot work.
        """

    def enqueue_request(self, request: Request) -> int:
        """
        Queues a request and returns its id at once.

        Raises:
            ValueError: names the field that is wrong.
            CapacityError: the queue is full.
            EngineLost: the loop has ended.
        """

    def cancel_request(self, request_id: int) -> None:
        """Asks for the end of a request; its final response still comes."""

    def await_responses(self, timeout_s: float | None = None) -> list[Response]:
        """
        Responses that are ready, waiting for some if there are none. Empty on timeout and
        after the loop has ended.
        """

    def take_responses(self) -> list[Response]:
        """Responses that are ready; never waits. Clears response_fd."""

    @property
    def response_fd(self) -> int:
        """An eventfd: readable once per step in which responses became ready."""

    @property
    def num_responses_ready(self) -> int: ...

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Statistics of the iterations since the last call."""

    def load(self) -> LoadReport:
        """How busy the executor is."""

    def can_enqueue_requests(self) -> bool: ...

    def engine_error(self) -> str | None:
        """What ended the loop, if an error did."""

    def shutdown(self) -> None:
        """
        Cancels what runs, delivers the final responses and ends the loop. Idempotent.
        """

    @property
    def engine(self) -> EngineInfo: ...

    @property
    def config(self) -> ExecutorConfig:
        """A copy: it is fixed."""

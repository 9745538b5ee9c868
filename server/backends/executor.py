"""The backend protocol over `runtime.Executor`.

The executor makes its eventfd readable at most once for each engine step. One callback of the event
loop then takes the responses of all requests and hands each to its mailbox; no thread waits for a
request, and nothing runs per token.

`runtime` holds native code and is imported late: the command line and the client need none.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from server.backend import (
    CapacityExceededError,
    EndCause,
    EngineConfigError,
    EngineInfo,
    EngineLostError,
    EngineRefusedError,
    Finished,
    GenerationRequest,
    GenerationStats,
    IterationStats,
    Load,
    Progress,
    ProgressPhase,
    QueueFullError,
    RequestRefusedError,
    TokenCandidate,
    TokenEvent,
    TokenRecord,
)
from server.chat_template import ChatTemplate
from server.config import EngineConfig
from server.mailbox import Mailbox
from server.prompt import PromptEncoder
from server.service_context import Engine
from server.tokenizer import Tokenizer

if TYPE_CHECKING:
    import runtime
    from runtime import EngineInfo as NativeEngineInfo
    from runtime import Executor, FinishReason, Request, Response
    from runtime.engine_directory import EngineDirectory

log = logging.getLogger(__name__)

MAX_END_IDS = 8
"""Most end tokens of one request, kMaxEndIds of plugins/common/slot_table.h."""
MAX_LOGIT_BIASES = 256
"""Most biased tokens of one request, kMaxLogitBiases of plugins/common/slot_table.h."""
MAX_TOP_LOGPROBS = 20
"""Most candidates of a token record, kMaxTopLogprobs of plugins/common/slot_table.h."""
MAX_MIN_P = 1 - 2**-24
"""The executor takes min_p below 1; this is the float32 before it, and leaves only ties."""
PAGE_TEXT_TOKENS = 256
"""Room beside a picture for the instruction and the chat's own tokens."""
WATCH_S = 0.25
"""How often the engine is asked whether it lives; a dead idle engine signals nothing."""


class ExecutorBackend:
    """Drives one `runtime.Executor`; see `server.backend.Backend`."""

    def __init__(self, executor: "Executor", info: EngineInfo, stall_s: float) -> None:
        """Takes an executor that has loaded its engine.

        Args:
            executor: The executor; the backend is the only reader of its responses.
            info: What is loaded.
            stall_s: No progress for so long, while there is work, means that the engine hangs.
        """
        import runtime

        reasons = runtime.FinishReason
        self._executor = executor
        self._info = info
        self._stall_ns = int(stall_s * 1e9)
        self._causes: Mapping[FinishReason, EndCause] = {
            reasons.END_ID: EndCause.END_TOKEN,
            reasons.STOP_WORDS: EndCause.STOP_STRING,
            reasons.LENGTH: EndCause.LENGTH,
            reasons.CANCELLED: EndCause.CANCELLED,
            reasons.TIMED_OUT: EndCause.TIMED_OUT,
            reasons.REPETITION: EndCause.REPETITION,
        }
        # The runtime's phases have the names of ours.
        self._phases = {
            getattr(runtime.ProgressPhase, phase.name): phase for phase in ProgressPhase
        }
        self._mailboxes: dict[int, Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._lost_cause: str | None = None

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        return self._info

    @property
    def num_open(self) -> int:
        """Requests whose final response has not come yet."""
        return len(self._mailboxes)

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Binds the backend to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._loop.add_reader(self._executor.response_fd, self._deliver)
        self._watch = self._loop.call_later(WATCH_S, self._check_alive)

    def submit(self, request: GenerationRequest) -> Mailbox:
        """Hands a request to the executor.

        Raises:
            RequestRefusedError: A value that the executor does not take.
            QueueFullError: Its queue is at its limit.
            CapacityExceededError: The request needs more KV cache than there is.
            EngineLostError: The engine is gone.
        """
        import runtime

        if self._lost_cause is not None:
            raise EngineLostError(self._lost_cause)
        needed = len(request.prompt_ids) + request.max_tokens
        if needed > self._info.kv_capacity_tokens:
            raise CapacityExceededError(needed, self._info.kv_capacity_tokens)
        try:
            executor_id = self._executor.enqueue_request(self._native(request))
        except runtime.CapacityError as error:
            raise QueueFullError(self.load().num_queued, self._info.max_queued) from error
        except (runtime.EngineLost, runtime.CudaError) as error:
            self._lose(str(error))
            raise EngineLostError(str(error)) from error
        except ValueError as error:
            raise RequestRefusedError(str(error)) from error
        mailbox = Mailbox(lambda: self._executor.cancel_request(executor_id))
        self._mailboxes[executor_id] = mailbox
        return mailbox

    def load(self) -> Load:
        """Returns the load of this instant, nearly.

        Raises:
            EngineLostError: The engine is gone.
        """
        import runtime

        try:
            report = self._executor.load()
        except (runtime.EngineLost, runtime.CudaError) as error:
            raise EngineLostError(str(error)) from error
        return Load(
            num_running=report.num_running,
            num_queued=report.num_queued,
            num_running_tokens=report.pages_used * report.page_size,
            num_queued_tokens=report.num_queued_tokens,
            slots_used=report.slots_used,
            slots_total=report.slots_total,
            pages_used=report.pages_used,
            pages_total=report.pages_total,
            silence_ns=report.silence_ns,
            oldest_queued_ns=report.oldest_queued_ns,
        )

    def iteration_stats(self) -> list[IterationStats]:
        """Returns the steps since the last call."""
        names = IterationStats.__dataclass_fields__
        return [
            IterationStats(**{name: getattr(step, name) for name in names})
            for step in self._executor.get_latest_iteration_stats()
        ]

    def close(self) -> None:
        """Ends what runs and frees the engine; blocks."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._unbind)
        self._executor.shutdown()

    def _native(self, request: GenerationRequest) -> "Request":
        import runtime

        sampling = request.sampling
        guard = request.repetition_guard
        return runtime.Request(
            list(request.prompt_ids),
            request.max_tokens,
            sampling=runtime.SamplingConfig(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=min(sampling.min_p, MAX_MIN_P),
                seed=sampling.seed,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=dict(sampling.logit_bias),
            ),
            output=runtime.OutputConfig(
                token_records=request.token_records, top_logprobs=request.top_logprobs
            ),
            ignore_end_ids=request.ignore_end_tokens,
            stop_ids=list(request.stop_token_ids),
            stop_strings=list(request.stop_strings),
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            allotted_time_ms=request.allotted_time_ms,
            client_id=request.request_id,
            min_tokens=request.min_tokens,
            repetition_guard=None
            if guard is None
            else runtime.RepetitionLimits(
                max_period=guard.max_period,
                min_repeats=guard.min_repeats,
                min_repeated_tokens=guard.min_repeated_tokens,
            ),
            images=[runtime.Image(image.pixels, image.digest) for image in request.images],
            return_progress=request.report_progress,
        )

    def _deliver(self) -> None:
        """Hands over all that an engine step brought."""
        import runtime

        lost: str | None = None
        try:
            responses = self._executor.take_responses()
        except (runtime.EngineLost, runtime.CudaError) as error:
            self._lose(str(error))
            return
        for response in responses:
            mailbox = self._mailboxes.get(response.request_id)
            if response.is_final:
                self._mailboxes.pop(response.request_id, None)
            if response.error is not None:
                lost = response.error
                if mailbox is not None:
                    mailbox.fail(EngineLostError(response.error))
            elif mailbox is not None:
                mailbox.put(self._event(response))
        if lost is not None:
            self._lose(lost)

    def _event(self, response: "Response") -> TokenEvent:
        finished: Finished | None = None
        if response.is_final:
            stats = response.stats
            finished = Finished(
                cause=self._causes[response.finish_reason],
                num_completion_tokens=response.num_completion_tokens,
                stats=GenerationStats(
                    arrival_ns=stats.arrival_ns or None,
                    first_scheduled_ns=stats.first_scheduled_ns or None,
                    vision_start_ns=stats.vision_start_ns or None,
                    vision_end_ns=stats.vision_end_ns or None,
                    prefill_start_ns=stats.prefill_start_ns or None,
                    first_token_ns=stats.first_token_ns or None,
                    last_token_ns=stats.last_token_ns or None,
                    num_steps=stats.num_steps,
                    num_drafted=stats.num_drafted,
                    num_accepted=stats.num_accepted,
                ),
                end_token_id=response.end_id,
                stop_string=response.stop_string,
            )
        progress = response.progress
        return TokenEvent(
            response.text,
            tuple(response.token_ids),
            finished,
            tuple(map(record_of, response.records)),
            None if progress is None else Progress(self._phases[progress.phase], progress.fraction),
        )

    def _check_alive(self) -> None:
        """Looks for an engine that died idle or hangs; the executor signals neither."""
        assert self._loop is not None  # noqa: S101 set by start
        error = self._executor.engine_error()
        if error is not None:
            self._deliver()
            self._lose(error)
        else:
            self._check_progress()
        if self._lost_cause is None:
            self._watch = self._loop.call_later(WATCH_S, self._check_alive)

    def _check_progress(self) -> None:
        try:
            silence_ns = self.load().silence_ns
        except EngineLostError as error:
            self._lose(str(error))
            return
        if silence_ns > self._stall_ns:
            self._lose(f"the engine has work and made no progress for {silence_ns / 1e9:.1f} s")

    def _lose(self, cause: str) -> None:
        if self._lost_cause is not None:
            return
        self._lost_cause = cause
        self._unbind()
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(EngineLostError(cause))
        if self._on_lost is not None:
            self._on_lost(cause)

    def _unbind(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
            assert self._loop is not None  # noqa: S101 set with the watch
            self._loop.remove_reader(self._executor.response_fd)


def record_of(record: "runtime.TokenRecord") -> TokenRecord:
    """Returns a token's record in the words of the backend protocol."""
    return TokenRecord(
        record.id,
        record.piece,
        record.logprob,
        record.rank,
        tuple(TokenCandidate(c.id, c.piece, c.logprob) for c in record.candidates),
    )


def load_engine(engine_dir: Path, config: EngineConfig, tokenizer_threads: int) -> Engine:
    """Loads an engine directory; blocks for as long as that takes.

    Args:
        engine_dir: The engine directory.
        config: How the executor runs it.
        tokenizer_threads: Threads for long prompts.

    Raises:
        EngineRefusedError: It cannot be served, in one line.
        EngineConfigError: The configuration cannot work.
    """
    directory = open_directory(engine_dir)
    import runtime

    try:
        tokenizer, template = load_prompt_parts(directory)
    except ValueError as error:
        raise EngineRefusedError(one_line(f"{engine_dir}: {error}")) from error
    executor_config = runtime.ExecutorConfig(
        device=config.device,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_queue_size=config.max_queue_size,
        max_kv_tokens=config.max_kv_tokens or 0,
        default_max_tokens=config.default_max_tokens,
        max_draft_tokens=config.max_draft_tokens,
        max_rounds_in_flight=config.max_rounds_in_flight,
        num_threads=config.num_threads,
        max_image_pixels=config.max_image_pixels,
        encoder_cache_bytes=config.encoder_cache_bytes,
    )
    try:
        executor = runtime.Executor(engine_dir, executor_config)
    except ValueError as error:
        raise EngineConfigError(one_line(str(error))) from error
    except (RuntimeError, MemoryError) as error:  # the runtime's own errors are RuntimeErrors
        raise EngineRefusedError(one_line(f"{engine_dir}: {error}")) from error
    if open_directory(engine_dir, "size").manifest.engine_id != directory.manifest.engine_id:
        # Its files were read one after the other, and may be of two engines.
        raise EngineRefusedError(f"{engine_dir}: the engine was replaced while it was loaded")
    info = describe_engine(directory, executor, config)
    backend = ExecutorBackend(executor, info, config.stall_s)
    instruction = directory.generation.page_instruction
    return Engine(backend, PromptEncoder(tokenizer, template, tokenizer_threads, instruction))


def open_directory(
    engine_dir: Path, verify: Literal["digest", "size"] = "digest"
) -> "EngineDirectory":
    """Opens and verifies an engine directory; loads nothing to a device.

    Args:
        engine_dir: The engine directory.
        verify: "digest" reads and hashes every file, "size" only compares lengths.

    Raises:
        EngineRefusedError: It does not pass its checks, or `runtime` is not built; in one line.
    """
    try:
        from runtime import EngineError
        from runtime.engine_directory import open_engine
    except ImportError as error:
        raise EngineRefusedError(
            one_line(
                f"found no usable runtime ({error}); needed: its native module; "
                "fix: pip install --no-build-isolation -e '.[dev]'"
            )
        ) from error
    try:
        return open_engine(engine_dir, verify)
    except (EngineError, OSError) as error:
        raise EngineRefusedError(one_line(str(error))) from error


def load_prompt_parts(directory: "EngineDirectory") -> tuple[Tokenizer, ChatTemplate | None]:
    """Returns the tokenizer and the chat template of an engine directory, None for no template.

    Raises:
        ValueError: One of them is broken.
    """
    tokenizer = Tokenizer.from_file(directory.tokenizer_path)
    vocab_size = directory.program.config.vocab_size
    if tokenizer.max_token_id >= vocab_size:
        raise ValueError(
            f"tokenizer.json has the token {tokenizer.max_token_id}, the model only {vocab_size}"
        )
    if directory.chat_template is None:
        return tokenizer, None
    template = ChatTemplate(directory.chat_template, tokenizer)
    template.check_ends()
    return tokenizer, template


def describe_engine(
    directory: "EngineDirectory", executor: "Executor", config: EngineConfig
) -> EngineInfo:
    """Returns what is loaded, from the directory's manifest and the executor."""
    engine, report = executor.engine, executor.load()
    model = directory.model_config
    placeholders = (model.get("image_token_id"), model.get("video_token_id"))
    # Two blocks beyond prompt and answer are reserved with them.
    reserve = 2 * (config.max_draft_tokens + 1)
    kv_capacity_tokens = report.pages_total * report.page_size - reserve
    default_max_tokens = min(config.default_max_tokens, engine.context_len - 1)
    room = min(engine.context_len, kv_capacity_tokens) - default_max_tokens - PAGE_TEXT_TOKENS
    largest = largest_picture(engine, room) if engine.has_vision else 0
    return EngineInfo(
        name=engine.model_name,
        engine_id=f"sha256:{engine.engine_id}",
        architecture=engine.architecture,
        precision=precision_of(directory.manifest.precision, directory.manifest.kv_dtype),
        backend=directory.manifest.target_arch,
        context_len=engine.context_len,
        vocab_size=engine.vocab_size,
        end_token_ids=tuple(sorted(engine.end_ids)),
        placeholder_token_ids=frozenset(i for i in placeholders if isinstance(i, int)),
        default_max_tokens=default_max_tokens,
        max_batch_size=config.max_batch_size,
        max_queued=config.max_queue_size,
        kv_capacity_tokens=kv_capacity_tokens,
        max_stop_token_ids=max(0, MAX_END_IDS - len(engine.end_ids)),
        max_logit_biases=MAX_LOGIT_BIASES,
        has_token_records=True,
        max_top_logprobs=min(MAX_TOP_LOGPROBS, engine.vocab_size),
        # The executor's room for drafts is no drafter, and no engine has one yet.
        max_draft_tokens=0,
        has_vision=engine.has_vision,
        min_image_pixels=min(engine.min_image_pixels, largest) if engine.has_vision else 0,
        max_image_pixels=largest,
        image_factor=engine.image_factor if engine.has_vision else 1,
        image_token_id=engine.image_token_id if engine.has_vision else None,
    )


def largest_picture(engine: "NativeEngineInfo", num_tokens: int) -> int:
    """Returns the most pixels that the model reads: what it can, as far as tokens are there for it.

    Args:
        engine: Has the model's own limits.
        num_tokens: Tokens that a picture may take, below 1 where there is no room at all.
    """
    least = max(engine.min_image_pixels, engine.image_factor**2)
    return max(least, min(engine.max_image_pixels, num_tokens * engine.image_factor**2))


def precision_of(precision: Mapping[str, str], kv_dtype: str) -> str:
    """Returns the number formats in short, such as "w:bfloat16+float8 kv:float32".

    Args:
        precision: Format of the weights by group of layers.
        kv_dtype: Format of the KV cache.
    """
    return f"w:{'+'.join(sorted(set(precision.values())))} kv:{kv_dtype}"


def one_line(text: str) -> str:
    """Returns the text with its line breaks and runs of spaces made single spaces."""
    return " ".join(text.split())

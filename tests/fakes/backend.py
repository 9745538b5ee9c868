"""A backend that follows a script, for tests of everything above the backend protocol."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.backend import (
    CapacityExceededError,
    EndCause,
    EngineInfo,
    EngineLostError,
    Finished,
    GenerationRequest,
    GenerationStats,
    IterationStats,
    Load,
    Progress,
    ProgressPhase,
    QueueFullError,
    TokenEvent,
    TokenRecord,
)
from server.mailbox import Mailbox

INFO = EngineInfo(
    name="fake",
    engine_id="sha256:" + "0" * 64,
    architecture="fake",
    precision="w:fake kv:fake",
    backend="fake",
    context_len=4096,
    vocab_size=300,
    end_token_ids=(258,),
    placeholder_token_ids=frozenset({260}),
    default_max_tokens=64,
    max_batch_size=4,
    max_queued=8,
    kv_capacity_tokens=2048,
    max_stop_token_ids=7,
    max_logit_biases=256,
    has_token_records=True,
    max_top_logprobs=20,
)
SEES = replace(
    INFO,
    has_vision=True,
    min_image_pixels=64 * 64,
    max_image_pixels=512 * 512,
    image_token_id=260,
)
PHASES = (
    Progress(ProgressPhase.QUEUED),
    Progress(ProgressPhase.ENCODING, 0.5),
    Progress(ProgressPhase.PREFILL, 0.0),
    Progress(ProgressPhase.DECODING),
)


@dataclass(frozen=True)
class Script:
    """What every request of a backend does; one delta is one token and one step."""

    deltas: tuple[str, ...] = ("Hello", ", ", "wörld", " 🎈", ".")
    step_s: float = 0.0
    final_text: str = ""
    cause: EndCause = EndCause.LENGTH
    end_token_id: int | None = None
    stop_string: str | None = None
    hang_after: int | None = None
    throw_after: int | None = None  # once `FakeBackend.may_throw` is set


class FakeBackend:
    """Runs at most `max_batch_size` scripts at once; the others wait."""

    def __init__(self, script: Script | None = None, info: EngineInfo = INFO) -> None:
        self.script = script or Script()
        self.warmup_script = Script()
        # A loss overtakes what no client has read yet; the test sets this when it has read enough.
        self.may_throw = asyncio.Event()
        self.info = info
        self.requests: list[GenerationRequest] = []
        self.num_cancelled = 0
        self.closed = False
        self.open: dict[int, asyncio.Task[None]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._running: set[int] = set()
        self._last_id = 0
        self._lost: str | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._slots = asyncio.Semaphore(info.max_batch_size)

    def start(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost

    def submit(self, request: GenerationRequest) -> Mailbox:
        if self._lost is not None:
            raise EngineLostError(self._lost)
        needed = len(request.prompt_ids) + request.max_tokens
        if needed > self.info.kv_capacity_tokens:
            raise CapacityExceededError(needed, self.info.kv_capacity_tokens)
        if len(self.open) >= self.info.max_batch_size + self.info.max_queued:
            raise QueueFullError(len(self.open) - len(self._running), self.info.max_queued)
        self.requests.append(request)
        self._last_id += 1
        number = self._last_id
        stop = asyncio.Event()

        def cancel() -> None:
            self.num_cancelled += not stop.is_set()
            stop.set()

        mailbox = Mailbox(cancel)
        self._mailboxes[number] = mailbox
        task = asyncio.ensure_future(self._run(number, request, mailbox, stop))
        self.open[number] = task
        task.add_done_callback(lambda _: self._forget(number))
        return mailbox

    def load(self) -> Load:
        running = len(self._running)
        return Load(
            num_running=running,
            num_queued=len(self.open) - running,
            num_running_tokens=running,
            num_queued_tokens=0,
            slots_used=running,
            slots_total=self.info.max_batch_size,
            pages_used=running,
            pages_total=64,
            silence_ns=0,
            oldest_queued_ns=0,
        )

    def iteration_stats(self) -> list[IterationStats]:
        return []

    def close(self) -> None:
        self.closed = True

    def lose(self, cause: str) -> None:
        """The engine dies."""
        self._lost = cause
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineLostError(cause))
        for task in self.open.values():
            task.cancel()
        if self._on_lost is not None:
            self._on_lost(cause)

    def _forget(self, number: int) -> None:
        self.open.pop(number, None)
        self._mailboxes.pop(number, None)
        self._running.discard(number)

    async def _run(
        self, number: int, request: GenerationRequest, mailbox: Mailbox, stop: asyncio.Event
    ) -> None:
        script = self.warmup_script if request.request_id == "warm-up" else self.script
        stats = GenerationStats(arrival_ns=time.monotonic_ns())
        num_tokens = 0
        if not await self._take_slot(stop):
            mailbox.put(TokenEvent(finished=Finished(EndCause.CANCELLED, 0, stats)))
            return
        try:
            self._running.add(number)
            stats = replace(stats, first_scheduled_ns=time.monotonic_ns())
            for progress in PHASES if request.report_progress else ():
                mailbox.put(TokenEvent(progress=progress))
                await asyncio.sleep(0.001)
                if request.images and progress.phase is ProgressPhase.ENCODING:
                    begin = stats.first_scheduled_ns
                    stats = replace(stats, vision_start_ns=begin, vision_end_ns=begin + 1_000_000)
                    stats = replace(stats, prefill_start_ns=begin + 1_000_000)
            for text in script.deltas[: request.max_tokens]:
                if script.throw_after == num_tokens:
                    await self.may_throw.wait()
                    self.lose("the script threw")
                    return
                if script.hang_after == num_tokens:
                    await stop.wait()
                if await self._pause(script.step_s, stop):
                    mailbox.put(
                        TokenEvent(finished=Finished(EndCause.CANCELLED, num_tokens, stats))
                    )
                    return
                now = time.monotonic_ns()
                stats = replace(
                    stats,
                    first_token_ns=stats.first_token_ns or now,
                    last_token_ns=now,
                    num_steps=num_tokens + 1,
                )
                num_tokens += 1
                record = TokenRecord(num_tokens, text.encode())
                records = (record,) if request.token_records else ()
                mailbox.put(TokenEvent(text, (num_tokens,), records=records))
            finished = Finished(
                script.cause, num_tokens, stats, script.end_token_id, script.stop_string
            )
            mailbox.put(TokenEvent(script.final_text, (), finished))
        finally:
            self._slots.release()

    async def _take_slot(self, stop: asyncio.Event) -> bool:
        take = asyncio.ensure_future(self._slots.acquire())
        wait = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({take, wait}, return_when=asyncio.FIRST_COMPLETED)
            if take.done() and stop.is_set():
                self._slots.release()
            return take.done() and not stop.is_set()
        finally:
            take.cancel()
            wait.cancel()

    async def _pause(self, seconds: float, stop: asyncio.Event) -> bool:
        """Waits a step; True when the request was cancelled."""
        try:
            async with asyncio.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(0)
        return stop.is_set()

"""A stream's events gathered into one value."""

from dataclasses import dataclass, field

from deltaflash_client.errors import DeltaFlashError, ProtocolError
from deltaflash_client.events import (
    Delta,
    DocumentEvent,
    DocumentFinished,
    DocumentStarted,
    Finished,
    FinishReason,
    GenerationEvent,
    PageEvent,
    PageFailed,
    PageInfo,
    RequestStats,
    Started,
    StopMatch,
    TokenRecord,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer.

    Attributes:
        request_id: The request's id.
        model: Name of the model that answered.
        text: The text of all deltas, joined.
        tokens: The records of all deltas, if asked for.
        finish_reason: Why the answer ended.
        stop_match: What ended it, when the reason is STOP.
        usage: Token counts.
        stats: Rounds, drafts and times.
        seed: The seed in use; None when the answer is greedy.
        page_info: Sizes of the page's picture; None outside pages.
    """

    request_id: str
    model: str
    text: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: FinishReason
    stop_match: StopMatch | None
    usage: Usage
    stats: RequestStats
    seed: int | None
    page_info: PageInfo | None


@dataclass(frozen=True, slots=True)
class Page:
    """The answer for one page of a document; `index` counts the document's pages from 0."""

    index: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class FailedPage:
    """A page of a document that was not read, and why; `index` as in Page."""

    index: int
    error: DeltaFlashError


@dataclass(frozen=True, slots=True)
class Document:
    """The answers for the pages of a document.

    Attributes:
        request_id: The document's id.
        pages: Those that were read, by ascending index.
        usage: Token counts, summed over them.
        total_us: From arrival to end, microseconds.
        failed_pages: Those that were not, by ascending index.
        cancelled: `cancel` named the document; pages may be missing.
    """

    request_id: str
    pages: tuple[Page, ...]
    usage: Usage
    total_us: int
    failed_pages: tuple[FailedPage, ...] = ()
    cancelled: bool = False

    def require_all(self) -> tuple[Page, ...]:
        """Returns the pages, when all were read.

        Raises:
            DeltaFlashError: Why the first that failed did.
        """
        for failed in self.failed_pages:
            raise failed.error
        return self.pages


@dataclass(slots=True)
class Transcript:
    """What a stream has said so far."""

    started: Started | None = None
    finished: Finished | None = None
    page_info: PageInfo | None = None
    text_parts: list[str] = field(default_factory=list)
    tokens: list[TokenRecord] = field(default_factory=list)

    def add(self, event: GenerationEvent) -> None:
        """Takes the next event.

        Raises:
            ProtocolError: The event breaks the promised order.
        """
        if self.finished is not None:
            raise ProtocolError(f"an event after Finished: {event}")
        match event:
            case Started():
                if self.started is not None:
                    raise ProtocolError("a second Started event")
                self.started = event
            case Delta():
                if self.started is None:
                    raise ProtocolError("a Delta event before Started")
                self.text_parts.append(event.text)
                self.tokens.extend(event.tokens)
            case PageInfo():
                self.page_info = event
            case Finished():
                if self.started is None:
                    raise ProtocolError("a Finished event before Started")
                self.finished = event

    def completion(self) -> Completion:
        """Returns the whole answer.

        Raises:
            ProtocolError: The stream ended without Finished.
        """
        if self.started is None or self.finished is None:
            raise ProtocolError("the stream ended with status OK and without a Finished event")
        return Completion(
            request_id=self.started.request_id,
            model=self.started.model,
            text="".join(self.text_parts),
            tokens=tuple(self.tokens),
            finish_reason=self.finished.finish_reason,
            stop_match=self.finished.stop_match,
            usage=self.finished.usage,
            stats=self.finished.stats,
            seed=self.started.seed,
            page_info=self.page_info,
        )


@dataclass(slots=True)
class DocumentTranscript:
    """What the stream of a document has said so far."""

    started: DocumentStarted | None = None
    finished: DocumentFinished | None = None
    pages: dict[int, Transcript] = field(default_factory=dict)
    failed: dict[int, DeltaFlashError] = field(default_factory=dict)

    def add(self, event: DocumentEvent) -> None:
        """Takes the next event.

        Raises:
            ProtocolError: The event breaks the promised order.
        """
        if self.finished is not None:
            raise ProtocolError(f"an event after DocumentFinished: {event}")
        match event:
            case DocumentStarted():
                if self.started is not None:
                    raise ProtocolError("a second DocumentStarted event")
                self.started = event
            case PageEvent():
                self._add_to_page(event.page_index, event.event)
            case DocumentFinished():
                self.finished = event

    def _add_to_page(self, index: int, event: GenerationEvent | PageFailed) -> None:
        if index in self.failed:
            raise ProtocolError(f"an event of page {index} after PageFailed: {event}")
        if isinstance(event, PageFailed):
            self.failed[index] = event.error
            self.pages.pop(index, None)
        else:
            self.pages.setdefault(index, Transcript()).add(event)

    def document(self) -> Document:
        """Returns the whole document.

        Raises:
            ProtocolError: The stream ended without DocumentFinished, or a page without Finished.
        """
        if self.started is None or self.finished is None:
            raise ProtocolError("the stream ended with status OK and without DocumentFinished")
        for counted, came in (
            (self.finished.num_pages, len(self.pages)),
            (self.finished.num_failed_pages, len(self.failed)),
        ):
            if counted != came:
                raise ProtocolError(f"DocumentFinished counts {counted} pages, {came} came")
        return Document(
            request_id=self.started.request_id,
            pages=tuple(Page(i, self.pages[i].completion()) for i in sorted(self.pages)),
            usage=self.finished.usage,
            total_us=self.finished.total_us,
            failed_pages=tuple(FailedPage(i, self.failed[i]) for i in sorted(self.failed)),
            cancelled=self.finished.cancelled,
        )

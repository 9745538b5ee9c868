"""Why a picture or a document is refused."""

import enum
from collections.abc import Mapping


class RefusalReason(enum.Enum):
    """What is wrong with a file; the names of `errors.proto` without IMAGE_ or DOCUMENT_ rules."""

    TOO_LARGE = "IMAGE_TOO_LARGE"
    INVALID = "IMAGE_INVALID"
    DOCUMENT_INVALID = "DOCUMENT_INVALID"
    TOO_MANY_PAGES = "TOO_MANY_PAGES"


class ImageRefusedError(Exception):
    """The caller's file is at fault; the message says what was found and what is allowed.

    Attributes:
        reason: What is wrong, for programs; its value is the wire's reason.
        metadata: Facts that the wire's reason promises: `value` and `limit` with TOO_LARGE, `pages`
            and `max_pages` with TOO_MANY_PAGES.
    """

    def __init__(
        self, reason: RefusalReason, message: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Takes the message for people and the facts for programs."""
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})


class DecoderLostError(Exception):
    """A worker process was lost through no fault of the file, twice, or the pool is closed."""

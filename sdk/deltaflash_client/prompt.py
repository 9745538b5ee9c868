"""What an answer continues: text, token ids, or a chat with pictures."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Image:
    """One encoded picture.

    Attributes:
        data: The file as it is: PNG, JPEG, WebP, TIFF, BMP or GIF.
        mime_type: Media type such as "image/png"; when given it has to agree with the bytes.
    """

    data: bytes
    mime_type: str | None = None

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Reads a picture from a file; the server finds its type from the bytes."""
        return cls(Path(path).read_bytes())


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt of token ids, used as they are."""

    ids: Sequence[int]


class ChatRole(enum.StrEnum):
    """Who speaks in a message of a chat."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat: text, or text and pictures in order."""

    role: ChatRole
    content: str | Sequence[str | Image]


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template lays out.

    Attributes:
        messages: The turns in order.
        add_generation_prompt: End with the opening of the model's turn; None is True.
        enable_thinking: Let a model that can do so think first; None is False.
    """

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool | None = None
    enable_thinking: bool | None = None


Prompt = str | TokenIds | Chat
"""A `str` is raw text that no template touches."""

"""Chat to prompt pieces: the engine's Jinja template in a sandbox, user text kept plain."""

import contextlib
import datetime
import json
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.tokenizer import Piece, Tokenizer, spelled_tokens

TRIAL_S = 5.0
"""Time for a template to lay out one short message."""
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    LookupError,
    RecursionError,
    MemoryError,
)


class ChatTemplateError(Exception):
    """The template refuses these messages, or is broken."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.

    Attributes:
        role: system, user or assistant.
        content: Its text; with pictures its parts in order, None for each picture.
    """

    role: str
    content: str | tuple[str | None, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The stretches of text."""
        parts = (self.content,) if isinstance(self.content, str) else self.content
        return tuple(part for part in parts if part is not None)

    @property
    def num_pictures(self) -> int:
        """How many pictures it has."""
        return 0 if isinstance(self.content, str) else self.content.count(None)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which are text here.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


class ChatTemplate:
    """A compiled chat template.

    Spelled control tokens in the messages are exchanged for marks before the template runs, so that
    it trims and tests the text as usual, and given back afterwards as plain pieces. In turns of the
    model only *special* tokens are: templates look for `</think>` there, which is added but not
    special, to drop the thoughts of earlier turns.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compiles a template.

        Raises:
            ValueError: The source is not a Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            autoescape=False,  # a prompt is not HTML
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._any_token = spelled_tokens(tokenizer.added_tokens)
        self._special_token = spelled_tokens(tokenizer.special_tokens)

    def check_ends(self) -> None:
        """Lays out one short message, on a thread that is left behind should it never end.

        Raises:
            ValueError: It did not end in time; whether it refused the message is not looked at.
        """

        def render() -> None:
            with contextlib.suppress(ChatTemplateError):
                self.render([Turn("user", "a")], add_generation_prompt=True, enable_thinking=False)

        trial = threading.Thread(target=render, name="template-trial", daemon=True)
        trial.start()
        trial.join(TRIAL_S)
        if trial.is_alive():
            raise ValueError(f"the chat template did not end within {TRIAL_S:g} s")

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool, enable_thinking: bool
    ) -> list[Piece]:
        """Lays out a chat.

        Args:
            turns: The messages in order.
            add_generation_prompt: End with the opening of the model's turn.
            enable_thinking: Let a model that can do so think first.

        Returns:
            The prompt; spelled control tokens of the messages are plain pieces.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        marks: dict[str, str] = {}
        # Letters only, and a nonce: no message can hold a mark, no filter changes one.
        nonce = secrets.token_hex(8).translate(str.maketrans("0123456789", "ghijklmnop"))

        def mark(match: re.Match[str]) -> str:
            name = f"{nonce}z{_letters(len(marks))}z"
            marks[name] = match.group()
            return name

        messages: list[dict[str, Any]] = []
        for turn in turns:
            pattern = self._special_token if turn.role == "assistant" else self._any_token

            def plain(text: str, pattern: re.Pattern[str] | None = pattern) -> str:
                return pattern.sub(mark, text) if pattern else text

            content = turn.content
            messages.append(
                {
                    "role": turn.role,
                    "content": plain(content)
                    if isinstance(content, str)
                    else [
                        {"type": "image"} if part is None else {"type": "text", "text": plain(part)}
                        for part in content
                    ],
                }
            )
        try:
            prompt = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                tools=None,
            )
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error
        if not marks:
            return [Piece(prompt)]
        parts = re.split(f"({nonce}z[a-j]+z)", prompt)
        return [Piece(marks.get(part, part), plain=part in marks) for part in parts if part]


def _letters(number: int) -> str:
    """Spells a number in letters."""
    return str(number).translate(str.maketrans("0123456789", "abcdefghij"))

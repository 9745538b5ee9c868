"""Prompts of requests to token ids."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltaflash.v1 import inference_pb2
from server.backend import EngineInfo
from server.chat_template import ChatTemplate, ChatTemplateError, Turn
from server.errors import (
    FeatureUnimplementedError,
    InvalidFieldError,
    PromptTooLongError,
    Violation,
)
from server.tokenizer import ControlTokenError, Piece, Tokenizer
from server.validation import check_prompt_ids

LONG_TEXT_CHARS = 2048
"""Text from this length on goes to a thread: it is about a millisecond of work."""
PAGE_INSTRUCTION = "Convert this page to Markdown, in reading order."
"""What a model is told to do with a page when its engine directory says nothing."""

ROLES = {
    inference_pb2.CHAT_ROLE_SYSTEM: "system",
    inference_pb2.CHAT_ROLE_USER: "user",
    inference_pb2.CHAT_ROLE_ASSISTANT: "assistant",
}


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """A chat to be laid out; `path` is its field in the request."""

    turns: Sequence[Turn]
    path: str
    opening: bool = True
    thinking: bool = False


class PromptEncoder:
    """Makes token ids of prompts whose form was checked."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        num_threads: int,
        page_instruction: str | None = None,
    ) -> None:
        """Takes the parts.

        Args:
            tokenizer: The engine's tokenizer; None serves only token ids.
            template: The engine's chat template; None serves no chat.
            num_threads: Threads for long prompts.
            page_instruction: What the model is told to do with a page; "" for the picture alone,
                None for PAGE_INSTRUCTION.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.page_instruction = PAGE_INSTRUCTION if page_instruction is None else page_instruction
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def encode(
        self, request: inference_pb2.GenerateRequest, info: EngineInfo
    ) -> tuple[int, ...]:
        """Returns the prompt's token ids, at least one and within the context.

        Raw text may spell special tokens; the text of a chat may not: there they are plain text.
        Each picture of a chat is one placeholder; see `expand_placeholders`.

        Raises:
            EmptyPromptError: The prompt has no token.
            PromptTooLongError: It leaves no room in the context.
            InvalidFieldError: The template refuses the chat, or a placeholder is in the prompt.
            FeatureUnimplementedError: The engine has no tokenizer or template.
        """
        if request.WhichOneof("prompt") == "chat":
            chat = request.chat
            opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            return await self._encode_chat(
                _ChatPrompt(turns_of(chat), "chat", opening, chat.enable_thinking), info
            )
        if request.WhichOneof("prompt") == "token_ids":
            prompt_ids = tuple(request.token_ids.ids)
            check_prompt_ids(prompt_ids, info, "token_ids")
            return prompt_ids
        text = request.text

        def encode_text(tokenizer: Tokenizer) -> tuple[int, ...]:
            return tokenizer.encode([Piece(text)])

        prompt_ids = await self._encode([text], encode_text, info, "text")
        check_prompt_ids(prompt_ids, info, "text")
        return prompt_ids

    async def encode_page(self, instruction: str, info: EngineInfo) -> tuple[int, ...]:
        """Returns the prompt for a page, its picture as one placeholder; raises as `encode`."""
        turn = Turn("user", (None, instruction) if instruction else (None,))
        return await self._encode_chat(_ChatPrompt([turn], "options.instruction"), info)

    def close(self) -> None:
        """Ends the threads; what they work on is finished unseen."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _encode_chat(self, chat: _ChatPrompt, info: EngineInfo) -> tuple[int, ...]:
        template = self.template
        if template is None:
            raise FeatureUnimplementedError(chat.path)

        def encode(tokenizer: Tokenizer) -> tuple[int, ...]:
            return tokenizer.encode(
                template.render(
                    chat.turns,
                    add_generation_prompt=chat.opening,
                    enable_thinking=chat.thinking,
                )
            )

        texts = [text for turn in chat.turns for text in turn.texts]
        prompt_ids = await self._encode(texts, encode, info, chat.path)
        num_pictures = sum(turn.num_pictures for turn in chat.turns)
        check_prompt_ids(prompt_ids, info, chat.path, num_pictures)
        return prompt_ids

    async def _encode(
        self,
        texts: Sequence[str],
        encode: Callable[[Tokenizer], tuple[int, ...]],
        info: EngineInfo,
        path: str,
    ) -> tuple[int, ...]:
        """Runs `encode`, on a thread when the texts are long."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise FeatureUnimplementedError(path)
        least = sum(tokenizer.min_tokens(text) for text in texts)
        if least > info.context_len - 1:
            raise PromptTooLongError(least, info.context_len - 1)
        try:
            if sum(map(len, texts)) < LONG_TEXT_CHARS:
                return encode(tokenizer)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, encode, tokenizer)
        except (ChatTemplateError, ControlTokenError) as error:
            raise InvalidFieldError([Violation(path, str(error))]) from error


def turns_of(chat: inference_pb2.Chat) -> list[Turn]:
    """Returns the messages of a checked chat; the parts of one without pictures are joined."""
    turns = []
    for message in chat.messages:
        content: str | tuple[str | None, ...]
        if any(part.HasField("image") for part in message.content):
            content = tuple(
                None if part.HasField("image") else part.text for part in message.content
            )
        else:
            content = "".join(part.text for part in message.content)
        turns.append(Turn(ROLES[message.role], content))
    return turns


def expand_placeholders(
    prompt_ids: tuple[int, ...], counts: Sequence[int], info: EngineInfo
) -> tuple[int, ...]:
    """Returns a prompt with as many placeholders for each picture as it has tokens.

    Args:
        prompt_ids: What `PromptEncoder` returned, one placeholder a picture.
        counts: Tokens of the pictures in order.
        info: What is loaded.

    Raises:
        PromptTooLongError: It leaves no room in the context.
    """
    if not counts:
        return prompt_ids
    num_tokens = len(prompt_ids) + sum(counts) - len(counts)
    if num_tokens > info.context_len - 1:
        raise PromptTooLongError(num_tokens, info.context_len - 1)
    remaining = iter(counts)
    ids: list[int] = []
    for token_id in prompt_ids:
        ids.extend([token_id] * (next(remaining) if token_id == info.image_token_id else 1))
    return tuple(ids)

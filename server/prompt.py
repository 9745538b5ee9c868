"""Prompts of requests to token ids."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

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

ROLES = {
    inference_pb2.CHAT_ROLE_SYSTEM: "system",
    inference_pb2.CHAT_ROLE_USER: "user",
    inference_pb2.CHAT_ROLE_ASSISTANT: "assistant",
}


class PromptEncoder:
    """Makes token ids of prompts whose form was checked."""

    def __init__(
        self, tokenizer: Tokenizer | None, template: ChatTemplate | None, num_threads: int
    ) -> None:
        """Takes the parts.

        Args:
            tokenizer: The engine's tokenizer; None serves only token ids.
            template: The engine's chat template; None serves no chat.
            num_threads: Threads for long prompts.
        """
        self.tokenizer = tokenizer
        self.template = template
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def encode(
        self, request: inference_pb2.GenerateRequest, info: EngineInfo
    ) -> tuple[int, ...]:
        """Returns the prompt's token ids, at least one and within the context.

        Raw text may spell special tokens; the text of a chat may not: there they are plain text.

        Raises:
            EmptyPromptError: The prompt has no token.
            PromptTooLongError: It leaves no room in the context.
            InvalidFieldError: The template refuses the chat, or a placeholder is in the prompt.
            FeatureUnimplementedError: The engine has no tokenizer or template.
        """
        path = request.WhichOneof("prompt") or "prompt"
        if path == "token_ids":
            prompt_ids = tuple(request.token_ids.ids)
        else:
            if self.tokenizer is None or (path == "chat" and self.template is None):
                raise FeatureUnimplementedError(path)
            turns = [] if path == "text" else turns_of(request.chat)
            texts = [request.text] if path == "text" else [turn.text for turn in turns]
            least = sum(self.tokenizer.min_tokens(text) for text in texts)
            if least > info.context_len - 1:
                raise PromptTooLongError(least, info.context_len - 1)
            if sum(map(len, texts)) < LONG_TEXT_CHARS:
                prompt_ids = self._tokenise(request, turns)
            else:
                loop = asyncio.get_running_loop()
                prompt_ids = await loop.run_in_executor(self._pool, self._tokenise, request, turns)
        check_prompt_ids(prompt_ids, info, path)
        return prompt_ids

    def close(self) -> None:
        """Ends the threads; what they work on is finished unseen."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _tokenise(
        self, request: inference_pb2.GenerateRequest, turns: list[Turn]
    ) -> tuple[int, ...]:
        assert self.tokenizer is not None  # noqa: S101 checked by the caller
        try:
            if not turns:
                return self.tokenizer.encode([Piece(request.text)])
            assert self.template is not None  # noqa: S101 checked by the caller
            chat = request.chat
            opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            pieces = self.template.render(
                turns, add_generation_prompt=opening, enable_thinking=chat.enable_thinking
            )
            return self.tokenizer.encode(pieces)
        except (ChatTemplateError, ControlTokenError) as error:
            path = request.WhichOneof("prompt") or "prompt"
            raise InvalidFieldError([Violation(path, str(error))]) from error


def turns_of(chat: inference_pb2.Chat) -> list[Turn]:
    """Returns the messages of a checked chat without pictures; the parts of each are joined."""
    return [
        Turn(ROLES[message.role], "".join(part.text for part in message.content))
        for message in chat.messages
    ]

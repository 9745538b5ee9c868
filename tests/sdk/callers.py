"""One answer asked for through each of the two clients, for tests that hold for both."""

import asyncio
from collections.abc import Callable

import pytest

from deltaflash_client import AsyncClient, Client, ClientConfig, Completion, Prompt

Ask = Callable[..., Completion]


def ask_blocking(
    target: str, prompt: Prompt = "hi", config: ClientConfig | None = None, **options: object
) -> Completion:
    with Client(target, config) as client:
        return client.generate_text(prompt, **options)


def ask_asyncio(
    target: str, prompt: Prompt = "hi", config: ClientConfig | None = None, **options: object
) -> Completion:
    async def ask() -> Completion:
        async with AsyncClient(target, config) as client:
            return await client.generate_text(prompt, **options)

    return asyncio.run(ask())


both_clients = pytest.mark.parametrize(
    "ask", [pytest.param(ask_blocking, id="blocking"), pytest.param(ask_asyncio, id="asyncio")]
)

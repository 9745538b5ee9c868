"""A server on loopback for one command: a local engine is asked the way a remote one is."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from server.app import Application, ExitCode
from server.backend import EngineConfigError, EngineRefusedError
from server.commands.serve import run_loop
from server.config import ServerConfig
from server.images import DecoderLostError
from server.logs import configure_logging
from server.service_context import Engine

Ask = Callable[[str], Coroutine[Any, Any, ExitCode]]
"""Asks the server of an address, and returns how the command ends."""


def ask_locally(ask: Ask, load: Callable[[], Engine], config: ServerConfig) -> ExitCode:
    """Loads an engine for one command.

    Args:
        ask: What the command does.
        load: Loads the engine.
        config: The server's; its address is chosen here.
    """
    configure_logging("ERROR")
    try:
        return run_loop(partial(_serve_and_ask, ask, load, config))
    except EngineRefusedError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.ENGINE_REFUSED
    except EngineConfigError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.USAGE
    except DecoderLostError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.FAILED


async def _serve_and_ask(ask: Ask, load: Callable[[], Engine], config: ServerConfig) -> ExitCode:
    app = Application(config, load)
    server = asyncio.ensure_future(app.run())
    ready = asyncio.ensure_future(app.serving.wait())
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        ready.cancel()
        return server.result()
    code = await ask(app.address)
    app.request_stop()
    server_code = await server
    return server_code if server_code is not ExitCode.OK else code

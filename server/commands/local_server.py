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

    Raises:
        KeyboardInterrupt: SIGINT came; the server has ended.
    """
    configure_logging("ERROR")
    app = Application(config, load)
    try:
        code = run_loop(partial(_serve_and_ask, ask, app))
    except EngineRefusedError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.ENGINE_REFUSED
    except EngineConfigError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.USAGE
    except DecoderLostError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.FAILED
    if app.interrupted:
        raise KeyboardInterrupt
    return code


async def _serve_and_ask(ask: Ask, app: Application) -> ExitCode:
    server = asyncio.ensure_future(app.run())
    ready = asyncio.ensure_future(app.serving.wait())
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        ready.cancel()
        return server.result()
    asking = asyncio.ensure_future(ask(app.address))
    stopping = asyncio.ensure_future(app.stopping())
    # A signal ends the asking first: what the server says to its last caller would be about itself.
    await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    asking.cancel()
    (answer,) = await asyncio.gather(asking, return_exceptions=True)
    app.request_stop()
    server_code = await server
    if isinstance(answer, asyncio.CancelledError):
        return ExitCode.FAILED
    if isinstance(answer, BaseException):
        raise answer
    return server_code if server_code is not ExitCode.OK else answer

"""`deltaflash serve`: one engine directory behind gRPC until a signal or the engine's loss."""

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from server.app import Application, BindError, ExitCode
from server.backend import EngineConfigError, EngineRefusedError
from server.backends.executor import load_engine, open_directory
from server.config import EngineConfig, ServerConfig
from server.logs import configure_logging
from server.service_context import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")


def serve(engine_dir: Path, engine_config: EngineConfig, config: ServerConfig) -> NoReturn:
    """Serves an engine directory and ends the process with an `ExitCode`."""
    try:
        # What is wrong at first sight is said before the port is taken; loading hashes the files.
        open_directory(engine_dir, "size")
    except EngineRefusedError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        leave(ExitCode.ENGINE_REFUSED)
    load = partial(load_engine, engine_dir, engine_config, config.tokenizer_threads)
    serve_engine(load, config)


def serve_engine(load: Callable[[], Engine], config: ServerConfig) -> NoReturn:
    """Serves what `load` loads and ends the process with an `ExitCode`."""
    configure_logging(config.log_level)
    try:
        code = run_loop(Application(config, load).run)
    except EngineRefusedError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        code = ExitCode.ENGINE_REFUSED
    except EngineConfigError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        code = ExitCode.USAGE
    except BindError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        code = ExitCode.BIND_FAILED
    except Exception:
        log.exception("the server failed")
        code = ExitCode.FAILED
    leave(code)


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine on a new event loop: uvloop's where it can be imported."""
    try:
        new_loop = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        new_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())


def leave(code: int) -> NoReturn:
    """Ends the process at once, also when an engine thread or a tokenizer hangs in native code."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

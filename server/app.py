"""One server process: binds, loads, warms up, serves, drains, ends with an exit code."""

import asyncio
import enum
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltaflash.v1 import (
    control_pb2,
    control_pb2_grpc,
    documents_pb2,
    documents_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from server.backend import EngineLostError, GenerationRequest
from server.config import MIB, ServerConfig
from server.errors import DrainingError, InvalidFieldError
from server.images import DecodePool
from server.lifecycle import Lifecycle, Phase
from server.service_context import Engine, ServiceContext
from server.services.control import ControlServicer
from server.services.documents import DocumentsServicer
from server.services.inference import InferenceServicer
from server.undecodable import UndecodableGuard

log = logging.getLogger(__name__)

T = TypeVar("T")

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
DOCUMENTS = documents_pb2.DESCRIPTOR.services_by_name["DocumentsService"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

STATUS_FLUSH_S = 0.5
"""Time for the last statuses to leave after the last request; health watchers outlast it."""
LOST_FLUSH_S = 5.0
"""Time for the streams of a lost engine to end."""
CLOSE_S = 3.0
"""Time for the engine to close; one that hangs is left behind."""


class ExitCode(enum.IntEnum):
    """How the process ended; a supervisor restarts on ENGINE_LOST."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ENGINE_REFUSED = 3
    BIND_FAILED = 4
    ENGINE_LOST = 5
    PAGES_FAILED = 6
    BAD_INPUT = 7
    UNREACHABLE = 8


class BindError(Exception):
    """The address cannot be listened on."""


class Application:
    """A server from bind to exit.

    The port is bound before the engine is loaded, so that a second server fails before it takes
    the device, and so that health can be asked for while the engine is loading.
    """

    def __init__(self, config: ServerConfig, load_engine: Callable[[], Engine]) -> None:
        """Makes a server; `run` gives it life.

        Args:
            config: How it is configured.
            load_engine: Loads the engine; called once, on a thread of its own.
        """
        self._config = config
        self._load_engine = load_engine
        self._stop = asyncio.Event()
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.serving = asyncio.Event()
        self.interrupted = False  # by SIGINT
        self.port = 0
        self.context = ServiceContext(
            config, Lifecycle([INFERENCE, CONTROL, DOCUMENTS], config.retry_delay_ms)
        )

    async def stopping(self) -> None:
        """Waits until a signal or `request_stop` asks for the end."""
        await self._stop.wait()

    def request_stop(self) -> None:
        """Asks for drain and exit, as SIGTERM does."""
        self._stop.set()

    async def run(self) -> ExitCode:
        """Lives until a signal, a stop request or the loss of the engine.

        Returns:
            How the process should end.

        Raises:
            BindError: The address cannot be listened on; nothing was loaded.
            EngineRefusedError: The engine directory cannot be served.
            EngineConfigError: The engine does not take its configuration.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        grpc_server = make_server(self.context)
        try:
            self.port = bind(grpc_server, self._config.host, self._config.port)
            self._remove_ready_file()  # of a server that was killed
            await self.context.lifecycle.publish()
            await grpc_server.start()
            log.info("listening", extra={"address": self.address})
            return await self._live()
        finally:
            await grpc_server.stop(STATUS_FLUSH_S)
            await self._close_engine()
            if self.port:
                self._remove_ready_file()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @property
    def address(self) -> str:
        """The address that is listened on, host:port."""
        return join_address(self._config.host, self.port)

    async def _live(self) -> ExitCode:
        engine = await self._until_stop(in_thread("load-engine", self._load_engine))
        if engine is None:
            log.info("stopped while the engine was loading")
            return ExitCode.OK
        self.context.engine = engine
        engine.backend.start(self._on_lost)
        try:
            warm = await self._until_stop(self._warm_up(engine))
            if warm and await lays_out_pages(engine):
                warm = await self._until_stop(self._start_pool())
        except EngineLostError:
            log.exception("the engine failed its warm-up")
            await self.context.lifecycle.advance(Phase.LOST, "the engine failed its warm-up")
            return ExitCode.ENGINE_LOST
        if warm is None:
            log.info("stopped during the warm-up")
            return ExitCode.OK
        if not self._lost.is_set():
            await self.context.lifecycle.advance(Phase.SERVING)
            self._announce(engine)
            await first_of(self._stop.wait(), self._lost.wait())
        if self._lost.is_set():
            return await self._end_lost()
        return await self._drain()

    async def _warm_up(self, engine: Engine) -> bool:
        """Generates once through the backend.

        Raises:
            EngineLostError: Nothing came within the limit.
        """
        info = engine.backend.info
        token_id = next(i for i in range(info.vocab_size) if i not in info.placeholder_token_ids)
        request = GenerationRequest(
            request_id="warm-up",
            prompt_ids=(token_id,),
            max_tokens=min(4, info.context_len - 1),
            ignore_end_tokens=True,
        )
        generation = engine.backend.submit(request)
        limit_s = self._config.warmup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while (await generation.next_event()).finished is None:
                    pass
        except TimeoutError as error:
            raise EngineLostError(f"the warm-up did not end within {limit_s:g} s") from error
        finally:
            generation.close()
        return True

    async def _start_pool(self) -> bool:
        """Starts the processes that decode pictures.

        Raises:
            DecoderLostError: They do not start.
        """
        pool = DecodePool(self._config.images, self._config.decode_workers)
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        self.context.pool = pool
        return True

    def _announce(self, engine: Engine) -> None:
        info = engine.backend.info
        if self._config.ready_file is not None:
            ready = {"address": self.address, "port": self.port, "pid": os.getpid()}
            write_whole(self._config.ready_file, json.dumps(ready) + "\n")
        log.info(
            "serving",
            extra={
                "address": self.address,
                "port": self.port,
                "model": info.name,
                "engine_id": info.engine_id,
                "context_length": info.context_len,
                "max_batch_size": info.max_batch_size,
                "max_queued": info.max_queued,
                "kv_capacity_tokens": info.kv_capacity_tokens,
                "reads_pictures": self.context.reads_pictures,
            },
        )
        self.serving.set()

    def _remove_ready_file(self) -> None:
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)

    async def _drain(self) -> ExitCode:
        await self.context.lifecycle.advance(Phase.DRAINING)
        live = self.context.live
        log.info("draining", extra={"live": len(live), "grace_s": self._config.grace_s})
        await first_of(live.wait_idle(self._config.grace_s), self._lost.wait())
        if self._lost.is_set():
            return await self._end_lost()
        if len(live):
            log.warning("grace is over, ending what still runs", extra={"live": len(live)})
            live.cancel_all(
                DrainingError("the server ends; its grace for running requests is over")
            )
            await live.wait_idle(CLOSE_S)
        log.info("drained")
        return ExitCode.OK

    async def _end_lost(self) -> ExitCode:
        if not await self.context.live.wait_idle(LOST_FLUSH_S):
            log.error("streams did not end", extra={"live": len(self.context.live)})
        return ExitCode.ENGINE_LOST

    async def _close_engine(self) -> None:
        pool, self.context.pool = self.context.pool, None
        if pool is not None:
            await pool.close()
        engine, self.context.engine = self.context.engine, None
        if engine is None:
            return
        engine.prompts.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await in_thread("close-engine", engine.backend.close)
        except TimeoutError:
            log.error("the engine did not close and is left behind", extra={"limit_s": CLOSE_S})  # noqa: TRY400
        except Exception:
            log.exception("the engine failed to close")

    async def _until_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for the result of `work`; None when a stop came first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("second signal, ending at once", extra={"signal": name})
            logging.shutdown()
            os._exit(128 + number)
        log.info("signal", extra={"signal": name})
        self.interrupted = number == signal.SIGINT
        self._stop.set()

    def _on_lost(self, cause: str) -> None:
        log.error("engine lost", extra={"cause": cause})
        self._lost.set()
        task = asyncio.ensure_future(self.context.lifecycle.advance(Phase.LOST, cause))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def lays_out_pages(engine: Engine) -> bool:
    """Whether the engine sees and its chat template has a place for pictures."""
    info = engine.backend.info
    if not info.has_vision or engine.prompts.tokenizer is None or engine.prompts.template is None:
        return False
    try:
        await engine.prompts.encode_page("a", info)
    except InvalidFieldError as error:
        log.warning("the chat template has no place for pictures", extra={"cause": str(error)})
        return False
    return True


def make_server(context: ServiceContext) -> grpc.aio.Server:
    """Returns a server with every service registered and no port."""
    grpc_server = grpc.aio.server(
        interceptors=[UndecodableGuard()], options=server_options(context.config)
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(context), grpc_server
    )
    documents_pb2_grpc.add_DocumentsServiceServicer_to_server(
        DocumentsServicer(context), grpc_server
    )
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(context), grpc_server)
    health_pb2_grpc.add_HealthServicer_to_server(context.lifecycle.health, grpc_server)
    names = (INFERENCE, DOCUMENTS, CONTROL, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, grpc_server)
    return grpc_server


def server_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Returns gRPC's options.

    A request a little over the limit is let in, so that its refusal has details; and pings a little
    faster than documented are let be, for timers are not exact.
    """
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes + MIB),
        ("grpc.max_send_message_length", config.max_message_bytes + MIB),
        # A second server on the port fails instead of sharing it.
        ("grpc.so_reuseport", 0),
        # The key with "recv_" in it, which is found in the wild, does nothing.
        ("grpc.http2.min_ping_interval_without_data_ms", config.min_keepalive_ms * 9 // 10),
        ("grpc.keepalive_permit_without_calls", 1),
        # Finds callers that vanished without closing their connection.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def bind(grpc_server: grpc.aio.Server, host: str, port: int) -> int:
    """Binds the port and returns it, which matters when it was 0.

    Raises:
        BindError: The address is in use or not this machine's.
    """
    address = join_address(host, port)
    try:
        bound = grpc_server.add_insecure_port(address)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: in use, or not an own address") from error
    if bound == 0:
        raise BindError(f"cannot listen on {address}")
    return bound


def join_address(host: str, port: int) -> str:
    """Returns host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader finds all of it or none."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits for the first of several and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def in_thread(name: str, work: Callable[[], T]) -> T:
    """Runs blocking work on a daemon thread of its own, which a cancelled wait leaves behind.

    The loop's own pool would not do: its threads hold up the exit of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 handed to the waiter
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            log.debug("nobody waits any more", extra={"work": name})

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future

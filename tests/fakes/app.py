"""A whole server over a fake backend, on a real socket, in the test's own event loop."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from fakes.backend import FakeBackend
from fakes.tokenizer import TEMPLATE, tokenizer_json
from google.rpc import error_details_pb2, status_pb2

from deltaflash.v1 import (
    control_pb2_grpc,
    documents_pb2_grpc,
    generation_pb2,
    inference_pb2,
    inference_pb2_grpc,
)
from server.app import Application, ExitCode
from server.chat_template import ChatTemplate
from server.config import ServerConfig
from server.prompt import PromptEncoder
from server.service_context import Engine
from server.tokenizer import Tokenizer

Generate = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def fake_engine(backend: FakeBackend) -> Engine:
    tokenizer = Tokenizer(tokenizer_json())
    return Engine(backend, PromptEncoder(tokenizer, ChatTemplate(TEMPLATE, tokenizer), 2))


class Served:
    """A running server and a channel to it."""

    def __init__(self, app: Application, backend: FakeBackend) -> None:
        self.app = app
        self.backend = backend
        self.running: asyncio.Task[ExitCode] = asyncio.ensure_future(app.run())
        self.channel: grpc.aio.Channel

    async def connect(self, **options: int) -> None:
        arguments = [(name.replace("__", "."), value) for name, value in options.items()]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.app.port}", arguments)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        self.documents = documents_pb2_grpc.DocumentsServiceStub(self.channel)

    def generate(
        self, request: inference_pb2.GenerateRequest | None = None, **options: object
    ) -> Generate:
        return self.inference.Generate(request or ask(), **options)

    async def collect(
        self, request: inference_pb2.GenerateRequest | None = None
    ) -> tuple[list[str], generation_pb2.Finished]:
        """The texts of all deltas, and the Finished event."""
        events = [event async for event in self.generate(request)]
        assert [e.WhichOneof("event") for e in events].count("started") == 1
        assert events[-1].WhichOneof("event") == "finished"
        texts = [e.delta.text for e in events if e.WhichOneof("event") == "delta"]
        return texts, events[-1].finished

    async def until_idle(self, limit_s: float = 1.0) -> None:
        """Waits until the tables of server and backend are empty."""
        async with asyncio.timeout(limit_s):
            while len(self.app.context.live) or self.backend.open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    backend: FakeBackend | None = None,
    *,
    load: Callable[[], Engine] | None = None,
    **config: object,
) -> AsyncIterator[Served]:
    """Serves from load to drain."""
    backend = backend or FakeBackend()
    config = {"port": 0, "grace_s": 5.0, **config}
    app = Application(ServerConfig(**config), load or (lambda: fake_engine(backend)))
    served = Served(app, backend)
    ready = asyncio.ensure_future(app.serving.wait())
    try:
        if load is None:
            await asyncio.wait({served.running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if served.running.done():
                served.running.result()
            backend.requests.clear()
        else:
            while app.port == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await served.connect()
        yield served
    finally:
        ready.cancel()
        app.request_stop()
        await served.channel.close()
        await served.running


def ask(text: str = "hi", **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


async def error_of(call: object) -> grpc.aio.AioRpcError:
    """The error of a call that has to fail."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        elif isinstance(call, Awaitable):
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call did not fail")


class Details:
    """The google.rpc details of an error."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.reason = ""
        self.domain = ""
        self.metadata: dict[str, str] = {}
        self.fields: list[str] = []
        self.descriptions: list[str] = []
        self.retry_ms: int | None = None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                self._read(status_pb2.Status.FromString(value))

    def _read(self, status: status_pb2.Status) -> None:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(info):
                self.reason, self.domain = info.reason, info.domain
                self.metadata = dict(info.metadata)
            elif detail.Unpack(bad):
                self.fields = [v.field for v in bad.field_violations]
                self.descriptions = [v.description for v in bad.field_violations]
            elif detail.Unpack(retry):
                self.retry_ms = retry.retry_delay.ToMilliseconds()


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run

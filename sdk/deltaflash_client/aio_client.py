"""The asyncio client."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from deltaflash.v1 import (
    control_pb2,
    control_pb2_grpc,
    documents_pb2_grpc,
    inference_pb2_grpc,
)
from deltaflash_client import _decode, _encode
from deltaflash_client.aio_stream import (
    AsyncCall,
    AsyncDocumentStream,
    AsyncGenerationStream,
    error_from_aio_rpc,
)
from deltaflash_client.completion import Completion
from deltaflash_client.config import (
    ClientConfig,
    call_metadata,
    channel_arguments,
    channel_credentials,
    check_size,
)
from deltaflash_client.errors import DeadlineExceededError, UnavailableError
from deltaflash_client.options import (
    CallOptions,
    DocumentOptions,
    GenerateOptions,
    PageOptions,
    Pdf,
)
from deltaflash_client.prompt import Image, Prompt
from deltaflash_client.retry import Attempts, RetryPolicy
from deltaflash_client.server_info import CancelStatus, DrainState, LoadInfo, ModelInfo, ServerInfo

RequestT_contra = TypeVar("RequestT_contra", bound=Message, contravariant=True)
RequestT = TypeVar("RequestT", bound=Message)
ResponseT_co = TypeVar("ResponseT_co", covariant=True)
ResponseT = TypeVar("ResponseT")

NO_RETRY = RetryPolicy(max_attempts=1)
READY_POLL_S = 0.1


class AsyncUnaryMethod(Protocol[RequestT_contra, ResponseT_co]):
    """A unary method of a gRPC stub."""

    def __call__(
        self,
        request: RequestT_contra,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str | bytes], ...] | None = None,
        wait_for_ready: bool | None = None,
    ) -> Awaitable[ResponseT_co]:
        """Sends the request."""


class AsyncStreamMethod(Protocol[RequestT_contra, ResponseT_co]):
    """A server-streaming method of a gRPC stub."""

    def __call__(
        self,
        request: RequestT_contra,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str | bytes], ...] | None = None,
        wait_for_ready: bool | None = None,
    ) -> AsyncCall[ResponseT_co]:
        """Sends the request."""


class AsyncClient:
    """An asyncio client, for one event loop. Every call may raise DeltaFlashError."""

    def __init__(self, target: str, config: ClientConfig | None = None) -> None:
        """Makes the channel, inside the running loop; it connects with the first call.

        Args:
            target: gRPC target, such as "localhost:50051" or "dns:///inference.example:443".
            config: Settings; None takes the defaults: no TLS.
        """
        asyncio.get_running_loop()  # a channel belongs to a loop: refuse to be made without one
        self._config = config or ClientConfig()
        self._metadata = call_metadata(self._config)
        arguments = channel_arguments(self._config)
        if self._config.tls is None:
            self._channel = grpc.aio.insecure_channel(target, arguments)
        else:
            credentials = channel_credentials(self._config.tls)
            self._channel = grpc.aio.secure_channel(target, credentials, arguments)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._documents = documents_pb2_grpc.DocumentsServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._check_health = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def close(self) -> None:
        """Closes the channel; calls that are open end with RequestCancelledError."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """Returns itself; the end of the block closes it."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the client."""
        await self.close()

    def _attempts(self, timeout_s: float | None, policy: RetryPolicy) -> Attempts:
        return Attempts(policy, self._config.timeout_s if timeout_s is None else timeout_s)

    def _stream(
        self, method: AsyncStreamMethod[RequestT, ResponseT], request: RequestT
    ) -> Callable[[float | None], AsyncCall[ResponseT]]:
        """Returns what sends the request once."""
        check_size(request, self._config)
        metadata, wait_for_ready = self._metadata, self._config.wait_for_ready

        def start(remaining_s: float | None) -> AsyncCall[ResponseT]:
            return method(
                request, timeout=remaining_s, metadata=metadata, wait_for_ready=wait_for_ready
            )

        return start

    async def _unary(
        self,
        method: AsyncUnaryMethod[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None,
        policy: RetryPolicy | None = None,
    ) -> ResponseT:
        attempts = self._attempts(timeout_s, policy or self._config.retry)
        while True:
            try:
                return await method(
                    request,
                    timeout=attempts.remaining_s(),
                    metadata=self._metadata,
                    wait_for_ready=self._config.wait_for_ready,
                )
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_aio_rpc(rpc_error)
            delay_s = attempts.delay_before_next_s(error)
            if delay_s is None:
                raise error
            await asyncio.sleep(delay_s)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Sends a prompt and returns the stream of its answer.

        Args:
            prompt: Raw text, token ids or a chat.
            **options: See GenerateOptions and CallOptions.

        Raises:
            ResourceExhaustedError: The request is over max_message_bytes; it was not sent.
            ValueError: A number does not fit its field.
        """
        request = _encode.generate_request(prompt, options)
        attempts = self._attempts(options.get("timeout_s"), self._config.retry)
        return AsyncGenerationStream(self._stream(self._inference.Generate, request), attempts)

    async def generate_text(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Sends a prompt and returns its whole answer; arguments and errors as in generate."""
        return await self.generate(prompt, **options).collect()

    def parse_page(
        self, image: Image, page: PageOptions | None = None, **options: Unpack[CallOptions]
    ) -> AsyncGenerationStream:
        """Sends the picture of a page and returns the stream of its text.

        Args:
            image: The picture.
            page: How it is read.
            **options: See CallOptions.

        Raises:
            ResourceExhaustedError: The request is over max_message_bytes; it was not sent.
            ValueError: A number does not fit its field.
        """
        request = _encode.parse_page_request(image, page, options)
        attempts = self._attempts(options.get("timeout_s"), self._config.retry)
        return AsyncGenerationStream(self._stream(self._documents.ParsePage, request), attempts)

    def parse_document(
        self, document: Pdf | Sequence[Image], **options: Unpack[DocumentOptions]
    ) -> AsyncDocumentStream:
        """Sends a document and returns the stream of its pages.

        Args:
            document: A PDF file, or pictures of the pages.
            **options: See DocumentOptions and CallOptions.

        Raises:
            ResourceExhaustedError: The request is over max_message_bytes; it was not sent.
            ValueError: A number does not fit its field.
        """
        request = _encode.parse_document_request(document, options)
        attempts = self._attempts(options.get("timeout_s"), self._config.retry)
        return AsyncDocumentStream(self._stream(self._documents.ParseDocument, request), attempts)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns version, limits and capabilities of the server."""
        request = control_pb2.GetServerInfoRequest()
        response = await self._unary(self._control.GetServerInfo, request, timeout_s)
        return _decode.server_info(response.server)

    async def model_info(
        self, model: str | None = None, *, timeout_s: float | None = None
    ) -> ModelInfo:
        """Returns what the server says about its engine, or about the model of a name."""
        request = control_pb2.GetModelInfoRequest(model=model)
        response = await self._unary(self._control.GetModelInfo, request, timeout_s)
        return _decode.model_info(response.model)

    async def load(self, *, timeout_s: float | None = None) -> LoadInfo:
        """Returns how busy the server is."""
        request = control_pb2.GetLoadRequest()
        response = await self._unary(self._control.GetLoad, request, timeout_s)
        return _decode.load_info(response.load)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> CancelStatus:
        """Ends a request of this or another client; its stream ends with reason CANCELLED."""
        request = control_pb2.CancelRequest(request_id=request_id)
        response = await self._unary(self._control.Cancel, request, timeout_s, NO_RETRY)
        return _decode.cancel_status(response)

    async def drain(
        self, *, wait_ms: int | None = None, timeout_s: float | None = None
    ) -> DrainState:
        """Makes the server admit nothing new.

        Args:
            wait_ms: How long to wait for the last request, milliseconds; None returns at once.
            timeout_s: Timeout of the call, seconds.
        """
        request = control_pb2.DrainRequest(wait_ms=wait_ms)
        response = await self._unary(self._control.Drain, request, timeout_s, NO_RETRY)
        return _decode.drain_state(response)

    async def swap_engine(
        self, engine: str, *, drain_ms: int | None = None, timeout_s: float | None = None
    ) -> ModelInfo:
        """Makes the server serve another engine; returns when it does.

        Args:
            engine: Name of an engine directory under the server's root.
            drain_ms: How long running requests may go on, milliseconds; None is the server's.
            timeout_s: Timeout of the call, seconds.
        """
        request = control_pb2.SwapEngineRequest(engine=engine, drain_ms=drain_ms)
        response = await self._unary(self._control.SwapEngine, request, timeout_s, NO_RETRY)
        return _decode.model_info(response.model)

    async def wait_until_ready(self, timeout_s: float, *, service: str = "") -> None:
        """Waits until the server's health is SERVING.

        Args:
            timeout_s: The longest wait, seconds.
            service: Full name of one service; empty asks for the server as a whole.

        Raises:
            DeadlineExceededError: It was not SERVING in time.
            DeltaFlashError: The server refused the question.
        """
        attempts = Attempts(NO_RETRY, timeout_s)
        request = health_pb2.HealthCheckRequest(service=service)
        state = "unreachable"
        while remaining_s := attempts.remaining_s():
            try:
                response = await self._check_health(
                    request, timeout=remaining_s, metadata=self._metadata, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_aio_rpc(rpc_error)
                if not isinstance(error, UnavailableError | DeadlineExceededError):
                    raise error from None
            else:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            await asyncio.sleep(min(READY_POLL_S, attempts.remaining_s() or 0.0))
        raise DeadlineExceededError(f"not SERVING after {timeout_s} s: {state}")

"""Requests that do not parse are refused by a handler, with details, as every bad request is."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

PACKAGE = "/deltaflash."


class UndecodableGuard(grpc.aio.ServerInterceptor):
    """Hands a handler the `DecodeError` in place of a request whose bytes do not parse.

    gRPC itself would answer with UNKNOWN and the text of the exception, and log a traceback for
    each such request.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - gRPC declares no type
        """Wraps the deserialiser of our own services; others know nothing of `DecodeError`."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PACKAGE):
            return handler
        decode = handler.request_deserializer

        def decode_or_error(data: bytes) -> Any:  # noqa: ANN401 - any message
            try:
                return decode(data)
            except DecodeError as error:
                return error

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return make(behaviour, decode_or_error, handler.response_serializer)

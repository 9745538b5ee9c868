"""What every call has: the caller's schema revision, and the way from exception to status."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from server.errors import ClientTooOldError, InvalidFieldError, Violation, abort
from server.service_context import ServiceContext

SCHEMA_REVISION = 2
MINIMUM_CLIENT_REVISION = 1
REVISION_KEY = "deltaflash-schema-revision"

CallContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Servicer(Protocol):
    """A servicer whose calls are wrapped by `call`."""

    context: ServiceContext


S = TypeVar("S", bound=Servicer)
Request = TypeVar("Request")
Result = TypeVar("Result")


def check_revision(context: CallContext) -> None:
    """Refuses a caller that is too old.

    Raises:
        InvalidFieldError: The metadata is not a revision.
        ClientTooOldError: The revision is not supported any more.
    """
    for key, value in context.invocation_metadata() or ():
        if key != REVISION_KEY:
            continue
        text = value if isinstance(value, str) else value.decode("ascii", "replace")
        if not (text.isascii() and text.isdecimal() and 0 < int(text[:10]) < 2**31):
            raise InvalidFieldError([Violation(REVISION_KEY, "expected a number, 1 and up")])
        if int(text[:10]) < MINIMUM_CLIENT_REVISION:
            raise ClientTooOldError(
                f"the client speaks revision {text}, {MINIMUM_CLIENT_REVISION} is the lowest",
                metadata={
                    "client_revision": text,
                    "minimum_client_revision": str(MINIMUM_CLIENT_REVISION),
                },
            )


def check_parsed(request: object) -> None:
    """Refuses what `server.undecodable` hands over in place of a request.

    Raises:
        InvalidFieldError: The bytes of the request did not parse.
    """
    if isinstance(request, DecodeError):
        raise InvalidFieldError([Violation("request", f"does not parse: {request}")])


def call(
    handler: Callable[[S, Request, CallContext], Awaitable[Result]],
) -> Callable[[S, Request, CallContext], Awaitable[Result]]:
    """Wraps a handler: an exception becomes the status that `server.errors` has for it.

    A cancelled call passes through untouched: the handler's own `finally` frees what it holds.
    """

    @functools.wraps(handler)
    async def wrapped(self: S, request: Request, context: CallContext) -> Result:
        try:
            check_parsed(request)
            check_revision(context)
            return await handler(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 the edge of a call; abort logs what is a fault
            config = self.context.config
            await abort(context, error, queue_retry_ms=config.retry_delay_ms)

    return wrapped

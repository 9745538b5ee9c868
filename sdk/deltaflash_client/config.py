"""How a client connects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from deltaflash_client.errors import ErrorDetails, ErrorReason, ResourceExhaustedError
from deltaflash_client.retry import RetryPolicy

SCHEMA_REVISION = 2
"""Revision of the wire contract that this client speaks; sent with every call."""

VERSION = "0.1.0"
"""Version of this distribution."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates in PEM form; an empty `Tls()` trusts what gRPC trusts by default.

    Attributes:
        root_certificates: Authorities that may vouch for the server.
        private_key: The client's key, for mutual TLS; goes with certificate_chain.
        certificate_chain: The client's certificate.
        server_name: The name to check the server's certificate for, when it is not the target's.
    """

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuses half of a client identity."""
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError("Tls: private_key and certificate_chain go together")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Pings that find a dead connection under a silent stream.

    A server cuts a connection that pings more often than it allows, with UNAVAILABLE "too many
    pings". The safe minimum of `time_s` is `Limits.min_keepalive_ms` of `server_info()`; proxies
    have limits of their own. Leave it at 30 s or more unless you know the whole path.

    Attributes:
        time_s: Silence before a ping, seconds, above 0.
        timeout_s: Wait for the answer before the connection counts as dead, seconds, above 0.
        without_calls: Also ping while no call is open.
    """

    time_s: float = 30.0
    timeout_s: float = 10.0
    without_calls: bool = False

    def __post_init__(self) -> None:
        """Refuses times that make no sense."""
        if self.time_s <= 0 or self.timeout_s <= 0:
            raise ValueError(
                f"Keepalive: expected times above 0 s, got {self.time_s} and {self.timeout_s}"
            )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client.

    Attributes:
        tls: Certificates; None connects without TLS, and then a token travels in the clear.
        token: Bearer token sent with every call.
        metadata: More metadata sent with every call, such as a tenant's name.
        max_message_bytes: Largest message sent or received, bytes. A larger request is refused
            before it is sent. The default is the server's default.
        keepalive: Pings; None sends none.
        retry: When a request is sent again.
        timeout_s: Timeout of calls that name none, seconds; None waits without end.
        wait_for_ready: A call waits for the connection instead of failing with UNAVAILABLE.
        channel_options: Further gRPC channel arguments; they win over those made here.
    """

    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    max_message_bytes: int = 64 * 1024 * 1024
    keepalive: Keepalive | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_s: float | None = None
    wait_for_ready: bool = False
    channel_options: Sequence[tuple[str, int | str]] = ()


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Returns gRPC's form of the certificates."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.root_certificates,
        private_key=tls.private_key,
        certificate_chain=tls.certificate_chain,
    )


def channel_arguments(config: ClientConfig) -> list[tuple[str, int | str]]:
    """Returns the gRPC channel arguments of a configuration."""
    arguments: dict[str, int | str] = {
        "grpc.primary_user_agent": f"deltaflash-client/{VERSION}",
        "grpc.max_send_message_length": config.max_message_bytes,
        "grpc.max_receive_message_length": config.max_message_bytes,
        # Only RetryPolicy resends: gRPC's own retries neither know the first event nor the reasons.
        "grpc.enable_retries": 0,
        "grpc.service_config_disable_resolution": 1,
        # A restarted server is found again within the waits of RetryPolicy.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 10_000,
    }
    if config.tls is not None and config.tls.server_name is not None:
        arguments["grpc.ssl_target_name_override"] = config.tls.server_name
    if config.keepalive is not None:
        arguments["grpc.keepalive_time_ms"] = round(config.keepalive.time_s * 1000)
        arguments["grpc.keepalive_timeout_ms"] = round(config.keepalive.timeout_s * 1000)
        arguments["grpc.keepalive_permit_without_calls"] = int(config.keepalive.without_calls)
        # Without this gRPC stops pinging after two pings on a stream without data.
        arguments["grpc.http2.max_pings_without_data"] = 0
    arguments.update(config.channel_options)
    return list(arguments.items())


def call_metadata(config: ClientConfig) -> tuple[tuple[str, str], ...]:
    """Returns the metadata sent with every call."""
    pairs = [("deltaflash-schema-revision", str(SCHEMA_REVISION)), *config.metadata.items()]
    if config.token is not None:
        pairs.append(("authorization", f"Bearer {config.token}"))
    return tuple(pairs)


def check_size(request: Message, config: ClientConfig) -> None:
    """Refuses a request that is too large to send.

    gRPC would end the call with the code of an overload and without a reason.

    Raises:
        ResourceExhaustedError: With the reason MESSAGE_TOO_LARGE.
    """
    size = request.ByteSize()
    if size > config.max_message_bytes:
        metadata = {"bytes": str(size), "max_bytes": str(config.max_message_bytes)}
        raise ResourceExhaustedError(
            f"the request has {size} bytes, max_message_bytes is {config.max_message_bytes}",
            details=ErrorDetails(ErrorReason.MESSAGE_TOO_LARGE, metadata),
        )

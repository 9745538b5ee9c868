"""What the services of one server share."""

from dataclasses import dataclass, field

from server.backend import Backend
from server.config import ServerConfig
from server.errors import EngineLoadingError, FeatureUnimplementedError
from server.images import DecodePool
from server.lifecycle import Lifecycle
from server.live_requests import LiveRequests
from server.prompt import PromptEncoder


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine: who generates tokens, and who makes them of prompts."""

    backend: Backend
    prompts: PromptEncoder


@dataclass(slots=True)
class ServiceContext:
    """The shared state of the services.

    Attributes:
        config: How the server was configured.
        lifecycle: Its phase and health.
        engine: The engine; None until it is loaded.
        pool: Decodes pictures; None until an engine that reads them is loaded.
        live: The admitted requests.
    """

    config: ServerConfig
    lifecycle: Lifecycle
    engine: Engine | None = None
    pool: DecodePool | None = None
    live: LiveRequests = field(init=False)

    def __post_init__(self) -> None:
        """Makes the table of requests."""
        self.live = LiveRequests(self.config.max_held_image_bytes)

    def require_engine(self) -> Engine:
        """Returns the engine.

        Raises:
            EngineLoadingError: There is none yet.
        """
        if self.engine is None:
            raise EngineLoadingError(
                "the engine is not loaded yet", retry_delay_ms=self.config.retry_delay_ms
            )
        return self.engine

    @property
    def reads_pictures(self) -> bool:
        """Whether the engine sees, and has a template that lays pictures out."""
        return self.pool is not None

    def require_pool(self, feature: str) -> DecodePool:
        """Returns what decodes pictures.

        Args:
            feature: What the caller asked for, for the error.

        Raises:
            FeatureUnimplementedError: The engine reads no pictures.
        """
        if self.pool is None:
            raise FeatureUnimplementedError(feature)
        return self.pool

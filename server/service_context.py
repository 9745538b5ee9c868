"""What the services of one server share."""

from dataclasses import dataclass, field

from server.backend import Backend
from server.config import ServerConfig
from server.errors import EngineLoadingError
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
        live: The admitted requests.
        engine: The engine; None until it is loaded.
    """

    config: ServerConfig
    lifecycle: Lifecycle
    live: LiveRequests = field(default_factory=LiveRequests)
    engine: Engine | None = None

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

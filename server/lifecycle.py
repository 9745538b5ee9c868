"""The phases of a server, and what its health says in each."""

import asyncio
import enum
import logging
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from server.backend import EngineLostError
from server.errors import DrainingError, EngineLoadingError

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a server stands; it only moves downwards."""

    LOADING = 0
    SERVING = 1
    DRAINING = 2
    LOST = 3


class Lifecycle:
    """The phase of a server; moves the health of all services with it.

    Only SERVING says SERVING. Every other phase has an error for those who ask for a generation.
    """

    def __init__(self, services: Sequence[str], retry_delay_ms: int) -> None:
        """Starts in LOADING.

        Args:
            services: Full names of the services whose health is kept, besides the whole server's.
            retry_delay_ms: The delay that callers hear while the engine is loading.
        """
        self.health = health.aio.HealthServicer()
        self._names = ("", *services)
        self._retry_delay_ms = retry_delay_ms
        self._phase = Phase.LOADING
        self._cause = ""
        self._lock = asyncio.Lock()

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        return self._phase

    async def publish(self) -> None:
        """Sets the health of every service to that of the phase."""
        # One at a time: an update that waits for a watcher must not overwrite a later one.
        async with self._lock:
            serving = self._phase is Phase.SERVING
            response = health_pb2.HealthCheckResponse
            for name in self._names:
                await self.health.set(name, response.SERVING if serving else response.NOT_SERVING)

    async def advance(self, phase: Phase, cause: str = "") -> None:
        """Moves to a later phase and publishes it; a move backwards is ignored.

        Args:
            phase: The phase to move to.
            cause: Why the engine is lost, with LOST.
        """
        if phase.value > self._phase.value:
            self._phase = phase
            self._cause = cause
            log.info("phase", extra={"phase": phase.name, "cause": cause})
        await self.publish()

    def require_serving(self) -> None:
        """Lets a generation in.

        Raises:
            EngineLoadingError: The engine is not loaded yet.
            DrainingError: Nothing new is admitted.
            EngineLostError: The engine is gone.
        """
        match self._phase:
            case Phase.LOADING:
                raise EngineLoadingError(
                    "the engine is not loaded yet", retry_delay_ms=self._retry_delay_ms
                )
            case Phase.DRAINING:
                raise DrainingError("the server finishes what runs and admits nothing new")
            case Phase.LOST:
                raise EngineLostError(self._cause)
            case Phase.SERVING:
                return

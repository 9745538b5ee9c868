"""A server process over the fake backend: `python -m fakes.serve OPTIONS`."""

import argparse
import asyncio
import time
from pathlib import Path

from fakes.app import fake_engine
from fakes.backend import FakeBackend, Script

from server.backend import EngineRefusedError
from server.commands.serve import serve_engine
from server.config import ServerConfig
from server.service_context import Engine


class StuckBackend(FakeBackend):
    """Hangs in close, as a lost device does."""

    def close(self) -> None:
        time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--load-s", type=float, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--warmup-s", type=float, default=0.0)
    parser.add_argument("--lose-after-s", type=float)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--stuck", action="store_true")
    options = parser.parse_args()

    class Backend(StuckBackend if options.stuck else FakeBackend):  # type: ignore[misc]
        def start(self, on_lost: object) -> None:
            super().start(on_lost)
            if options.lose_after_s is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(options.lose_after_s, self.lose, "lost by request")

    def load() -> Engine:
        time.sleep(options.load_s)
        if options.refuse:
            raise EngineRefusedError("nowhere: found nothing; needed: an engine; fix: pack one")
        backend = Backend(Script(deltas=("tick ",) * options.steps, step_s=options.step_s))
        backend.warmup_script = Script(step_s=options.warmup_s)
        return fake_engine(backend)

    serve_engine(
        load,
        ServerConfig(port=options.port, grace_s=options.grace_s, ready_file=options.ready_file),
    )


if __name__ == "__main__":
    main()

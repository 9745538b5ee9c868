"""`deltaflash generate`: one answer on stdout, from a server or from an engine directory.

A local engine runs behind the same services on a loopback port: both ways check alike.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltaflash_client import (
    AsyncClient,
    Chat,
    ChatMessage,
    ChatRole,
    Delta,
    DeltaFlashError,
    Finished,
    Prompt,
    SamplingOptions,
    StoppingOptions,
)
from server.app import ExitCode
from server.backends.executor import load_engine
from server.commands.local_server import ask_locally
from server.commands.serve import run_loop
from server.config import EngineConfig, ServerConfig
from server.service_context import Engine


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """What to generate.

    Attributes:
        prompt: The prompt's text.
        sampling: How tokens are chosen.
        stopping: When the answer ends.
        use_template: Lay the prompt out as a chat.
        thinking: Let the model think first; with the template only.
        timeout_s: Longest time for the answer; None has no limit.
        show_stats: Write finish reason, usage and times to stderr.
    """

    prompt: str
    sampling: SamplingOptions
    stopping: StoppingOptions
    use_template: bool = True
    thinking: bool = False
    timeout_s: float | None = None
    show_stats: bool = False

    def client_prompt(self) -> Prompt:
        """Returns the prompt in the words of the SDK."""
        if not self.use_template:
            return self.prompt
        message = ChatMessage(ChatRole.USER, self.prompt)
        return Chat([message], enable_thinking=self.thinking)


def generate_remote(command: GenerateCommand, target: str) -> ExitCode:
    """Asks a server."""
    return run_loop(partial(answer, command, target))


def generate_local(
    command: GenerateCommand, engine_dir: Path, engine_config: EngineConfig
) -> ExitCode:
    """Loads an engine directory for this one answer."""
    return generate_with(command, partial(load_engine, engine_dir, engine_config, 1))


def generate_with(command: GenerateCommand, load: Callable[[], Engine]) -> ExitCode:
    """Loads an engine for this one answer."""
    return ask_locally(partial(answer, command), load, ServerConfig(port=0, grace_s=0))


async def answer(command: GenerateCommand, target: str) -> ExitCode:
    """Streams one answer of a server to stdout."""
    try:
        async with (
            AsyncClient(target) as client,
            client.generate(
                command.client_prompt(),
                sampling=command.sampling,
                stopping=command.stopping,
                timeout_s=command.timeout_s,
            ) as stream,
        ):
            async for event in stream:
                if isinstance(event, Delta):
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, Finished):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    if command.show_stats:
                        sys.stderr.write(summary(event))
    except DeltaFlashError as error:
        sys.stdout.flush()
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.FAILED
    return ExitCode.OK


def summary(finished: Finished) -> str:
    """Returns finish reason, usage and times in one line."""
    usage, stats = finished.usage, finished.stats
    line = (
        f"{finished.finish_reason}: {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
        f"{stats.steps} steps, {stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted, "
        f"{stats.total_us / 1000:.0f} ms"
    )
    if stats.decode_us:
        line += f", {(usage.completion_tokens - 1) / stats.decode_us * 1e6:.1f} tokens/s"
    return line + "\n"

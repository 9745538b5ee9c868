"""`deltaflash info`: what an engine directory holds; nothing is loaded."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.app import ExitCode
from server.backend import EngineRefusedError
from server.backends.executor import open_directory, precision_of

if TYPE_CHECKING:
    from runtime.engine_directory import EngineDirectory


def show_info(engine_dir: Path, *, as_json: bool) -> ExitCode:
    """Writes a table, or the same as one JSON object, to stdout."""
    try:
        facts = engine_facts(open_directory(engine_dir))
    except EngineRefusedError as error:
        sys.stderr.write(f"deltaflash: {error}\n")
        return ExitCode.ENGINE_REFUSED
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if as_json else table(facts))
    return ExitCode.OK


def engine_facts(directory: "EngineDirectory") -> dict[str, Any]:
    """Returns what there is to know of a verified engine directory."""
    manifest = directory.manifest
    program = directory.program.config
    num_bytes = sum(entry.bytes for entry in manifest.files.values())
    return {
        "path": str(directory.path),
        "model": manifest.model.name,
        "architecture": manifest.model.architecture,
        "engine_id": f"sha256:{manifest.engine_id}",
        "schema_version": manifest.schema_version,
        "target": manifest.target_arch,
        "precision": precision_of(manifest.precision, manifest.kv_dtype),
        "context_length": program.context_len,
        "vocab_size": program.vocab_size,
        "layers": program.num_layers,
        "end_token_ids": list(directory.generation.end_ids),
        "chat_template": directory.chat_template is not None,
        "files": len(manifest.files),
        "bytes": num_bytes,
        "created": manifest.created,
        "tools": dict(manifest.tools),
        "evaluation": manifest.evaluation,
    }


def table(facts: dict[str, Any]) -> str:
    """Returns the facts as lines of name and value."""
    width = max(map(len, facts))
    return "".join(f"{name:<{width}}  {readable(value)}\n" for name, value in facts.items())


def readable(value: object) -> str:
    """Returns a value as people write it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name} {readable(inner)}" for name, inner in value.items()) or "-"
        case list():
            return ", ".join(readable(inner) for inner in value) or "-"
        case int():
            return f"{value:,}"
        case _:
            return str(value)

"""Structured logging: one JSON object a line on stderr."""

import datetime
import json
import logging
import sys

_STANDARD = frozenset(
    [*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"]
)


class JsonFormatter(logging.Formatter):
    """Writes a record and everything passed as `extra` as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str) -> None:
    """Sends every record of at least this level to stderr as JSON, in place of other handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Its DEBUG level writes every poll of the loop.
    logging.getLogger("asyncio").setLevel(logging.WARNING)

"""Log records on stderr, one line each: time, level, component, message, then the data as key=value.

2026-11-22T16:38:55.123Z ERROR quire.scheduler: worker group lost; running requests restart reason="rank 0 exited"
"""

import json
import logging
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any

LOG_LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOGGING_KEYWORDS = {"exc_info", "stack_info", "stacklevel", "extra"}


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with the data of the event as keyword arguments: ``log.warning("slow step", step=5, seconds=11.0)``.

    ``%`` in a message has no meaning, so that text of a client cannot be taken for a format.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        data = {key: kwargs.pop(key) for key in list(kwargs) if key not in LOGGING_KEYWORDS}
        return " ".join([str(msg), *(f"{key}={_value(value)}" for key, value in data.items())]), kwargs


class LineFormatter(logging.Formatter):
    """Time in UTC, level, component and message; a traceback is escaped into the same line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return _printable(super().format(record))


def event_logger(component: str) -> EventLogger:
    """Return the logger of ``component``: scheduler, worker, supervisor, http."""
    return EventLogger(logging.getLogger(f"quire.{component}"))


def start_logging() -> None:
    """Write records of the level in ``QUIRE_LOG_LEVEL`` (default WARNING) and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    name = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    logging.basicConfig(level=name if name in LEVELS else logging.WARNING, handlers=[handler])
    if name and name not in LEVELS:
        event_logger("log").warning(f"{LOG_LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}", got=name)


def _value(value: Any) -> str:
    """Format a number with 4 digits, and quote text that is empty or has spaces, quotes or unprintable characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = text.isprintable() and not any(char in text for char in ' "=')
    return text if plain and text else json.dumps(text)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

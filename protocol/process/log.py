"""Log records on stderr, one line each: time, level, component, message, then the data as key=value.

2026-11-22T16:38:55.123Z ERROR quire.scheduler: worker group lost; running requests restart reason="rank 0 exited"

With the format json, a line is an object with the fields time, level, component, pid and message, and one per datum.
Records of a process that belongs to one of several engines have the engine's number, too.
"""

import json
import logging
import math
import os
import select
import sys
import time
from collections.abc import MutableMapping
from typing import Any, NamedTuple

LOG_LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"
LOG_FORMAT_VARIABLE = "QUIRE_LOG_FORMAT"
"""Both variables are inherited by all processes of an engine."""
LOG_ENGINE_VARIABLE = "QUIRE_LOG_ENGINE"
"""Number of the engine to which a process belongs; set for the processes of a server with several engines."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")
BLOCKED_STDERR_S = 0.1
"""Longest wait of a warning or error for a reader of stderr; other records do not wait."""
LOGGING_KEYWORDS = {"exc_info", "stack_info", "stacklevel", "extra"}


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with the data of the event as keyword arguments: ``log.warning("slow step", step=5, seconds=11.0)``.

    ``%`` in a message has no meaning, so that text of a client cannot be taken for a format.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        data = {key: kwargs.pop(key) for key in list(kwargs) if key not in LOGGING_KEYWORDS}
        kwargs["extra"] = {"event": str(msg), "data": data, **(kwargs.get("extra") or {})}
        return " ".join([str(msg), *(f"{key}={_value(value)}" for key, value in data.items())]), kwargs


class LineFormatter(logging.Formatter):
    """Time in UTC, level, component, message and engine; a traceback is escaped into the same line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, engine: str = "") -> None:
        """``engine``: number of the process's engine; empty if there is one only."""
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s" + (f" engine={engine}" if engine else ""))
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Data whose name is that of a fixed field gets an underscore behind it."""

    def __init__(self, engine: str = "") -> None:
        """``engine``: as of LineFormatter."""
        super().__init__()
        self._engine = {"engine": int(engine)} if engine else {}

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.msecs)
        fields: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds:03d}Z",
            "level": record.levelname,
            "component": record.name,
            "pid": record.process,
            "message": getattr(record, "event", None) or record.getMessage(),
            **self._engine,
        }
        for name, value in getattr(record, "data", {}).items():
            is_nan = isinstance(value, float) and not math.isfinite(value)
            fields[f"{name}_" if name in fields else name] = str(value) if is_nan else value
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class LineHandler(logging.StreamHandler[Any]):
    """Writes lines to stderr. A reader that has stopped loses lines, and never stops the process."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        # A terminal that was stopped, or a pipe whose reader hangs, would otherwise block the scheduler in the middle
        # of a step.
        if not self._is_writable(BLOCKED_STDERR_S if record.levelno >= logging.WARNING else 0.0):
            self._num_lost += 1
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            text = f"log lines lost because stderr was not read count={lost}"
            super().emit(logging.LogRecord("quire.log", logging.WARNING, "", 0, text, (), None))
        super().emit(record)

    def _is_writable(self, timeout: float) -> bool:
        """Return whether the next line can be written without waiting for a reader."""
        try:
            poll = select.poll()
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file: a test captures it, or it was closed
            return True
        return bool(poll.poll(timeout * 1000))


def event_logger(component: str) -> EventLogger:
    """Return the logger of ``component``: scheduler, worker, supervisor, http."""
    return EventLogger(logging.getLogger(f"quire.{component}"))


class LogOptions(NamedTuple):
    """Level and format of a process and of its children. Empty: WARNING, text."""

    level: str = ""
    form: str = ""

    @classmethod
    def of(cls, level: str | None, form: str | None) -> "LogOptions":
        """Return the given options, and otherwise those of the environment."""
        return cls(
            (level or os.environ.get(LOG_LEVEL_VARIABLE, "")).upper(),
            form or os.environ.get(LOG_FORMAT_VARIABLE, ""),
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables that set the options of child processes."""
        return {LOG_LEVEL_VARIABLE: self.level, LOG_FORMAT_VARIABLE: self.form}


def start_logging(options: LogOptions | None = None) -> None:
    """Write records to stderr, of the given level (default: that of the environment) and above. Libraries log warnings
    and errors."""
    level, form = options or LogOptions.of(None, None)
    handler = LineHandler()
    engine = os.environ.get(LOG_ENGINE_VARIABLE, "")
    engine = engine if engine.isdecimal() else ""
    handler.setFormatter(JsonFormatter(engine) if form == "json" else LineFormatter(engine))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("quire").setLevel(level if level in LEVELS else logging.WARNING)
    for name, got, allowed in ((LOG_LEVEL_VARIABLE, level, LEVELS), (LOG_FORMAT_VARIABLE, form, FORMATS)):
        if got and got not in allowed:
            event_logger("log").warning(f"{name} must be one of {', '.join(allowed)}", got=got)


def write_line(text: str, level: int = logging.INFO) -> None:
    """Write a line for the user of the command at any log level: plain, or as a record in format json."""
    if not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        print(one_line(text), file=sys.stderr, flush=True)
        return
    logger = logging.getLogger("quire")
    logger.handle(logger.makeRecord(logger.name, level, "", 0, text, (), None))


def _value(value: Any) -> str:
    """Format a number with 4 digits, and quote text that is empty or has spaces, quotes or unprintable characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = text.isprintable() and not any(char in text for char in ' "=')
    return text if plain and text else json.dumps(text)


def first_line(text: str) -> str:
    """Return the first line of another library's text that is not blank; the lines behind it are for developers."""
    return one_line(next(filter(None, map(str.strip, text.splitlines())), ""))


def one_line(text: str) -> str:
    """Escape line breaks and control characters: names of folders and files may hold commands for a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

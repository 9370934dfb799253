"""Errors with texts that users may see: no internal paths, no traceback."""

import difflib
from collections.abc import Iterable

MAX_SHOWN = 160
"""Characters of a value that an error repeats."""


class QuireError(Exception):
    """Base of all errors that Quire reports in one line."""


class ConfigError(QuireError):
    """The command line, a config file or a checkpoint cannot be used (exit status 78, ``EX_CONFIG``)."""

    exit_status = 78


class EngineError(QuireError):
    """The engine failed, exited or never started."""


class InvalidRequest(QuireError):
    """A request was rejected; the engine is unaffected.

    Attributes:
        param: name of the invalid field as the client wrote it, or None.
        code: short machine-readable name; OpenAI's where OpenAI has one.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean x?"`` for the closest known word, or an empty string when none is close."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def printable(value: object) -> str:
    """Format a value of a client or an untrusted file for a one-line error: short, and without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        is_short = len(value) <= 4 and not any(isinstance(part, dict | list) for part in value)
        return f"[{', '.join(map(printable, value))}]" if is_short else "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    if not isinstance(value, str | int | float | None):
        return type(value).__name__
    text = repr(value[: MAX_SHOWN + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN + 2 else f"{text[:MAX_SHOWN]}..."

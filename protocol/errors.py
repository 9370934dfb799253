"""Errors with texts that users may see: no internal paths, no traceback."""

import difflib
import errno
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


def wrong_value(name: str, allowed: str, value: object, code: str = "invalid_value") -> InvalidRequest:
    """Return the error for a field whose value is not allowed. ``allowed``: what it must be, in words."""
    return InvalidRequest(f"{name} must be {allowed} (got {printable(value)})", name, code)


_SHORTAGES = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "too many open files: raise their limit (ulimit -n)"),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "a file cannot be written: free space on its disk, set TMPDIR to another folder, or raise ulimit -f",
    ),
    errno.ENOMEM: "not enough memory: free some, raise ulimit -v, or lower --kv-cache-memory-bytes and --max-model-len",
    errno.EAGAIN: "no process or thread can be started: raise the limit of processes (ulimit -u)",
}
_SHORTAGE_TEXTS = {
    "failed to map segment": errno.ENOMEM,
    "allocate memory": errno.ENOMEM,
    "start new thread": errno.EAGAIN,
    "open files": errno.EMFILE,
    "No usable temporary directory": errno.ENOSPC,
}
"""Parts of the texts by which libraries report a shortage without a number."""


def shortage(error: BaseException) -> str:
    """Return one line with the resource that the machine or a limit denied, and what to do; "" for other errors.

    Also for a text that cannot be encoded: a path that is no UTF-8, or an answer for a terminal without UTF-8.

    For a group of errors, this is the first shortage in it.
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(shortage, error.exceptions)), "")
    if isinstance(error, MemoryError):
        return _SHORTAGES[errno.ENOMEM]
    if isinstance(error, UnicodeEncodeError):
        text = f"{printable(error.object)} cannot be encoded as {error.encoding}: names of files must be UTF-8; "
        return f"{text}with a locale such as LC_ALL=C, set PYTHONUTF8=1"
    number = getattr(error, "errno", None)
    if number not in _SHORTAGES and isinstance(error, FileNotFoundError | ImportError | RuntimeError):
        number = next((number for text, number in _SHORTAGE_TEXTS.items() if text in str(error)), None)
    if number not in _SHORTAGES:
        return ""
    return _SHORTAGES[number]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean x?"`` for the closest known word, or an empty string when none is close."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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

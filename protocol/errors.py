"""Errors with a text that a user may see: our own words, no path of ours, no traceback."""

import difflib
from collections.abc import Iterable


class QuireError(Exception):
    """Anything Quire itself refuses or gives up on, said in one line."""


class ConfigError(QuireError):
    """The command line, a config file or a checkpoint cannot be used (exit status 78, ``EX_CONFIG``)."""

    exit_status = 78


class EngineError(QuireError):
    """The engine behind a client is gone, or never came up."""


class InvalidRequest(QuireError):
    """One request is refused; the engine is unharmed.

    Attributes:
        param: the field of the request that is wrong, as the client spelt it, or None.
        code: short machine-readable word, OpenAI's where OpenAI has one.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean --x?"``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""

"""Errors as OpenAI's clients expect them, in words that are ours."""

import traceback

import msgspec
from starlette.responses import Response

from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.process.log import event_logger

log = event_logger("http")

# Of every code that an InvalidRequest or a scheduler's Rejected may bear.
STATUS_OF_CODE = {
    "invalid_value": 400,
    "invalid_type": 400,
    "invalid_json": 400,
    "unknown_parameter": 400,
    "missing_required_parameter": 400,
    "unsupported": 400,
    "unsupported_value": 400,
    "context_length_exceeded": 400,
    "kv_pool_too_small": 400,
    "invalid_structured_outputs": 400,
    "priority_not_allowed": 403,
    "model_not_found": 404,
    "duplicate_request_id": 409,
    "rate_limit_exceeded": 429,
    "queue_full": 503,
    "loading": 503,
}
# Of what an engine's ERROR begins with, where the request failed by itself; any other failure is ours.
STATUS_OF_FAILURE = {"request_failed": 422, "numerical_error": 500, "engine_fault": 500, "server_shutdown": 503}
# After how many seconds a client may try again, where that can help.
RETRY_AFTER_S = {
    "queue_full": 1,
    "rate_limit_exceeded": 1,
    "out_of_memory": 1,
    "engine_unavailable": 1,
    "too_many_connections": 1,
    "too_many_bodies": 1,
}
MAX_LOGGED_CHARS = 1000
TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(QuireError):
    """An answer other than 2xx, and what it says."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Those that its status asks for."""
        seconds = RETRY_AFTER_S.get(self.code or "")
        return {} if seconds is None else {"retry-after": str(seconds)}

    def body(self) -> bytes:
        kind = TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        # A lone surrogate out of a field's name would not encode.
        message, param = one_line(self.message), None if self.param is None else _encodable(self.param)
        return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, self.code)))

    def response(self, headers: dict[str, str] | None = None) -> Response:
        return Response(self.body(), self.status, self.headers | (headers or {}), "application/json")


class ClientGone(Exception):
    """The client closed its connection: no answer is due."""


def as_api_error(error: Exception) -> ApiError:
    """Return the error that the client gets. An unexpected one is logged here and answered as ``internal error``."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            status = STATUS_OF_CODE.get(error.code, 400)
            return ApiError(status, error.message, error.param, error.code)
        case EngineError():
            return ApiError(503, "the engine is not available", None, "engine_unavailable")
        case MemoryError():
            return out_of_memory()
        case _:
            log.error("unexpected error while answering a request", traceback=_traceback(error))
            return ApiError(500, "internal error", None, "internal_error")


def out_of_memory() -> ApiError:
    """One request asked for more than there is; the others go on."""
    return ApiError(503, "there is no memory for this request now", None, "out_of_memory")


def failed_request(detail: str) -> ApiError:
    """The error of a request that ended with ERROR; ``detail`` is ``code: words``, or words alone."""
    code, _, words = detail.partition(": ")
    if code not in STATUS_OF_FAILURE:
        return ApiError(500, detail or "the engine failed this request", None, "engine_error")
    return ApiError(STATUS_OF_FAILURE[code], words, None, code)


def shorten(word: str, most: int = 64) -> str:
    """A client's own word, as an error repeats it: quoted, on one line, not long."""
    return ascii(word if len(word) <= most else f"{word[:most]}...")


def _traceback(error: Exception) -> str:
    """Return the frames, and the error cut to ``MAX_LOGGED_CHARS``: it may repeat a client's text of any length."""
    return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {error}"[:MAX_LOGGED_CHARS]


def one_line(message: str, most: int = 2000) -> str:
    """A message as a terminal or a log can show it, whatever of a client's own it repeats: printable, and not long."""
    text = message if message.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in message)
    return text if len(text) <= most else f"{text[:most]}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

"""Errors, most in OpenAI's format, with messages written for this server."""

import traceback

import msgspec
from starlette.responses import Response

from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.process.log import event_logger

log = event_logger("http")

# HTTP status of every code of an InvalidRequest or of the scheduler's Rejected message.
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
    "thread_unsupported_request": 400,
    "invalid_adapter": 400,
    "item_too_large": 400,
    "job_ended": 400,
    "priority_not_allowed": 403,
    "model_not_found": 404,
    "parent_not_found": 404,
    "adapter_not_found": 404,
    "session_not_found": 404,
    "engine_not_found": 404,
    "duplicate_request_id": 409,
    "request_ended": 409,
    "adapter_exists": 409,
    "adapter_in_use": 409,
    "session_busy": 409,
    "session_out_of_order": 409,
    "rate_limit_exceeded": 429,
    "too_many_sessions": 429,
    "queue_full": 503,
    "loading": 503,
    "adapter_not_loaded": 503,
    "image_not_encoded": 500,
}
# HTTP status by the code that begins the detail of a request's ERROR end; 500 for any other.
STATUS_OF_FAILURE = {
    "request_failed": 422,
    "numerical_error": 500,
    "engine_fault": 500,
    "server_shutdown": 503,
    "adapter_not_loaded": 503,
    "image_not_encoded": 500,
}
# Retry-After in seconds, for codes where a retry can succeed.
RETRY_AFTER_S = {
    "queue_full": 1,
    "rate_limit_exceeded": 1,
    "session_busy": 1,
    "too_many_sessions": 10,
    "out_of_memory": 1,
    "engine_unavailable": 1,
    "too_many_connections": 1,
    "too_many_bodies": 1,
    "aborted": 1,
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
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""After an error with this code Anthropic's SDK sends the whole conversation with each request."""
MESSAGES_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(QuireError):
    """A response with a status other than 2xx, and its error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, if the code has one; for a body in a coding that is not read, those that are."""
        if self.code == "unsupported_content_encoding":
            return {"accept-encoding": "identity"}
        seconds = RETRY_AFTER_S.get(self.code or "")
        return {} if seconds is None else {"retry-after": str(seconds)}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.detail()})

    def detail(self) -> ErrorDetail:
        """Return the error object, also for the entry of one input among many."""
        kind = TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        # A field name may contain a lone surrogate, which cannot be encoded.
        message, param = one_line(self.message), None if self.param is None else _encodable(self.param)
        return ErrorDetail(message, kind, param, self.code)

    def messages_body(self) -> bytes:
        """Return the body in Anthropic's format."""
        kind = MESSAGES_TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        error: dict[str, object] = {"type": kind, "message": one_line(self.message)}
        if self.code == THREAD_UNSUPPORTED:  # the SDK reads this, to send the request in another form
            error["details"] = {"error_code": self.code, "unsupported": ["thread"]}
        return msgspec.json.encode({"error": error, "type": "error"})

    def plain_body(self) -> bytes:
        """Return the body in Ollama's format."""
        return msgspec.json.encode({"error": one_line(self.message)})

    def response(self, path: str, headers: dict[str, str] | None = None) -> Response:
        """Return the response to a request for ``path``, in the format of its API."""
        body = next((form(self) for start, form in FORMS.items() if path.startswith(start)), None) or self.body()
        return Response(body, self.status, self.headers | (headers or {}), "application/json")


FORMS = {"/v1/messages": ApiError.messages_body, "/api/": ApiError.plain_body}
"""Formats of errors other than OpenAI's, by what the paths of their APIs begin with."""


class ClientDisconnected(Exception):
    """The client closed its connection: no response is needed."""


def as_api_error(error: Exception) -> ApiError:
    """Return the error to send. An unexpected exception is logged, and its client gets ``internal error``."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            status = STATUS_OF_CODE.get(error.code, 400)
            return ApiError(status, error.message, error.param, error.code)
        case EngineError():
            return ApiError(503, "engine not available", None, "engine_unavailable")
        case MemoryError():
            return out_of_memory()
        case _:
            log.error("unexpected error in a request handler", traceback=_traceback(error))
            return ApiError(500, "internal error", None, "internal_error")


def out_of_memory() -> ApiError:
    return ApiError(503, "not enough memory for this request: retry later", None, "out_of_memory")


def failed_request(detail: str) -> ApiError:
    """Return the error of a request that ended with ERROR. ``detail``: ``code: message``, or a message alone."""
    code, _, message = detail.partition(": ")
    if code not in STATUS_OF_FAILURE:
        return ApiError(500, detail or "request failed in the engine", None, "engine_error")
    return ApiError(STATUS_OF_FAILURE[code], message, None, code)


def aborted_request() -> ApiError:
    """Return the error of a request that an administrator ended. A part of an answer must not look like a whole one."""
    return ApiError(503, "the request was aborted by the server's administrator: retry later", None, "aborted")


def shorten(text: str, limit: int = 64) -> str:
    """Return text of a client for an error message: quoted, on one line, at most ``limit`` characters of it."""
    return ascii(text if len(text) <= limit else f"{text[:limit]}...")


def _traceback(error: Exception) -> str:
    """Return the frames, and the error cut to ``MAX_LOGGED_CHARS``: it may contain text of a client of any length."""
    return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {error}"[:MAX_LOGGED_CHARS]


def one_line(message: str, limit: int = 2000) -> str:
    """Return the message as one printable line of at most ``limit`` characters: it may contain text of a client."""
    text = message if message.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in message)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

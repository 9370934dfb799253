"""The batch file format of OpenAI and vLLM: one request per line, and one result per line."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from quire.protocol.errors import printable

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"),
)
MAX_LINE_BYTES = 32 * 2**20
"""A line is read at once; the server limits bodies to the same size."""


class Body(msgspec.Struct, frozen=True):
    stream: Any = None


class RequestLine(msgspec.Struct, frozen=True):
    """One line. ``body`` is sent unchanged."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _AnyId(msgspec.Struct, frozen=True):
    custom_id: Any = None


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Any


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResultLine(msgspec.Struct, frozen=True):
    """One line of the output. ``error``: None if the response has the status 200."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: Failure | None


def result(custom_id: str | None, response: BatchResponse | None, error: Failure | None) -> ResultLine:
    return ResultLine(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is no request. ``custom_id``: None if the line has none."""

    message: str
    custom_id: str | None = None

    def result(self) -> ResultLine:
        return result(self.custom_id, None, Failure("invalid_line", self.message))


def read_lines(file: BinaryIO) -> Iterator[RequestLine | InvalidLine]:
    """Yield what each line holds; blank lines are left out. At most one line and all ids are in memory."""
    number = 0
    numbers: dict[str, int] = {}
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_too_long = len(line) > MAX_LINE_BYTES
        while is_too_long and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        if is_too_long:
            yield InvalidLine(f"line {number} must have at most {MAX_LINE_BYTES // 2**20} MiB")
            continue
        text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        if not text:
            continue
        parsed = parse_line(text, number)
        if isinstance(parsed, RequestLine) and (first := numbers.setdefault(parsed.custom_id, number)) != number:
            shown = printable(parsed.custom_id)
            parsed = InvalidLine(f"custom_id must be unique (got {shown}, as in line {first})", parsed.custom_id)
        yield parsed


def parse_line(text: bytes, number: int) -> RequestLine | InvalidLine:
    try:
        custom_id = msgspec.json.decode(text, type=_AnyId).custom_id
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return InvalidLine(f"line {number} must be a JSON object: {error}", _lenient_id(text))
    known = custom_id if isinstance(custom_id, str) else None
    try:
        request = msgspec.json.decode(text, type=RequestLine)
        body = msgspec.json.decode(request.body, type=Body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # msgspec names the field and the types, and no text of the line.
        fields = "custom_id, method, url (strings) and body (an object)"
        return InvalidLine(f"line {number} must have {fields}: {error}", known)
    if request.method != "POST":
        return InvalidLine(f"method must be POST (got {printable(request.method)})", known)
    if request.url not in URLS:
        allowed = f"url must be one of {', '.join(URLS)} (got {printable(request.url)})"
        return InvalidLine(allowed, known)
    if body.stream:
        return InvalidLine("body.stream must be false: each result is one line", known)
    return request


def _lenient_id(text: bytes) -> str | None:
    """Return the id of a line that only a lenient parser reads: one with NaN, or half of a surrogate pair."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
        found: str = json.loads(text)["custom_id"]
        return found.encode().decode()
    return None

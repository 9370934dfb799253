"""Reading a request's body: its bytes counted while it comes in, its values before they are made; an object or refused.

Nothing is done on the event loop that takes long for a long body.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.launch.http.errors import ApiError, ClientGone
from quire.launch.http.server import in_thread_if_long
from quire.protocol.errors import InvalidRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
# Of text there may be as much as fits, but a decoded value takes some 100 bytes for as few as two of the body's.
MAX_BODY_VALUES = 2**20
# A body that only a lenient reader accepts is read again to name the field at fault, if it is no larger.
MAX_DIAGNOSED_BYTES = 64 * 1024

T = TypeVar("T")

_BEGINNINGS = (b",", b"[", b"{")
"""What each value of a JSON text but the outermost has one of before it."""


async def read_json(request: Request, parse: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
    """What ``parse`` makes of the body's JSON object, and how many bytes that was: a measure of the work it asks for.

    Raises:
        ApiError, ClientGone: as ``read_body``.
        InvalidRequest: as ``parse_body``.
    """
    body = await read_body(request)
    return await in_thread_if_long(len(body), lambda: parse_body(body, parse)), len(body)


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, as soon as more than MAX_BODY_BYTES are announced or have come.
        ClientGone: the connection closed first.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > MAX_BODY_BYTES):
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_body(body: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    """What ``parse`` makes of the JSON object in the body. Its Content-Type is not looked at.

    Raises:
        ApiError: 413, it holds more than MAX_BODY_VALUES values.
        InvalidRequest: no JSON, no object, or ``parse`` refuses it.
    """
    if _num_values(body) > MAX_BODY_VALUES:
        most = f"the body must hold at most {MAX_BODY_VALUES} values"
        raise ApiError(413, most, None, "payload_too_large")
    try:
        raw = _decode(body)
    except InvalidRequest:
        # NaN and 1e999 are not JSON, but clients write them; then the field's own range says more than a byte does.
        lenient = _decode_leniently(body)
        if lenient is not None:
            parse(lenient)
        raise
    return parse(raw)


def _num_values(body: bytes) -> int:
    """How many values decoding would make, give or take a few; what is no JSON counts too."""
    rough = sum(map(body.count, _BEGINNINGS))
    if rough <= MAX_BODY_VALUES:
        return rough
    num_texts = (body.count(b'"') - body.count(b'\\"')) // 2
    if num_texts > MAX_BODY_VALUES:
        return num_texts
    # Prose has commas of its own: what is between quotes does not count.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2])
    return sum(map(outside.count, _BEGINNINGS))


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", None, "invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        where = f" (at byte {place[1]})" if place else ""
        raise InvalidRequest(f"the body is not valid JSON{where}", None, "invalid_json") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object", None, "invalid_json")
    return raw


def _decode_leniently(body: bytes) -> dict[str, Any] | None:
    if len(body) > MAX_DIAGNOSED_BYTES:
        return None
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def _too_large() -> ApiError:
    most = MAX_BODY_BYTES // 2**20
    return ApiError(413, f"the body must be at most {most} MiB", None, "payload_too_large")

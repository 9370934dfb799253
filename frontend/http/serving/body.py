"""Reading and decoding request bodies: size and number of values are limited before anything is allocated for them.

Long bodies are decoded in a thread, not on the event loop. The bodies of short responses are written here, too.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, shorten
from quire.frontend.http.serving.work_threads import TextThreads
from quire.protocol.errors import InvalidRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
# Text is limited by the size of the body only. But one or two bytes of a body can be a value of 200 bytes in memory,
# and a container takes longer to create and free than a number. The weight of a number is 1.
MAX_BODY_WEIGHT = 2**20
TEXT_WEIGHT = 4
CONTAINER_WEIGHT = 16
# Up to this size, a body that only Python's lenient JSON parser accepts is parsed again to name the invalid field.
MAX_DIAGNOSED_BYTES = 64 * 1024

TOO_MANY_VALUES = (
    f"request body has too many values: at most {MAX_BODY_WEIGHT} numbers, {MAX_BODY_WEIGHT // TEXT_WEIGHT} strings or "
    f"{MAX_BODY_WEIGHT // CONTAINER_WEIGHT} lists and objects"
)

T = TypeVar("T")


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def read_json(request: Request, texts: TextThreads, parse: Callable[[dict[str, Any]], T]) -> tuple[T, bytes]:
    """Read the body and return ``parse`` of its JSON object, and the body, whose size chooses the threads for its work.

    Raises:
        ApiError, ClientDisconnected: as ``read_body``.
        InvalidRequest: as ``parse_body``.
    """
    body = await read_body(request)
    return await texts.run(len(body), lambda: parse_body(body, parse)), body


async def read_body(request: Request) -> bytes:
    """Read the whole body.

    Raises:
        ApiError: 415, the body is compressed; 413, as soon as more than MAX_BODY_BYTES are announced or received.
        ClientDisconnected: the connection was closed first.
    """
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if unknown := [coding.strip() for coding in codings if coding.strip() not in ("", "identity")]:
        text = f"content-encoding must be identity (got {shorten(unknown[0])}): send the body without compression"
        raise ApiError(415, text, "content-encoding", "unsupported_content_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > MAX_BODY_BYTES):
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_body(body: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    """Decode the body and return ``parse`` of it. The Content-Type is ignored.

    Raises:
        InvalidRequest: the body is not a JSON object, has too many values, or is refused by ``parse``.
    """
    if _weight(body) > MAX_BODY_WEIGHT:
        raise InvalidRequest(TOO_MANY_VALUES)
    try:
        raw = _decode(body)
    except InvalidRequest:
        # NaN and 1e999 are not JSON, but clients send them. The range of the field helps more than a byte offset.
        lenient = _decode_leniently(body)
        if lenient is not None:
            parse(lenient)
        raise
    return parse(raw)


def _weight(body: bytes) -> int:
    """Estimate the weight of the values that decoding would create, also for a body that is not JSON."""
    upper_bound = _weight_outside(body) + TEXT_WEIGHT * (_count(body, b'"') // 2)
    if upper_bound <= MAX_BODY_WEIGHT:
        return upper_bound
    weight_of_strings = TEXT_WEIGHT * ((_count(body, b'"') - body.count(b'\\"')) // 2)
    if weight_of_strings > MAX_BODY_WEIGHT:
        return weight_of_strings
    # Text contains commas: characters between quotes do not count.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return weight_of_strings + _weight_outside(b"".join(plain.split(b'"')[::2]))


def _weight_outside(body: bytes) -> int:
    """Return the weight of the values outside of strings: each but the outermost follows a comma or a bracket."""
    return _count(body, b",") + CONTAINER_WEIGHT * _count(body, b"[{")


def _count(body: bytes, characters: bytes) -> int:
    """Count the bytes of the body that are in ``characters``.

    Unlike ``bytes.count``, as fast if all of them are; and numpy does not hold the interpreter's lock, for which the
    event loop would wait while bodies with images are read.
    """
    values = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(values == each)) for each in characters)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("request body is nested too deeply", None, "invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        where = f" (at byte {place[1]})" if place else ""
        raise InvalidRequest(f"request body is not valid JSON{where}", None, "invalid_json") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("request body must be a JSON object", None, "invalid_json")
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
    limit = MAX_BODY_BYTES // 2**20
    return ApiError(413, f"request body must be at most {limit} MiB", None, "payload_too_large")

"""Reading a request's body: its bytes counted while it comes in, its values before they are made; an object or refused.

Nothing is done on the event loop that takes long for a long body.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.launch.http.schema.errors import ApiError, ClientGone
from quire.launch.http.serving.lanes import TextLanes
from quire.protocol.errors import InvalidRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
# Of text there may be as much as fits, but a byte or two of the body can be a value that takes 200 bytes, and the
# longer to be made and forgotten the more it can hold. A number weighs 1.
MAX_BODY_WEIGHT = 2**20
TEXT_WEIGHT = 4
CONTAINER_WEIGHT = 16
# A body that only a lenient reader accepts is read again to name the field at fault, if it is no larger.
MAX_DIAGNOSED_BYTES = 64 * 1024

TOO_MANY = (
    f"the body holds too many values: at most {MAX_BODY_WEIGHT} numbers, {MAX_BODY_WEIGHT // TEXT_WEIGHT} strings or "
    f"{MAX_BODY_WEIGHT // CONTAINER_WEIGHT} lists and objects"
)

T = TypeVar("T")


async def read_json(request: Request, texts: TextLanes, parse: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
    """What ``parse`` makes of the body's JSON object, and how many bytes that was: a measure of the work it asks for.

    Raises:
        ApiError, ClientGone: as ``read_body``.
        InvalidRequest: as ``parse_body``.
    """
    body = await read_body(request)
    return await texts.run(len(body), lambda: parse_body(body, parse)), len(body)


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
        InvalidRequest: no JSON, no object, too many values in it, or ``parse`` refuses it.
    """
    if _weight(body) > MAX_BODY_WEIGHT:
        raise InvalidRequest(TOO_MANY)
    try:
        raw = _decode(body)
    except InvalidRequest:
        # NaN and 1e999 are not JSON, but clients write them; then the field's own range says more than a byte does.
        lenient = _decode_leniently(body)
        if lenient is not None:
            parse(lenient)
        raise
    return parse(raw)


def _weight(body: bytes) -> int:
    """Of all values that decoding would make, give or take a few; what is no JSON counts too."""
    most = _weight_outside(body) + TEXT_WEIGHT * (_count(body, b'"') // 2)
    if most <= MAX_BODY_WEIGHT:
        return most
    of_texts = TEXT_WEIGHT * ((_count(body, b'"') - body.count(b'\\"')) // 2)
    if of_texts > MAX_BODY_WEIGHT:
        return of_texts
    # Prose has commas of its own: what is between quotes does not count.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return of_texts + _weight_outside(b"".join(plain.split(b'"')[::2]))


def _weight_outside(body: bytes) -> int:
    """Of its commas and brackets: each value but the outermost has one before it."""
    return _count(body, b",") + CONTAINER_WEIGHT * _count(body, b"[{")


def _count(body: bytes, characters: bytes) -> int:
    """How many bytes of the body are one of these; as fast when all of them are, which ``bytes.count`` is not."""
    return len(body) - len(body.translate(None, characters))


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

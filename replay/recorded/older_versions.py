"""Upgrades lines of earlier versions of the trace format to the current one.

* Version 1 has other names for some fields.
* Before version 4 an arrival had fields of its own for what is now in its ``request``. They have the names of the
  message, except for the id.
"""

from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import fields

from quire.protocol.wire.front_end_messages import AddRequest

OLDEST = 1
RENAMED_KINDS = {"epoch": "worker_epoch"}
RENAMED_FIELDS = {
    "arrival": {"again": "resubmitted", "req_id": "request_id"},
    "worker_epoch": {"halved": "budget_halved", "fresh": "new_workers"},
}
_DEFAULTS = {
    field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    for field in fields(AddRequest)
} | {"request_id": "", "prompt_token_ids": [], "sampling": {}, "seed": 0}
"""Those of AddRequest, and those that an arrival left out."""


def upgrade(raw: bytes, version: int) -> bytes:
    """Return the line ``raw`` of a trace of ``version`` in the current version.

    The checksum of an intact line is recomputed; that of an altered line stays wrong. Text that is not a JSON object is
    returned unchanged, for the reader to report.
    """
    if not (b'"arrival"' in raw or (version == OLDEST and b'"epoch"' in raw)):
        return raw
    try:
        line = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    crc = line.pop("crc", None)
    is_intact = crc == crc32(msgspec.json.encode(line))
    kind = line["kind"] = RENAMED_KINDS.get(line.get("kind", ""), line.get("kind", ""))
    names = RENAMED_FIELDS.get(kind, {})
    line = {names.get(name, name): value for name, value in line.items()}
    if kind == "arrival":
        line["request"] = _request(line)
    if crc is not None:
        line["crc"] = crc32(msgspec.json.encode(line)) if is_intact else crc
    return msgspec.json.encode(line) + (b"\n" if raw.endswith(b"\n") else b"")


def _request(line: dict[str, Any]) -> list[Any]:
    """Take the fields of the message out of an arrival, and return the message as on the wire."""
    values: list[Any] = [AddRequest.__struct_config__.tag]
    for field in fields(AddRequest):
        value = line.pop(field.name, None)
        values.append(_DEFAULTS[field.name] if value is None else value)
    return values

"""Upgrades lines of trace format version 1 to version 2, which renames some fields."""

from typing import Any
from zlib import crc32

import msgspec

VERSION = 1
RENAMED_KINDS = {"epoch": "worker_epoch"}
RENAMED_FIELDS = {
    "arrival": {"again": "resubmitted"},
    "worker_epoch": {"halved": "budget_halved", "fresh": "new_workers"},
}


def upgrade(raw: bytes) -> bytes:
    """Return the line ``raw`` in version 2.

    The checksum of an intact line is recomputed; that of an altered line stays wrong. Text that is not a JSON object is
    returned unchanged, for the reader to report.
    """
    if not any(word in raw for word in (b'"header"', b'"epoch"', b'"again"')):
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
    if kind == "header" and line.get("version") == VERSION:
        line["version"] = VERSION + 1
    if crc is not None:
        line["crc"] = crc32(msgspec.json.encode(line)) if is_intact else crc
    return msgspec.json.encode(line) + (b"\n" if raw.endswith(b"\n") else b"")

"""Rows beside the tokens of a message, by kind."""

from typing import Any

import msgspec

from quire.protocol.wire.side_rows import Rows, SideKind, SideRows, find_rows


def parts_of(message: Any, kind: SideKind) -> list[tuple[int, int, Rows]]:
    """Return (handle, start, rows) of each part of this kind."""
    found = find_rows(message.side, kind)
    return [] if found is None else list(found.parts())


def side_rows(kind: SideKind, *parts: tuple[int, int, Rows]) -> SideRows:
    """Return the rows of these parts, of which there is one at least."""
    (found,) = SideRows.of(kind, parts)
    return found


def with_rows(message: Any, kind: SideKind, rows: SideRows | list[SideRows] | None) -> Any:
    """Return the message with these rows of the kind, or with none."""
    others = [each for each in message.side if each.kind != kind.number]
    return msgspec.structs.replace(message, side=others + (rows if isinstance(rows, list) else [rows] * bool(rows)))

"""Unknown fields of request bodies: ignored, or refused."""

import re
from collections.abc import Collection
from typing import Literal

from quire.frontend.http.schema.errors import shorten
from quire.frontend.http.schema.foreign_fields import suggest
from quire.protocol.errors import InvalidRequest
from quire.protocol.process.log import event_logger

log = event_logger("http")

Policy = Literal["ignore", "refuse"]

MAX_NAME = 64
MAX_NAMES = 16
"""Names in the response header of one request."""
MAX_LOGGED = 256
"""Names in the log of one process: a client can invent any number of names."""


class UnknownFields:
    """The policy of one server, and the names that are in its log already. Thread-safe."""

    def __init__(self, policy: Policy = "ignore") -> None:
        self.refused = policy == "refuse"
        self._logged: set[str] = set()

    def warn(self, name: str, near: str) -> None:
        """Log a name once. ``near``: the closest known name in words, or ""."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        log.warning(f"unknown request field ignored{near}", field=name)
        if len(self._logged) == MAX_LOGGED:
            log.warning("further unknown request fields are not logged", names=MAX_LOGGED)


class Ignored:
    """The unknown fields of one request."""

    def __init__(self, fields: UnknownFields) -> None:
        self._fields = fields
        self.names: list[str] = []

    def add(self, path: str, known: Collection[str]) -> None:
        """Note an unknown field; raise InvalidRequest if the server refuses them. ``known``: the known paths."""
        if self._fields.refused:
            raise unknown_field(path, known)
        self.note(path, known)

    def note(self, path: str, known: Collection[str]) -> None:
        """Note a field that has no effect."""
        # The same field of several tools is one name. The header allows printable ASCII, and separates with commas.
        name = re.sub(r"[^\w.-]", "?", re.sub(r"\[\d+\]", "", path[: 2 * MAX_NAME]), flags=re.ASCII)[:MAX_NAME] or "?"
        if name in self.names or len(self.names) >= MAX_NAMES:
            return
        self.names.append(name)
        self._fields.warn(name, suggest(name, known))


def unknown_field(path: str, known: Collection[str]) -> InvalidRequest:
    name = path[:MAX_NAME]
    return InvalidRequest(f"unknown field {shorten(path)}{suggest(name, known)}", name, "unknown_parameter")

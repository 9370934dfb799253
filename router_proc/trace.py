"""The router's trace: JSON lines with each consumed event and each choice, which ``quire replay`` compares."""

import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.routing import KEY_BYTES, RoutingConfig
from quire.protocol.wire.kv_events import AllBlocksCleared, KVEvent
from quire.protocol.wire.router_messages import Routed
from quire.router_proc.core.events import CacheChanged, RouterEvent

FORMAT = "quire router trace"
VERSION = 2
"""2: the paces of engines are relative, and count between unlike devices only; a replay refuses 1."""

log = event_logger("router")


class RouterHeader(msgspec.Struct, frozen=True, tag="router-header", tag_field="kind"):
    """Begins the lines of one router process. ``incarnation``: from 1; a later one replaced a router that died."""

    config: RoutingConfig
    incarnation: int = 1
    format: str = FORMAT
    version: int = VERSION


class Consumed(msgspec.Struct, frozen=True, tag="consumed", tag_field="kind"):
    event: RouterEvent
    client: int = 0


class Chosen(msgspec.Struct, frozen=True, tag="chosen", tag_field="kind"):
    """The answer to the question just consumed."""

    message: Routed
    client: int = 0


RouterLine: TypeAlias = RouterHeader | Consumed | Chosen


class RouterTrace:
    """Writes a trace, with as much of a block's hash as the Router uses. Only the owner can read it: it names jobs, and
    its keys tell whether a prompt was sent.

    A disk that fails ends the trace with one log line; routing continues.
    """

    def __init__(self, path: Path, config: RoutingConfig, incarnation: int) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            how = os.O_TRUNC if incarnation == 1 else os.O_APPEND
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
            os.fchmod(descriptor, 0o600)  # an existing file would keep its mode
            self._file = os.fdopen(descriptor, "wb")
        except OSError as error:
            raise ConfigError(f"cannot write the router's trace {path}: {error.strerror}") from None
        self._encoder = msgspec.json.Encoder()
        self._has_failed = False
        self.write(RouterHeader(msgspec.structs.replace(config, trace=""), incarnation))

    def consumed(self, event: RouterEvent, client: int) -> None:
        if isinstance(event, CacheChanged):
            event = CacheChanged(event.engine, list(map(_shortened, event.events)))
        self.write(Consumed(event, client))

    def write(self, line: RouterLine) -> None:
        if not self._has_failed:
            try:
                self._file.write(self._encoder.encode(line) + b"\n")
            except OSError as error:
                self._fail(error)

    def flush(self) -> None:
        if not self._has_failed:
            try:
                self._file.flush()
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        self.flush()
        if not self._has_failed:
            self._file.close()

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        log.error("the router's trace ends here: it cannot be written", reason=error.strerror)


def _shortened(event: KVEvent) -> KVEvent:
    if isinstance(event, AllBlocksCleared):
        return event
    return msgspec.structs.replace(event, hashes=[each[:KEY_BYTES] for each in event.hashes])

"""What a fleet hands over to the process of an engine, in a file beside the engine's directory."""

from pathlib import Path

import msgspec

from quire.launch.supervision.supervisor import WorkerProgram
from quire.protocol.config import EngineConfig
from quire.protocol.process.log import LogOptions


class EngineStart(msgspec.Struct, frozen=True):
    """``standby``: keep a standby worker per rank. ``worker``: the program of the workers. ``log``: their log's options
    on nodes."""

    config: EngineConfig
    worker: WorkerProgram
    standby: bool
    log: LogOptions


def start_file(directory: Path) -> Path:
    """Return the file for the engine with this directory."""
    return directory.with_name(f"{directory.name}.start")


def write_start(directory: Path, start: EngineStart) -> None:
    start_file(directory).write_bytes(msgspec.msgpack.encode(start))


def read_start(directory: Path) -> EngineStart:
    return msgspec.msgpack.decode(start_file(directory).read_bytes(), type=EngineStart)

"""Events that a Scheduler consumes: messages from other processes, and events internal to the scheduler process.

Internal events are created by the scheduler loop, and by replays of traces without tokens. They are encoded as messages
for the event log, with their own tags (protocol/wire/link_messages.py).
"""

from typing import TypeAlias

from quire.protocol.wire.adapter_messages import UnloadAdapter
from quire.protocol.wire.front_end_messages import Abort, AddRequest, CallsTool, Control, Stop, TenantService
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SideJobDone


class Hold(Message, frozen=True, tag=15):
    """Hold a request, which cannot start or continue yet. ``reason``: grammar, remote_kv or streaming."""

    request_id: str
    reason: str


class Release(Message, frozen=True, tag=16):
    """Release a held request, which can start now."""

    request_id: str


class Refuse(Message, frozen=True, tag=17):
    """Reject a held request, which can never run; its client gets a Rejected message with the same fields."""

    request_id: str
    code: str
    param: str
    message: str


class Fail(Message, frozen=True, tag=18):
    """End a request with ERROR and this detail."""

    request_id: str
    detail: str


class LoadLate(Message, frozen=True, tag=47):
    """The load with this number was not answered in time (``Transfers.load_limit``)."""

    transfer: int


class HostMemory(Message, frozen=True, tag=53):
    """Whether contents can be stored in host memory: before a disk behind it can be used, they cannot."""

    is_open: bool


class Clock(Message, frozen=True, tag=24):
    """The time, in seconds on the scheduler's clock. Decisions that depend on time depend on the last one of these."""

    now: float


Consumed: TypeAlias = (
    AddRequest
    | Abort
    | Stop
    | Control
    | CallsTool
    | Clock
    | Hold
    | Release
    | Refuse
    | Fail
    | ModelRunnerOutput
    | BlocksMoved
    | DiskContents
    | LoadLate
    | HostMemory
    | SideJobDone
    | UnloadAdapter
    | TenantService
)

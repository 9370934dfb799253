"""What a Scheduler consumes: messages that came over a wire, and events that exist in the scheduler process only.

The latter are made by its loop, and by a replay where the tokens are not known. They are encoded as messages, for the
event log, and have tags of their own among those (protocol/wire/link_messages.py).
"""

from typing import TypeAlias

from quire.protocol.wire.front_end_messages import Abort, AddRequest, Control, Stop
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.worker_messages import ModelRunnerOutput


class Hold(Message, frozen=True, tag=15):
    """A waiting request cannot start yet. ``reason``: grammar, remote_kv or streaming."""

    request_id: str
    reason: str


class Release(Message, frozen=True, tag=16):
    """What a held request waited for is there."""

    request_id: str


class Refuse(Message, frozen=True, tag=17):
    """A held request can never run; its ending is a Rejected with the same words."""

    request_id: str
    code: str
    param: str
    message: str


class Fail(Message, frozen=True, tag=18):
    """A request cannot go on; it ends with ERROR and this detail."""

    request_id: str
    detail: str


Consumed: TypeAlias = AddRequest | Abort | Stop | Control | Hold | Release | Refuse | Fail | ModelRunnerOutput

"""What a Scheduler consumes: messages that came over a wire, and events that exist in the scheduler process only.

The latter are made by its loop, and by a replay where the tokens are not known. They are encoded as messages, for the
event log, and have tags of their own among those (protocol/wire/link_messages.py).
"""

from typing import TypeAlias

import msgspec

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import Abort, AddRequest, Control, Ended, Stop
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.worker_messages import ModelRunnerOutput


class OpaqueRequest(Message, frozen=True, tag=14):
    """An arrival without its tokens, for replay: lengths, and the name of each full block (``block_hashes`` joined).

    Names of blocks that its answer will fill may stand behind those of the prompt.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_hashes: bytes
    hash_bytes: int = 32
    priority: int = 0
    arrival: float = 0.0
    num_output_tokens: int = 0
    tenant: int = 0
    again: bool = False


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


class OpaqueResult(Message, frozen=True, tag=43):
    """A result without its tokens, for replay: who got one, ended or was bad.

    ``handles``: absent while the same as in the last result that had them.
    """

    step: int
    handles: Int32 | None
    ended: list[Ended]
    counts: Int32 | None = None
    drafts: Int32 | None = None
    bad: list[int] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    failed: list[tuple[int, str]] = msgspec.field(default_factory=list)


Consumed: TypeAlias = (
    AddRequest
    | OpaqueRequest
    | Abort
    | Stop
    | Control
    | Hold
    | Release
    | Refuse
    | Fail
    | ModelRunnerOutput
    | OpaqueResult
)

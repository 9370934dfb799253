"""The lines of a trace file: JSON objects, one per line, each with its ``kind``. See docs/traces.md.

Both sides use these types: the recorder writes them, the reader decodes and checks them. Lines say what changed, not
what is: a steady step costs a short decision and a short result, whatever the batch. ``now`` is monotonic seconds on
the scheduler's clock. Names of blocks are cut to ``Header.hash_bytes``; they are base64 as msgspec has bytes in JSON.
"""

from typing import TypeAlias
from zlib import crc32

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import Abort, Control, Ended, Stop
from quire.scheduler_proc.core.events import Fail, Hold, Refuse, Release
from quire.scheduler_proc.kv.block_hash import SHORT_HASH_BYTES
from quire.scheduler_proc.trace.keyframe import IdleState

FORMAT = "quire-trace"
VERSION = 2
HASH_BYTES = SHORT_HASH_BYTES


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """``crc``: CRC-32 of the line as ``encode_line`` has it without this field; see ``is_intact``."""

    crc: int | None = None


class Header(Line, frozen=True, kw_only=True, tag="header"):
    """First line of every file of a trace: all that a replay needs to build the same Scheduler.

    Attributes:
        part: from 0; files after the first, when it was rotated, go on where the one before ended.
        wall: seconds since 1970 at ``now``.
        prompts: arrivals have their tokens.
        complete: false for a crash dump that begins in the middle. Its second line is a keyframe, from which it can be
            replayed; without one it can be looked at only.
    """

    format: str
    version: int
    quire: str
    config: EngineConfig
    kv_layout: KVLayout
    num_blocks: int
    now: float
    wall: float
    part: int = 0
    hash_bytes: int = HASH_BYTES
    prompts: bool = False
    complete: bool = True


class Keyframe(Line, frozen=True, kw_only=True, tag="keyframe"):
    """Where a trace that is not complete begins, and nowhere else. Names in ``state`` are cut."""

    now: float
    state: IdleState


class Arrival(Line, frozen=True, kw_only=True, tag="arrival"):
    """A request that was accepted (one that was refused changed nothing, and is only counted).

    ``sampling`` has what decides how long it runs and who looks at it; no texts, schemas or token lists.
    ``block_hashes``: names of its full blocks, joined.
    """

    now: float
    client: int = 0
    req_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    priority: int = 0
    arrival: float = 0.0
    job_id: str = ""
    sampling: SamplingParams
    seed: int = 0
    tenant: int = 0
    resubmitted: bool = False
    block_hashes: bytes = b""
    prompt_token_ids: list[int] | None = None


OtherEvent: TypeAlias = Abort | Stop | Control | Hold | Release | Refuse | Fail


class Event(Line, frozen=True, kw_only=True, tag="event"):
    """Anything else that the Scheduler consumed, but results, as the array that it is on the wire."""

    now: float
    client: int = 0
    event: OtherEvent
    hashes: list[tuple[int, bytes]] = []


class StepSnapshot(Line, frozen=True, kw_only=True, tag="step_snapshot"):
    """Before a decision, where anything changed since the last one (fields as in seed-style scheduler traces)."""

    step: int
    now: float
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    gpu_cached_blocks: int
    num_pinned: int = 0


class PrefixCacheEvent(Line, frozen=True, kw_only=True, tag="prefix_cache_event"):
    """A request was let in by the step's decision, which follows."""

    step: int
    req_id: str
    job_id: str = ""
    local_hit_tokens: int
    external_hit_tokens: int = 0
    total_prompt_tokens: int
    num_tokens: int


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that the workers are told of whole."""

    handle: int
    req_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: list[int]
    priority: int


class Reason(msgspec.Struct, array_like=True, frozen=True):
    """``what``: wait, preempt or evict; as ``scheduler_proc/requests/reasons.py`` has it."""

    what: str
    req_id: str
    reason: str
    beneficiary: str = ""
    num_blocks: int = 0


class StepDecision(Line, frozen=True, kw_only=True, tag="step_decision"):
    """One step's diff. A request not named here that runs computes one token.

    Attributes:
        new: rows to build, with ``block_ids`` for all of them, one after the other.
        appended: handle, group, block id, handle, ... of blocks given to held requests.
        counts, drafts: (handle, tokens) and (handle, drafts) of those that compute other than one token.
        reasons: why somebody waits, was put out, or lost a content, since the last line that had any.
        hashes: (handle, name) of blocks that became full while it was decided.
    """

    step: int
    now: float
    removed: list[int] = []
    parked: list[int] = []
    unparked: list[int] = []
    new: list[NewRow] = []
    block_ids: list[int] = []
    appended: list[int] = []
    counts: list[tuple[int, int]] = []
    drafts: list[tuple[int, int]] = []
    awaits_sample_inputs: bool = False
    reasons: list[Reason] = []
    hashes: list[tuple[int, bytes]] = []


class Tick(Line, frozen=True, kw_only=True, tag="tick"):
    """It was asked for a step, and had none."""

    now: float
    reasons: list[Reason] = []
    hashes: list[tuple[int, bytes]] = []


class Result(Line, frozen=True, kw_only=True, tag="result"):
    """A step's result. ``handles``: absent while the same as in the last one that had them. Else as OpaqueResult."""

    step: int
    now: float
    seconds: float = 0.0
    handles: list[int] | None = None
    counts: list[int] | None = None
    drafts: list[int] | None = None
    bad: list[int] = []
    failed: list[tuple[int, str]] = []
    ended: list[Ended] = []
    hashes: list[tuple[int, bytes]] = []


class ClientDropped(Line, frozen=True, kw_only=True, tag="client_dropped"):
    now: float
    client: int
    hashes: list[tuple[int, bytes]] = []


class WorkerEpoch(Line, frozen=True, kw_only=True, tag="worker_epoch"):
    """Running requests restart. ``budget_halved``: the token budget is half of what it was. ``new_workers``: on new
    workers, whose KV cache is empty."""

    now: float
    budget_halved: bool = False
    new_workers: bool = False
    reason: str = ""
    hashes: list[tuple[int, bytes]] = []


class Lost(Line, frozen=True, kw_only=True, tag="lost"):
    """So many lines are missing here: the disk was too slow. What follows cannot be replayed exactly."""

    lines: int


class End(Line, frozen=True, kw_only=True, tag="end"):
    """The engine stopped, or the file was rotated (``next_part`` is true). A file without it was cut short."""

    now: float
    reason: str = ""
    next_part: bool = False


AnyLine: TypeAlias = (
    Header
    | Keyframe
    | Arrival
    | Event
    | StepSnapshot
    | PrefixCacheEvent
    | StepDecision
    | Tick
    | Result
    | ClientDropped
    | WorkerEpoch
    | Lost
    | End
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def encode_line(line: Line) -> bytes:
    """The line with its CRC, without a newline."""
    body = _encoder.encode(line)
    return b'%b,"crc":%d}' % (body[:-1], crc32(body))


def decode_line(raw: bytes | str) -> AnyLine:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(raw)


def is_intact(line: Line) -> bool:
    """Whether the line is what was written, whatever its spaces; one without a CRC is taken as it is."""
    if line.crc is None:
        return True
    return crc32(_encoder.encode(msgspec.structs.replace(line, crc=None))) == line.crc

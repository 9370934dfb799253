"""The lines of a trace file: JSON objects, one per line, each with its ``kind``. See docs/traces.md.

The recorder writes these types; the reader decodes and checks them. Lines contain changes, not state: a steady decode
step costs a short decision and a short result for any batch size. ``now`` is in monotonic seconds of the scheduler's
clock. Block hashes are cut to ``Header.hash_bytes`` bytes and base64-encoded, like all bytes that msgspec writes as
JSON.
"""

from typing import Any, TypeAlias, get_args
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.block_hash import SHORT_HASH_BYTES
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.adapter_messages import UnloadAdapter
from quire.protocol.wire.front_end_messages import Abort, AddRequest, CallsTool, Control, Ended, Stop, TenantService
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import SideJobDone
from quire.scheduler_proc.costs.costs import CostState
from quire.scheduler_proc.requests.events import Clock, Fail, Hold, HostMemory, LoadLate, Refuse, Release
from quire.scheduler_proc.trace.snapshot import Snapshot

FORMAT = "quire-trace"
VERSION = 4
HASH_BYTES = SHORT_HASH_BYTES


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """The base of all lines. ``crc``: CRC-32 of the line encoded without this field; see ``is_intact``."""

    crc: int | None = None


class Header(Line, frozen=True, kw_only=True, tag="header"):
    """The first line of every file of a trace: all that a replay needs to make the same Scheduler.

    Attributes:
        part: number of the file, from 0; each file continues the previous one.
        wall: seconds since 1970 at ``now``.
        began: ``wall`` of part 0, by which the other parts of the same trace are known; 0 in part 0 itself.
        restarted: the scheduler of the previous part died, and this part begins with a new one, without requests.
        prompts: whether arrivals have their token ids.
        num_host_pages, num_disk_pages: pages of host memory and on disk, page 0 of each included; 0 without.
        forgotten: contents on disk up to this generation had been forgotten.
        num_slots: slots of recurrent states, slot 0 included; 0 for models without.
        costs: what the scheduler knew about the costs of prefills and loads.
        complete: false for a crash dump that starts in the middle of a run. When its second line is a keyframe, it can
            be replayed from there; otherwise it can only be read.
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
    began: float = 0.0
    restarted: bool = False
    num_host_pages: int = 0
    num_disk_pages: int = 0
    forgotten: int = 0
    costs: CostState = CostState()
    num_slots: int = 0

    @property
    def trace_id(self) -> float:
        """Equal in all parts of one trace."""
        return self.began or self.wall


class Keyframe(Line, frozen=True, kw_only=True, tag="keyframe"):
    """The start of an incomplete trace; occurs nowhere else.

    Attributes:
        snapshot: the state, with hashes that are cut; None in a line of before 2026-11-28, which had another form.
        num_requests, stale_until, handles, removed: parts of it that are used without a Scheduler: the number of
            requests, the step up to which results are ignored, the handles of the last result that had them, and those
            that the next diff removes.
    """

    now: float
    num_requests: int = 0
    stale_until: int = -1
    handles: list[int] = []
    removed: list[int] = []
    snapshot: Snapshot | None = None


class Arrival(Line, frozen=True, kw_only=True, tag="arrival"):
    """An accepted request. A refused one changes no state and is only counted.

    Attributes:
        request: the message, without what its user wrote; see ``without_texts``. It has tokens only if
            ``Header.prompts``.
        num_prompt_tokens, num_output_tokens: lengths; those of a fork are known only when it arrives.
        block_hashes: hashes of its full blocks, concatenated.
        hashes: (handle, hash) of the blocks of the request that it forks, which became full when it was asked for its
            tokens.
    """

    now: float
    client: int = 0
    request: AddRequest
    num_prompt_tokens: int
    num_output_tokens: int = 0
    hashes: list[tuple[int, bytes]] = []
    block_hashes: bytes = b""

    @property
    def req_id(self) -> str:
        return self.request.request_id


OtherEvent: TypeAlias = (
    Abort
    | CallsTool
    | Clock
    | Stop
    | Control
    | Hold
    | Release
    | Refuse
    | Fail
    | BlocksMoved
    | DiskContents
    | LoadLate
    | HostMemory
    | SideJobDone
    | UnloadAdapter
    | TenantService
)


class Event(Line, frozen=True, kw_only=True, tag="event"):
    """Any other event that the Scheduler consumed, except results, encoded as on the wire."""

    now: float
    client: int = 0
    event: OtherEvent
    hashes: list[tuple[int, bytes]] = []


class StepSnapshot(Line, frozen=True, kw_only=True, tag="step_snapshot"):
    """The state before a decision, written when it changed. Fields are named as in other schedulers' traces.

    ``num_pinned``: programs whose blocks are kept between two turns. ``pinned_job_ids``: their job ids, or "";
    ``pinned_blocks``: how many blocks of each. ``tiers``: pages of host memory and disk: free, all, with content.
    """

    step: int
    now: float
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    gpu_cached_blocks: int
    num_pinned: int = 0
    pinned_blocks: list[int] = []
    pinned_job_ids: list[str] = []
    tiers: dict[str, tuple[int, int, int]] = {}


class PrefixCacheEvent(Line, frozen=True, kw_only=True, tag="prefix_cache_event"):
    """A request was admitted by the step's decision, which follows.

    Attributes:
        local_hit_tokens, external_hit_tokens: tokens from the prefix cache: those that the device had, and those that
            were loaded for the request. Before version 3 the first had both.
        connector_name: the tiers that had more of its prefix than the device: ``host``, ``disk`` or ``host+disk``.
        load_choice: what was chosen for that part: load, compute, split, or "" if there was none, or no choice.
        load_kv_async: whether it is copied to the device while the request waits or computes the tokens before.
        load_seconds, compute_seconds: the reason: as of Choice, 0 if not known.
    """

    step: int
    req_id: str
    job_id: str = ""
    local_hit_tokens: int
    external_hit_tokens: int = 0
    total_prompt_tokens: int
    num_tokens: int
    connector_name: str = ""
    load_choice: str = ""
    load_kv_async: bool = False
    load_seconds: float = 0.0
    compute_seconds: float = 0.0


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that the step adds to the workers' batch."""

    handle: int
    req_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: list[int]
    priority: int


class Reason(msgspec.Struct, array_like=True, frozen=True):
    """Why a request waits or was preempted, or a content was evicted; see ``scheduler_proc/requests/reasons.py``.

    ``what``: ``wait``, ``preempt``, ``evict``, ``store``, ``choose``, ``pin`` or ``unpin``.
    """

    what: str
    req_id: str
    reason: str
    beneficiary: str = ""
    num_blocks: int = 0


class StepDecision(Line, frozen=True, kw_only=True, tag="step_decision"):
    """The diff of one step. A running request that is not listed computes one token.

    Attributes:
        new: rows to add, with ``block_ids`` for all of them, concatenated.
        appended: handle, group, block id, handle, ... of blocks appended to existing rows.
        counts, drafts: (handle, tokens) and (handle, drafts) of requests that compute other than one token.
        copies: (source, target) of copied blocks.
        chosen: handles of beams that continue with another token than they sampled.
        forks: (handle, parent) of new rows that sample from the logits of another row, and compute nothing.
        state_slots: slots of the states of new rows, in models with states.
        state_copies: (source, target) of copied slots.
        reasons: decisions since the last line with reasons.
        hashes: (handle, hash) of blocks that became full during the decision.
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
    copies: list[tuple[int, int]] = []
    forks: list[tuple[int, int]] = []
    chosen: list[int] = []
    awaits_sample_inputs: bool = False
    reasons: list[Reason] = []
    hashes: list[tuple[int, bytes]] = []
    state_slots: list[int] = []
    state_copies: list[tuple[int, int]] = []


class Tick(Line, frozen=True, kw_only=True, tag="tick"):
    """A call of ``schedule()`` that returned no step."""

    now: float
    reasons: list[Reason] = []
    hashes: list[tuple[int, bytes]] = []


class Result(Line, frozen=True, kw_only=True, tag="result"):
    """The result of a step: the fields of ModelRunnerOutput on which decisions depend, and what they caused.

    It is not the message itself, because a steady step must cost few bytes: the message is a list, with all fields.

    ``handles`` is absent when equal to those of the last result that had them. ``beams``: (handle, parents) of each
    beam search that continues: its beam i continues beam ``parents[i]``.
    """

    step: int
    now: float
    seconds: float = 0.0
    handles: list[int] | None = None
    counts: list[int] | None = None
    drafts: list[int] | None = None
    bad: list[int] = []
    failed: list[tuple[int, str]] = []
    ended: list[Ended] = []
    beams: list[tuple[int, list[int]]] = []
    hashes: list[tuple[int, bytes]] = []


class ClientDropped(Line, frozen=True, kw_only=True, tag="client_dropped"):
    now: float
    client: int
    hashes: list[tuple[int, bytes]] = []


class WorkerEpoch(Line, frozen=True, kw_only=True, tag="worker_epoch"):
    """Running requests restart in a new worker epoch.

    ``budget_halved``: the token budget is half of what it was. ``new_workers``: the workers were replaced, and their KV
    cache is empty.
    """

    now: float
    budget_halved: bool = False
    new_workers: bool = False
    reason: str = ""
    hashes: list[tuple[int, bytes]] = []


class Lost(Line, frozen=True, kw_only=True, tag="lost"):
    """``lines`` lines are missing here because the disk was too slow. The rest cannot be replayed exactly."""

    lines: int


class End(Line, frozen=True, kw_only=True, tag="end"):
    """The engine stopped, or the file was rotated (``next_part``). A file without this line was truncated."""

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


def _decode_array(kind: Any, numbers: list[int]) -> npt.NDArray[Any]:
    """``kind``: an annotation of protocol/wire/arrays.py."""
    (dtype,) = get_args(get_args(kind)[1])
    return np.array(numbers, dtype)


_encoder = msgspec.json.Encoder(enc_hook=np.ndarray.tolist)
_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine, dec_hook=_decode_array)


def encode_line(line: Line) -> bytes:
    """Return the line with its CRC, without a newline."""
    body = _encoder.encode(line)
    return b'%b,"crc":%d}' % (body[:-1], crc32(body))


def decode_line(raw: bytes | str) -> AnyLine:
    """Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(raw)


def is_intact(line: Line) -> bool:
    """Return whether the CRC matches, regardless of whitespace. A line without a CRC counts as intact."""
    if line.crc is None:
        return True
    return crc32(_encoder.encode(msgspec.structs.replace(line, crc=None))) == line.crc

"""One request as the scheduler sees it: tokens, progress, status."""

import enum
from collections.abc import Sequence

import numpy as np

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.kv.block_hash import NAME_BYTES, HashChain
from quire.scheduler_proc.requests.draft_state import DraftState
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.repetition import RepetitionWatch


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything after PREEMPTED is an ending."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


STATUS_OF_END = {
    EndReason.STOPPED: RequestStatus.FINISHED_STOPPED,
    EndReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    EndReason.ABORTED: RequestStatus.FINISHED_ABORTED,
    EndReason.ERROR: RequestStatus.FINISHED_ERROR,
    EndReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


class Tokens:
    """Known tokens of a request, prompt then output, as little-endian int32, with the hashes of full blocks."""

    __slots__ = ("_chain", "_data", "_told", "block_hashes", "handle")

    def __init__(self, known: Int32, chain: HashChain | None) -> None:
        """``chain``: an empty one that names the blocks; None where nobody will look contents up."""
        self.handle = -1
        self._told: list[tuple[int, bytes]] | None = None
        self._data = bytearray(np.ascontiguousarray(known, "<i4").data.cast("B") if len(known) else b"")
        self._chain = chain
        self.block_hashes: list[bytes] = [] if chain is None else chain.hashes
        if chain is not None:
            chain.extend(self._data)

    def __len__(self) -> int:
        return len(self._data) >> 2

    def tell(self, handle: int, told: list[tuple[int, bytes]]) -> None:
        """From now on, append (``handle``, short name) of each block that becomes full to ``told``."""
        self.handle, self._told = handle, told

    def append(self, token: int) -> None:
        self.extend(token.to_bytes(4, "little"))

    def extend(self, raw: bytes) -> None:
        """Add the tokens in ``raw``, little-endian int32."""
        self._data += raw
        if self._chain is None:
            return
        known = len(self.block_hashes)
        self._chain.extend(self._data, raw)
        if self._told is not None:
            for name in self.block_hashes[known:]:
                self._told.append((self.handle, name[:NAME_BYTES]))

    def array(self) -> Int32:
        """A copy of all known tokens."""
        return np.frombuffer(bytes(self._data), "<i4")

    def tail(self, start: int) -> list[int]:
        """The known tokens from index ``start`` on; copies no others."""
        tail: list[int] = np.frombuffer(self._data[4 * start :], "<i4").tolist()
        return tail


class OpaqueTokens:
    """Tokens that a trace does not tell: only how many, and the names that their full blocks have, or will have.

    A name shows among ``block_hashes`` once its block is full; a full block for which none was given has none, and so
    do all after it.
    """

    __slots__ = ("_block_size", "_length", "_names", "block_hashes")

    def __init__(self, length: int, block_size: int, names: Sequence[bytes]) -> None:
        """``names``: of the first blocks of ``block_size`` tokens, those to come included as far as they are known."""
        self._length = length
        self._block_size = block_size
        self._names = list(names)
        self.block_hashes = self._names[: length // block_size]

    def __len__(self) -> int:
        return self._length

    def foretell(self, name: bytes) -> None:
        """The name of the next block that has none yet."""
        self._names.append(name)

    def append(self, token: int) -> None:
        self._grow(1)

    def extend(self, raw: bytes) -> None:
        self._grow(len(raw) >> 2)

    def _grow(self, count: int) -> None:
        self._length += count
        known = len(self.block_hashes)
        if self._length >= (known + 1) * self._block_size:
            self.block_hashes += self._names[known : self._length // self._block_size]

    def array(self) -> Int32:
        """Zeros: a simulated worker needs lengths only."""
        return np.zeros(self._length, np.int32)

    def tail(self, start: int) -> list[int]:
        return [0] * (self._length - start)


class Request:
    """State of one request. The scheduler alone changes it.

    Two counts of progress (protocol law 2): ``num_computed_tokens`` counts positions of every step *sent*;
    ``num_tokens`` and ``num_acknowledged_tokens`` grow only with results *applied*; ``num_output_placeholders`` are
    samples in between. While ``cruising`` is set all of them stand still: ask the Cruise, or take it out first.

    Attributes:
        number: order of arrival in this engine.
        order: order of admission among those that run; set anew each time.
        handle: the small integer that stands for it on every wire; -1 before the scheduler gives it one.
        client: index of the front end that it came from.
        tenant: whose it is; those who wait take turns by it, and share rows and blocks (tenants.py).
        turn: what its tenant had been served when it was first let in; -1 before, and once it has lost its place.
        stop_tokens: ids that end it.
        max_total_tokens: prompt and output together can never be more.
        num_acknowledged_tokens: positions whose computing was answered.
        num_in_flight: steps sent and not yet answered in which it runs.
        deaf_until: step up to which results are not this request's any more.
        num_cached_tokens: of the prompt, found in the prefix cache when first scheduled; -1 before.
        num_drafts_in_flight: drafts that it may have in the steps in flight; each is a placeholder that may come to
            nothing.
        draft_state: what its drafts have taught.
        repetition: looks at each token of its answer; None where nobody asked, and in a replay without tokens.
        on_worker, parked: what the workers hold of it, as of the last step sent.
        wait_reason: why it waits, while it does.
        skip_reading_prefix_cache: it needs something of each position that a cache hit does not give.
        joined_step, synced_step, event_step, last_step, leave_step, block_step: for the Cruise alone.
    """

    __slots__ = (
        "arrival",
        "block_step",
        "client",
        "cruising",
        "deaf_until",
        "draft_state",
        "event_step",
        "handle",
        "introduced",
        "joined_step",
        "last_step",
        "leave_step",
        "max_total_tokens",
        "num_acknowledged_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_in_flight",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "on_worker",
        "order",
        "parked",
        "priority",
        "repetition",
        "request_id",
        "sampling",
        "seed",
        "skip_reading_prefix_cache",
        "status",
        "stop_tokens",
        "synced_step",
        "tenant",
        "tokens",
        "turn",
        "wait_reason",
    )

    def __init__(
        self,
        *,
        client: int,
        request_id: str,
        tokens: Tokens | OpaqueTokens,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        seed: int,
        stop_tokens: frozenset[int],
        max_total_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        tenant: int = 0,
        handle: int = -1,
    ) -> None:
        self.number = self.order = 0
        self.handle = handle
        self.client = client
        self.request_id = request_id
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.seed = seed
        self.stop_tokens = stop_tokens
        self.max_total_tokens = max_total_tokens
        self.priority = priority
        self.arrival = arrival
        self.tenant = tenant
        self.turn = -1
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_acknowledged_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight = 0
        self.num_cached_tokens = -1
        self.deaf_until = -1
        self.num_preemptions = 0
        self.num_drafts_in_flight = 0
        self.draft_state = DraftState()
        self.repetition: RepetitionWatch | None = None
        self.wait_reason = WaitReason.QUEUED
        self.skip_reading_prefix_cache = False
        self.introduced = False
        self.on_worker = False
        self.parked = False
        self.cruising = False
        self.joined_step = self.synced_step = self.event_step = self.block_step = 0
        self.last_step = self.leave_step = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and acknowledged output."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return self.tokens.block_hashes

    @property
    def num_tokens_to_compute(self) -> int:
        """Positions known, or about to be, that no step has computed: 1 while decoding, more in a prefill."""
        return len(self.tokens) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def has_grammar(self) -> bool:
        return self.sampling.structured_outputs is not None

    @property
    def is_watched(self) -> bool:
        """Somebody looks at each of its tokens as it comes, so that it cannot cruise."""
        return self.has_grammar or self.sampling.repetition_detection is not None

    @property
    def repeats_itself(self) -> bool:
        """Its newest tokens are what it is watched for; it may have been too early to end it."""
        watch = self.repetition
        return watch is not None and watch.found and self.num_output_tokens >= self.sampling.min_tokens

    @property
    def needs_no_more_steps(self) -> bool:
        """The last token that its length allows is in flight, or there, even if no draft is accepted."""
        samples = self.num_output_placeholders - self.num_drafts_in_flight
        return len(self.tokens) + samples >= self.max_total_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
        )

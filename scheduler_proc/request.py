"""One request as the scheduler sees it: tokens, progress, status."""

import enum
from collections.abc import Sequence

import numpy as np

from quire.protocol.messages import EndReason, Int32
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler_proc.kv.block_hash import hash_blocks, root_hash


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything after PREEMPTED is an ending."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


STATUS_OF_END = {
    EndReason.STOPPED: RequestStatus.FINISHED_STOPPED,
    EndReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    EndReason.ABORTED: RequestStatus.FINISHED_ABORTED,
    EndReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class Tokens:
    """Known tokens of a request, prompt then output, in one growing int32 array, with the hashes of full blocks."""

    def __init__(self, known: Int32, block_size: int, cache_salt: str) -> None:
        self._data = known.astype(np.int32)
        self._length = len(known)
        self._block_size = block_size
        self._parent = root_hash(cache_salt)
        self.block_hashes: list[bytes] = []
        self._hash_new_blocks()

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.empty(max(64, self._length // 2), np.int32)])
        self._data[self._length] = token
        self._length += 1
        if self._length % self._block_size == 0:
            self._hash_new_blocks()

    def array(self) -> Int32:
        """A view of all known tokens; valid until the next append."""
        return self._data[: self._length]

    def _hash_new_blocks(self) -> None:
        start = len(self.block_hashes) * self._block_size
        new = hash_blocks(self._data[start : self._length], self._block_size, self._parent)
        if new:
            self.block_hashes += new
            self._parent = new[-1]


class OpaqueTokens:
    """Tokens that a trace does not tell: only how many, and the given hashes of full blocks."""

    def __init__(self, length: int, block_hashes: Sequence[bytes]) -> None:
        self._length = length
        self.block_hashes = list(block_hashes)

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        self._length += 1

    def array(self) -> Int32:
        """Zeros: a simulated worker needs lengths only."""
        return np.zeros(self._length, np.int32)


class Request:
    """State of one request. The scheduler alone changes it.

    Two counts of progress (protocol law 2): ``num_computed_tokens`` counts positions of every step *sent*;
    ``num_tokens`` grows only with results *applied*; ``num_output_placeholders`` are samples in between.

    Attributes:
        handle: the small integer that stands for it on every wire; -1 before the scheduler gives it one.
        client: index of the front end that it came from.
        stop_tokens: ids that end it.
        max_total_tokens: prompt and output together can never be more.
        num_in_flight: steps sent and not yet answered in which it runs.
        num_cached_tokens: of the prompt, found in the prefix cache when first scheduled; -1 before.
        on_worker, parked: what the workers hold of it, as of the last step sent.
    """

    __slots__ = (
        "arrival",
        "client",
        "handle",
        "introduced",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "on_worker",
        "parked",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "status",
        "stop_tokens",
        "tokens",
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
        handle: int = -1,
    ) -> None:
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
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.introduced = False
        self.on_worker = False
        self.parked = False

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
    def needs_no_more_steps(self) -> bool:
        """The last token that its length allows is in flight, or there."""
        return len(self.tokens) + self.num_output_placeholders >= self.max_total_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
        )

"""Requests of which a trace has no tokens: arrivals, results, and what is known of their text."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import Ended, EndReason
from quire.scheduler_proc.core.endings import Ending, length_ending
from quire.scheduler_proc.core.in_flight import Sampled
from quire.scheduler_proc.requests.request import Request


class OpaqueRequest(msgspec.Struct, frozen=True):
    """An arrival without its tokens: lengths, and the name of each full block (``block_hashes`` joined).

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
    resubmitted: bool = False

    @property
    def names(self) -> list[bytes]:
        """The single hashes, cut without Python code for each: a prompt may have thousands."""
        joined = self.block_hashes
        names: list[bytes] = np.frombuffer(joined, f"V{self.hash_bytes}").tolist() if joined else []
        return names


class OpaqueResult(msgspec.Struct, frozen=True):
    """A result without its tokens: the requests that got one, ended or were bad.

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


class OpaqueTokens:
    """A TokenStore that knows only how many tokens there are, and the names that their full blocks have, or will have.

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

    def add_future_hash(self, name: bytes) -> None:
        """The name of the next block that has none yet."""
        self._names.append(name)

    def follow(self, on_full_block: Callable[[bytes], None]) -> None:
        """The names came from the reader of the trace, which is not called back with them."""

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


class RecordedEndings:
    """The endings that the recorded result had, in place of a look at its tokens."""

    def __init__(self, ended: Sequence[Ended]) -> None:
        self._ended = {each.handle: each for each in ended}

    def candidates(self, sampled: Sampled) -> list[int]:
        return list(self._ended)

    def verdict(self, request: Request, token: int) -> Ending | None:
        told = self._ended.get(request.handle)
        if told is None or request.num_output_tokens < told.num_output_tokens:
            return length_ending(request)
        return Ending(EndReason(told.reason), told.stop_reason, told.detail)

    def bad_row_detail(self, handle: int) -> str:
        told = self._ended.get(handle)
        return "" if told is None else told.detail

"""Events and requests without tokens: arrivals, results and token stores with lengths and block hashes only."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.protocol.block_hash import SHORT_HASH_BYTES
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, Ended, EndReason
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.endings import Ending, length_ending
from quire.scheduler_proc.features.beams.beams import BeamGroup, SearchEnding
from quire.scheduler_proc.features.beams.search import BeamChoice
from quire.scheduler_proc.messages.results import Sampled
from quire.scheduler_proc.requests.request import Request


class OpaqueRequest(msgspec.Struct, frozen=True):
    """An arrival without tokens: lengths, and the hash of each full block (``block_hashes``, concatenated).

    Hashes of blocks that the output will fill may follow those of the prompt. ``request`` has everything else.
    """

    request: AddRequest
    num_prompt_tokens: int
    num_output_tokens: int = 0
    block_hashes: bytes = b""
    hash_bytes: int = SHORT_HASH_BYTES

    @property
    def names(self) -> list[bytes]:
        """The block hashes as a list, split by numpy because a prompt may have thousands."""
        joined = self.block_hashes
        names: list[bytes] = np.frombuffer(joined, f"V{self.hash_bytes}").tolist() if joined else []
        return names


class OpaqueResult(msgspec.Struct, frozen=True):
    """A step result without tokens: the requests that finished, and how beam searches continue."""

    output: ModelRunnerOutput
    ended: list[Ended] = []
    beams: list[tuple[int, list[int]]] = []


class OpaqueTokens:
    """A TokenStore with a length and block hashes but no tokens.

    A hash appears in ``block_hashes`` once its block is full. After the first full block without a known hash,
    ``block_hashes`` stops growing.
    """

    __slots__ = ("_block_size", "_length", "_names", "block_hashes")

    def __init__(self, length: int, block_size: int, names: Sequence[bytes]) -> None:
        """``names`` are the hashes of the first blocks of ``block_size`` tokens, including blocks not full yet."""
        self._length = length
        self._block_size = block_size
        self._names = list(names)
        self.block_hashes = self._names[: length // block_size]

    def __len__(self) -> int:
        return self._length

    def add_future_hash(self, name: bytes) -> None:
        """Add the hash of the first block that has none."""
        self._names.append(name)
        self._grow(0)

    def fork(self, num_tokens: int) -> "OpaqueTokens":
        return OpaqueTokens(num_tokens, self._block_size, self._names[: num_tokens // self._block_size])

    def follow(self, on_full_block: Callable[[bytes], None]) -> None:
        """Ignore the callback: the hashes come from the trace, not from tokens."""

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
        """Return zeros: a simulated worker needs only the length."""
        return np.zeros(self._length, np.int32)

    def tail(self, start: int, end: int | None = None) -> list[int]:
        return [0] * ((self._length if end is None else end) - start)

    @property
    def salts(self) -> tuple[str, ...]:
        return ()


class RecordedEndings:
    """Endings, and choices of beam searches, taken from the recorded result instead of from its tokens."""

    def __init__(self, ended: Sequence[Ended], beams: Sequence[tuple[int, list[int]]]) -> None:
        self._ended = {each.handle: each for each in ended}
        self._parents = dict(beams)

    def candidates(self, sampled: Sampled) -> list[int]:
        return list(self._ended)

    def ending_after(self, request: Request, token: int) -> Ending | None:
        recorded = self._ended.get(request.handle)
        if recorded is None or request.num_output_tokens < recorded.num_output_tokens:
            return length_ending(request)
        return Ending(EndReason(recorded.reason), recorded.stop_reason, recorded.detail)

    def search_outcome(self, group: BeamGroup) -> BeamChoice | SearchEnding:
        parents, recorded = self._parents.get(group.leader.handle), self._ended.get(group.leader.handle)
        if parents is not None:
            if not all(0 <= parent < len(group.beams) for parent in parents):
                raise ValueError(f"a beam continues one that does not exist: {parents}")
            return BeamChoice(parents, [0] * len(parents))
        if recorded is None:
            raise ValueError(f"beam search of handle {group.leader.handle} neither continues nor ends")
        ending = Ending(EndReason(recorded.reason), recorded.stop_reason, recorded.detail)
        return SearchEnding(ending, recorded.num_output_tokens, [])

    def bad_row_detail(self, handle: int) -> str:
        recorded = self._ended.get(handle)
        return "" if recorded is None else recorded.detail

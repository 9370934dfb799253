"""Which engines have which KV blocks in their caches: exact, in bulk, and with bounded memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.routing import KEY_BYTES, MAX_ENGINES
from quire.router_proc.core.key_table import KeyTable

MEDIA = ("device", "host", "disk")
MAX_QUEUED = 32_768
"""Changes that are queued before they are applied: in bulk, each costs a tenth of what it costs alone."""
NUM_SAMPLES = 4
"""Blocks of a prompt that are looked up at least, spread evenly."""
MAX_MEDIA_SAMPLES = 64
"""Blocks of a hit that are looked up at most to learn on which media they are."""
DEFAULT_MAX_BLOCKS = 2**22
"""Most blocks of an engine whose pool is not known."""

Keys = memoryview
"""Block keys as integers of 64 bits."""
_DTYPES = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (MAX_ENGINES, np.uint64))


class CachedPrefix(NamedTuple):
    """The longest prefix of a prompt that an engine has.

    Attributes:
        num_blocks: blocks of the prefix, in any medium.
        num_host, num_disk: those of them that are only on that medium, in this order of preference.
    """

    num_blocks: int
    num_host: int = 0
    num_disk: int = 0

    def elsewhere(self, size: int) -> tuple[int, int]:
        """Return the tokens that are only on each of these media. ``size``: tokens of a block."""
        return self.num_host * size, self.num_disk * size


NO_HIT = CachedPrefix(0)


def keys_of(raw: bytes) -> Keys:
    """Return the block keys of concatenated prefixes of hashes. Raises TypeError for a part of a key."""
    return memoryview(raw).cast("Q")


def counted_group(layout: KVLayout) -> int:
    """Return the KV group whose blocks are indexed: the first that keeps all blocks, otherwise 0.

    A request needs its whole prefix there. What other groups keep (a sliding window's last blocks) is cached with it.
    """
    return next((index for index, group in enumerate(layout.groups) if group.keeps_all), 0)


class _Queue:
    """Changes of one engine that are not in the table yet, in order."""

    __slots__ = ("hashes", "runs")

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self.runs: list[tuple[int, bool, int]] = []
        """(medium, whether stored, number of hashes)."""


class BlockIndex:
    """Owns a table of block keys with one bit per engine and medium.

    A key is the first ``KEY_BYTES`` bytes of a block's hash, which covers the whole prefix. Two of 2**22 blocks share a
    key with probability 5e-7; a request is then routed as if it was cached.

    Changes are queued and applied before the next lookup, or earlier: look-ups do not depend on when.

    Attributes:
        overfull: engines that have had more blocks than their pools can hold, so that their events are false. The
            caller has to ``forget`` them.
    """

    def __init__(self) -> None:
        self._table = KeyTable(np.uint8, 1)
        self._queues: dict[int, _Queue] = {}
        self._num_queued = 0
        self._counts: dict[int, list[int]] = {}
        """Blocks by engine and medium."""
        self._limits: dict[int, int] = {}
        self.overfull: set[int] = set()

    # ---- changes

    def stored(self, engine: int, hashes: Sequence[bytes], medium: str) -> None:
        """Note that an engine has these blocks. ``hashes``: all of one length, which is a multiple of KEY_BYTES."""
        self._enqueue(engine, hashes, medium, True)

    def removed(self, engine: int, hashes: Sequence[bytes], medium: str) -> None:
        """Note that an engine has these blocks no more."""
        self._enqueue(engine, hashes, medium, False)

    def cleared(self, engine: int, medium: str = "") -> None:
        """Drop an engine's blocks on a medium; without one, on all."""
        self._apply(engine)
        for number, name in enumerate(MEDIA[: self._table.num_columns]):
            counts = self._counts.get(engine, ())
            if medium in ("", name) and any(counts[number : number + 1]):
                self._table.clear_bit(number, engine)
                self._counts[engine][number] = 0

    def forget(self, engine: int) -> None:
        """Drop all blocks and queued changes of an engine, which starts from nothing."""
        if (queue := self._queues.pop(engine, None)) is not None:
            self._num_queued -= len(queue.hashes)
        self.cleared(engine)
        self._counts.pop(engine, None)
        self.overfull.discard(engine)

    def limit(self, engine: int, max_blocks: int) -> None:
        """Set the most blocks that an engine can have."""
        self._limits[engine] = max_blocks

    def _enqueue(self, engine: int, hashes: Sequence[bytes], medium: str, is_stored: bool) -> None:
        if not hashes:
            return
        queue = self._queues.get(engine)
        if queue is None:
            queue = self._queues[engine] = _Queue()
        queue.hashes += hashes
        queue.runs.append((MEDIA.index(medium), is_stored, len(hashes)))
        self._num_queued += len(hashes)
        if self._num_queued >= MAX_QUEUED:
            self.apply()

    def apply(self) -> None:
        """Apply all queued changes."""
        for engine in sorted(self._queues):
            self._apply(engine)

    def _apply(self, engine: int) -> None:
        queue = self._queues.pop(engine, None)
        if queue is None:
            return
        self._num_queued -= len(queue.hashes)
        # Eight bytes of a hash are enough: what they could confuse costs one request a worse engine and never a wrong
        # token, because each engine compares whole hashes.
        width = len(queue.hashes[0]) // KEY_BYTES
        keys = np.frombuffer(b"".join(queue.hashes), np.uint64)[::width]
        media, stored, lengths = (np.array(column) for column in zip(*queue.runs, strict=True))
        media, stored = np.repeat(media, lengths), np.repeat(stored, lengths)
        self._make_room(engine, int(media.max()) + 1)
        counts = self._counts.setdefault(engine, [0] * len(MEDIA))
        for medium in range(int(media.max()) + 1):
            of_medium = media == medium
            if of_medium.any():
                counts[medium] += self._table.set_bits(medium, engine, keys[of_medium], stored[of_medium])
        # Only noted here: what to do about it needs a time, which this has not.
        if sum(counts) > self._limits.get(engine, DEFAULT_MAX_BLOCKS):
            self.overfull.add(engine)

    def _make_room(self, engine: int, num_media: int) -> None:
        """Widen the table for the number of an engine, or for another medium."""
        dtype = next(dtype for size, dtype in _DTYPES if engine < size)
        columns = max(num_media, self._table.num_columns)
        if np.dtype(dtype).itemsize > self._table.dtype.itemsize or columns > self._table.num_columns:
            wider = dtype if np.dtype(dtype).itemsize > self._table.dtype.itemsize else self._table.dtype
            self._table.widen(wider, columns)

    # ---- look-ups

    def hits(self, keys: Keys) -> dict[int, CachedPrefix]:
        """Return the prefix of a prompt that each engine has; engines without its first block are left out.

        A cache has all blocks before one that it has, because it evicts the last ones of a sequence first. So
        NUM_SAMPLES blocks, spread evenly, are looked up, and then those at which a prefix may end, by bisection. The
        time hardly depends on the length. A block that is missing in spite of that (a hole) may stay unnoticed: the
        prefix then ends there or at a later missing block.

        Args:
            keys: the prompt's block keys, from the first.
        """
        if self._queues:
            self.apply()
        found: dict[int, CachedPrefix] = {}
        if not len(keys):
            return found
        last, mask_of = len(keys) - 1, self._table.mask
        at, mask = 0, mask_of(keys[0])
        step = max(1, last // NUM_SAMPLES)
        while mask and at < last:
            to = min(at + step, last)
            both = mask & mask_of(keys[to])
            while both != mask:  # a prefix ends after block ``at`` and before block ``to``
                # Bisected for all engines at once, by their bits: engines that lose the prefix in the same piece
                # usually lose it at the same block, where conversations part.
                end, lost = self._first_end(keys, at, mask, to)
                for engine in bits_of(lost):
                    found[engine] = CachedPrefix(end)
                at, mask = end - 1, mask ^ lost
                both &= mask
            at = to
        for engine in bits_of(mask):
            found[engine] = CachedPrefix(len(keys))
        return found if self._table.num_columns == 1 else self._with_media(keys, found)

    def _first_end(self, keys: Keys, low: int, mask: int, high: int) -> tuple[int, int]:
        """Return the first block that some engine has not, between ``low`` and ``high``, and which engines.

        Args:
            mask: engines that have block ``low``, of which some do not have block ``high``.
        """
        mask_of, lost = self._table.mask, mask & ~self._table.mask(keys[high])
        while high - low > 1:
            middle = (low + high) // 2
            missing = mask & ~mask_of(keys[middle])
            if missing:
                high, lost = middle, missing
            else:
                low = middle
        return high, lost

    def _with_media(self, keys: Keys, found: dict[int, CachedPrefix]) -> dict[int, CachedPrefix]:
        """Return the hits with their media, by the shares of at most MAX_MEDIA_SAMPLES blocks."""
        longest = max((hit.num_blocks for hit in found.values()), default=0)
        step = -(-longest // MAX_MEDIA_SAMPLES) or 1
        columns = self._table.find(np.asarray(keys[:longest:step]))
        hits = {}
        for engine, (length, *_) in found.items():
            # By samples: the media of a prefix only weigh a score, for which a share of one in 64 is exact enough.
            bit, number = columns[0].dtype.type(1 << engine), -(-length // step)
            elsewhere = (columns[0][:number] & bit) == 0
            num_elsewhere = int(np.count_nonzero(elsewhere))
            num_host = int(np.count_nonzero(columns[1][:number][elsewhere] & bit))
            hits[engine] = CachedPrefix(
                length, num_host * length // number, (num_elsewhere - num_host) * length // number
            )
        return hits

    # ---- figures

    def num_blocks(self, engine: int) -> int:
        """Return the number of an engine's blocks; a block on two media counts twice."""
        self._apply(engine)
        return sum(self._counts.get(engine, ()))

    @property
    def num_keys(self) -> int:
        """Number of different blocks."""
        return self._table.num_keys

    @property
    def num_bytes(self) -> int:
        """Bytes of the table. The queue, of at most MAX_QUEUED changes, is not included."""
        return self._table.num_bytes

    def check(self) -> None:
        """Assert the invariants, after applying what is queued. O(size)."""
        self.apply()
        assert self._num_queued == 0 and not self._queues
        self._table.check()
        for engine, counts in self._counts.items():
            for medium, count in enumerate(counts):
                assert count == self._table.count(medium, engine), f"engine {engine}, {MEDIA[medium]}"


def bits_of(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest

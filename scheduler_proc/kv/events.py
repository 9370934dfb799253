"""Records the changes of the prefix cache as events, in order."""

from collections.abc import Iterable

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent


class KVEventRecorder:
    """Collects changed keys into as few events as the order allows: one per group for each run of equal changes.

    Invariant: a consumer that starts with an empty set and applies the events of ``take`` in order has, by medium, the
    keys of each pool's map. A pool therefore reports a key only with its first and its last block.
    """

    def __init__(self, layout: KVLayout, hash_bytes: int) -> None:
        """``hash_bytes``: length of a hash; the rest of a key is the group (``block_hash.group_key``)."""
        self._block_sizes = [group.block_size for group in layout.groups]
        self._hash_bytes = hash_bytes
        self._events: list[KVEvent] = []
        self._run: list[bytes] = []
        """Keys of the current run, split into groups only at its end: a step stores thousands one by one."""
        self._run_is = (True, "device")
        """Whether the run's keys were stored, and in which medium."""

    def stored(self, keys: Iterable[bytes], medium: str) -> None:
        """Record keys that had no block until now."""
        self._extend((True, medium), keys)

    def removed(self, keys: Iterable[bytes], medium: str) -> None:
        """Record keys that have no block any more."""
        self._extend((False, medium), keys)

    def cleared(self, medium: str = "") -> None:
        """Record that a medium has no content, or that none has, and drop the changes before it."""
        self._end_run()
        self._events = [event for event in self._events if medium and event.medium != medium]
        self._events.append(AllBlocksCleared(medium))

    def take(self) -> list[KVEvent]:
        """Return the events since the last call; the caller owns the list."""
        self._end_run()
        events, self._events = self._events, []
        return events

    def _extend(self, run: tuple[bool, str], keys: Iterable[bytes]) -> None:
        if run != self._run_is:
            self._end_run()
            self._run_is = run
        self._run.extend(keys)

    def _end_run(self) -> None:
        """Append the run's events. The order of groups does not matter, because no key belongs to two."""
        is_stored, medium = self._run_is
        for group, hashes in self._by_group(self._run):
            if is_stored:
                self._events.append(BlocksStored(hashes, self._block_sizes[group], group, medium))
            else:
                self._events.append(BlocksRemoved(hashes, group, medium))
        self._run = []

    def _by_group(self, keys: list[bytes]) -> Iterable[tuple[int, list[bytes]]]:
        if len(self._block_sizes) == 1:
            return [(0, keys)] if keys else []
        found: dict[int, list[bytes]] = {}
        for key in keys:
            group = int.from_bytes(key[self._hash_bytes :], "little")
            found.setdefault(group, []).append(key[: self._hash_bytes])
        return found.items()

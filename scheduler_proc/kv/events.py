"""What changed in the prefix cache since the changes were last taken, in order."""

from collections.abc import Iterable

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent


class KVEventRecorder:
    """Gathers the pool's keys into events: as few as order allows, one for each group of a run of one kind.

    A consumer that keeps a set, and applies what ``take`` returned, has the keys of the pool's map: that is the
    promise. The pool therefore tells only of a key's first block and of its last.
    """

    def __init__(self, layout: KVLayout, hash_bytes: int) -> None:
        """``hash_bytes``: length of a hash; what a key has beyond it is the group (``block_hash.group_key``)."""
        self._block_sizes = [group.block_size for group in layout.groups]
        self._hash_bytes = hash_bytes
        self._events: list[KVEvent] = []
        self._run: list[bytes] = []
        """Keys of the newest run, split into groups only at its end: a step may store thousands, one by one."""
        self._run_is_stored = True

    def stored(self, keys: Iterable[bytes]) -> None:
        """No block had any of these keys until now."""
        if not self._run_is_stored:
            self._end_run()
            self._run_is_stored = True
        self._run.extend(keys)

    def removed(self, keys: Iterable[bytes]) -> None:
        """No block has any of these keys any more."""
        if self._run_is_stored:
            self._end_run()
            self._run_is_stored = False
        self._run.extend(keys)

    def cleared(self) -> None:
        """No block has a key any more. What was not taken yet does not matter then."""
        self._run = []
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KVEvent]:
        """All since the last call. The recorder does not touch them again."""
        if self._run:
            self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        """Order between groups does not matter: no key is of two."""
        for group, hashes in self._by_group(self._run):
            if self._run_is_stored:
                self._events.append(BlocksStored(hashes, self._block_sizes[group], group))
            else:
                self._events.append(BlocksRemoved(hashes, group))
        self._run = []

    def _by_group(self, keys: list[bytes]) -> Iterable[tuple[int, list[bytes]]]:
        if len(self._block_sizes) == 1:
            return [(0, keys)] if keys else []
        found: dict[int, list[bytes]] = {}
        for key in keys:
            group = int.from_bytes(key[self._hash_bytes :], "little")
            found.setdefault(group, []).append(key[: self._hash_bytes])
        return found.items()

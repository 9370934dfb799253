"""Records the changes of the prefix cache as events, in order; for routers that know tokens and not Quire's hashes also
what the stored blocks hold.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from quire.protocol.block_hash import group_suffix
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent


class Span(NamedTuple):
    """Tokens of a request, and the salts that its block hashes cover besides tokens."""

    token_ids: list[int]
    salts: tuple[str, ...] = ()


class FilledRequest(Protocol):
    """The view of a request whose blocks are full."""

    @property
    def handle(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    def span(self, start: int, end: int) -> Span: ...


class KVEventRecorder:
    """Collects changed keys into as few events as the order allows: one per group for each run of equal changes.

    Invariant: a consumer that starts with an empty set and applies the events of ``take`` in order has, by medium, the
    keys of each pool's map, except those of states. A pool therefore reports a key only with its first and its last
    block.

    ``describes``: whether it needs ``describe`` before ``stored``, as ``DescribingRecorder`` does. ``label``: returns
    that of a request's blocks; ``covers``: returns what its positions from one up to another have instead of tokens.
    Each is set by what knows it.
    """

    describes: ClassVar[bool] = False

    def __init__(self, layout: KVLayout, hash_bytes: int) -> None:
        """``hash_bytes``: length of a hash; the rest of a key is the group (``block_hash.group_key``)."""
        self._block_size, self._num_groups = layout.block_size, len(layout.groups)
        self._has_states = bool(layout.states)
        self._hash_bytes = hash_bytes
        self.label: Callable[[Any], tuple[int, str] | None] = lambda request: None
        self.covers: Callable[[Any, int, int], tuple[str, ...]] = lambda request, begin, end: ()
        self._events: list[KVEvent] = []
        self._run: list[bytes] = []
        """Keys of the current run, split into groups only at its end: a step stores thousands one by one."""
        self._run_is = (True, "device")
        """Whether the run's keys were stored, and in which medium."""

    def describe(self, request: FilledRequest, group: int, first: int, end: int) -> None:
        """Take note of the tokens of a request's blocks ``[first, end)`` in a group, which may be stored next."""

    def describe_keys(self, request: FilledRequest, keys: Sequence[bytes]) -> None:
        """As ``describe``, for some of its blocks."""

    def stored(self, keys: Iterable[bytes], medium: str) -> None:
        """Record keys that had no block until now."""
        self._extend((True, medium), keys)

    def removed(self, keys: Iterable[bytes], medium: str) -> None:
        """Record keys that have no block any more."""
        self._extend((False, medium), keys)

    def cleared(self, medium: str = "") -> None:
        """Record that a medium has no content, or that none has, and drop the changes before it."""
        self._end_run()
        # A subscriber that applies the events in order ends with the same state without them, and a reset after a long
        # idle time would otherwise publish thousands of changes that it undoes.
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
                self._events.append(BlocksStored(hashes, self._block_size, group, medium))
            else:
                self._events.append(BlocksRemoved(hashes, group, medium))
        self._run = []

    def _by_group(self, keys: list[bytes]) -> Iterable[tuple[int, list[bytes]]]:
        if self._num_groups == 1 and not self._has_states:
            return [(0, keys)] if keys else []
        found: dict[int, list[bytes]] = {}
        for key in keys:
            group = int.from_bytes(key[self._hash_bytes :], "little")
            # Pages with parts of states are in groups behind those of the layout. Consumers count blocks.
            if group < self._num_groups:
                found.setdefault(group, []).append(key[: self._hash_bytes])
        return found.items()


class Origin(NamedTuple):
    """The content of a block.

    Attributes:
        parent: hash of the block before it in its group; None for the first one.
        label: number and name of the weights beside the model's that have computed it, or None.
        salts: of the first block only, as in ``Span``.
        covered: names of what positions of the block have instead of tokens, such as images.
    """

    parent: bytes | None
    token_ids: list[int]
    label: tuple[int, str] | None
    salts: tuple[str, ...]
    covered: tuple[str, ...] = ()


class DescribingRecorder(KVEventRecorder):
    """A recorder that also has the ``origins`` of the keys stored since ``forget``, as far as they are known."""

    describes: ClassVar[bool] = True

    def __init__(self, layout: KVLayout, hash_bytes: int) -> None:
        super().__init__(layout, hash_bytes)
        self.layout = layout
        self.origins: dict[tuple[bytes, int], Origin] = {}
        """By hash and group."""

    def describe(self, request: FilledRequest, group: int, first: int, end: int) -> None:
        size, hashes, label = self._block_size, request.block_hashes, self.label(request)
        token_ids, salts = request.span(first * size, end * size)
        for index in range(first, end):
            start = (index - first) * size
            parent = hashes[index - 1] if index else None
            covered = self.covers(request, index * size, (index + 1) * size)
            origin = Origin(parent, token_ids[start : start + size], label, () if index else salts, covered)
            self.origins[hashes[index], group] = origin

    def describe_keys(self, request: FilledRequest, keys: Sequence[bytes]) -> None:
        wanted = set(keys)
        for group in range(self._num_groups):
            suffix = group_suffix(group)
            for index, block_hash in enumerate(request.block_hashes):
                if block_hash + suffix in wanted:
                    self.describe(request, group, index, index + 1)

    def forget(self) -> None:
        """Forget the origins, which have been published."""
        self.origins = {}

"""Slots of recurrent states: the one with which each running request computes, and those kept for later requests.

A state summarises all tokens before a position, so unlike keys and values it cannot be cut: what is kept for others is
a copy, a *checkpoint*, at a position chosen beforehand. A checkpoint has the hash of the block that ends at its
position as its name, and is free from the moment it has one: it is evicted like a cached block that no request holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from quire.protocol.block_hash import group_key
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.cache_request import CacheRequest
from quire.scheduler_proc.kv.holds import Holds
from quire.scheduler_proc.kv.single_type import Contents


@dataclass(slots=True)
class _Copy:
    """A copy that was not sent to the workers.

    Attributes:
        is_ready: the source has its content before the step being planned.
        held: the blocks that only the copy holds: the source of a request's first state, or a target without an owner.
        key: under which the target is found as soon as the copy was sent.
        supersedes: the source is evicted first from then on.
    """

    source: KVCacheBlock
    target: KVCacheBlock
    is_ready: bool
    held: KVCacheBlock | None
    key: bytes | None = None
    supersedes: bool = False


class SlotPool(BlockPool):
    """Slots, each of which belongs to the account for which it was allocated, as its pages in a tier do then."""

    def __init__(self, num_slots: int, enable_caching: bool) -> None:
        super().__init__(num_slots, enable_caching)
        self._account, self._owners = 0, [0] * num_slots

    def act_for(self, account: int) -> None:
        self._account = account

    def owner_of(self, block: KVCacheBlock) -> int:
        return self._owners[block.block_id]

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        taken = super().get_new_blocks(n)
        for slot in taken:
            self._owners[slot.block_id] = self._account
        return taken


class StateSlots:
    """Owns a pool of slots, the slot of each running request, and the copies that no step has had yet.

    A request's slot has its state after all positions of the steps that were sent, and stays its own until it is freed.
    Checkpoints are taken at multiples of ``grid``: at the last one in a prompt; where cached blocks matched further
    than checkpoints did, because other prompts will branch there too; and in a decode at the newest one, for the next
    turn of a conversation. To keep more costs hits: each checkpoint evicts another one, and is as large as thousands of
    tokens. A prefill must therefore end a chunk at such a position (``next_stop``).

    They are evicted by the tokens that each saves: one from which a request has gone on to a later one saves only the
    distance between them to those who can use both, so it goes first, unless several requests have begun from it. Which
    of two comes first is otherwise decided by their last use.

    Tiers behind the device keep a checkpoint in several pages, one for each part of it. They have it if they have all.

    Attributes:
        grid: tokens.
        num_parts: pages of a checkpoint in a tier.
        holds: slots that copies from and to tiers hold.
        offered: the longest prefix for which the groups had blocks in the last search, in tokens.
    """

    def __init__(self, layout: KVLayout, num_slots: int, enable_caching: bool, *, takes_chunks: bool = True) -> None:
        """
        Args:
            num_slots: includes slot 0, which no request has.
            takes_chunks: whether prefills may end anywhere; otherwise prompts are computed whole.

        Raises:
            ValueError: not one slot for requests.
        """
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, one of which is not used (got {num_slots})")
        self.grid = layout.state_grid
        self.num_parts = layout.num_state_parts
        self.pool = SlotPool(num_slots, enable_caching)
        self.holds = Holds(self.pool)
        self.offered = 0
        self._hashes = self.grid // layout.block_size
        self._first_part = len(layout.groups)
        """Group of the first part."""
        self._takes_chunks = takes_chunks
        self._working: dict[int, KVCacheBlock] = {}
        self._stops: dict[int, list[int]] = {}
        """By handle: positions at which its prefill takes checkpoints, ascending."""
        self._saved: dict[int, tuple[KVCacheBlock, int]] = {}
        """By handle: the slot with the last checkpoint of its decode, and the position. It has no name until the
        request leaves, so that the next one can replace it at little cost."""
        self._copies: list[_Copy] = []
        self._shared: set[int] = set()
        """Slots with a checkpoint from which a request has begun, or where prompts branch."""
        self._superseded: set[int] = set()
        """Slots with a checkpoint from which its only request has gone on to a later one."""

    def slot(self, handle: int) -> int:
        """Return the slot of a running request."""
        return self._working[handle].block_id

    def has_room(self, handle: int) -> bool:
        """Return whether a request has a slot, or can get one."""
        return handle in self._working or self.pool.num_free_blocks > 0 or bool(self._saved)

    def longest(self, block_hashes: Sequence[bytes], length: int, tiers: Contents | None = None) -> int:
        """Return the position of the last checkpoint within ``length`` tokens, here or in ``tiers``; 0 if none is."""
        at = length // self.grid * self.grid
        while at and not self._has(self.key(block_hashes, at), tiers):
            at -= self.grid
        return at

    def _has(self, key: bytes, tiers: Contents | None) -> bool:
        if self.pool.get_cached_block(key) is not None:
            return True
        return tiers is not None and len(tiers.get_cached_blocks(self.page_keys(key))) == self.num_parts

    def page_keys(self, key: bytes) -> Iterator[bytes]:
        """Return the keys of a checkpoint's pages, by part."""
        return map(partial(group_key, key), range(self._first_part, self._first_part + self.num_parts))

    def is_kept(self, slot: KVCacheBlock) -> bool:
        """Whether a checkpoint is worth the pages of a tier."""
        return slot.block_id not in self._superseded

    def loaded(self, slot: KVCacheBlock, key: bytes) -> None:
        """Name a held slot, which has been filled from a tier."""
        self._shared.discard(slot.block_id)
        self._name(slot, key)

    def begin(self, request: CacheRequest, num_computed: int) -> None:
        """Give a request its slot, with the checkpoint at ``num_computed`` if that is not 0. ``has_room`` must hold."""
        hit: KVCacheBlock | None = None
        if num_computed:
            hit = self.pool.get_cached_block(self.key(request.block_hashes, num_computed))
            assert hit is not None, f"handle {request.handle}: no state at position {num_computed}"
            self.pool.touch((hit,))
        self._stops[request.handle] = self.stops(request, num_computed)
        if hit is not None and not self.pool.num_free_blocks and not self._saved:
            # The checkpoint is in the only slot that was free. The request goes on in it, and others lose it: it would
            # wait for ever for a second one in a pool of one.
            self.pool.invalidate(self.key(request.block_hashes, num_computed))
            self._working[request.handle] = hit
            return
        self._working[request.handle] = slot = self._new_slot()
        if hit is not None:
            supersedes = bool(self._stops[request.handle]) and hit.block_id not in self._shared
            self._shared.add(hit.block_id)
            self._superseded.discard(hit.block_id)
            self._copies.append(_Copy(hit, slot, is_ready=True, held=hit, supersedes=supersedes))

    def stops(self, request: CacheRequest, num_computed: int) -> list[int]:
        """Return where the prefill of a request that begins at ``num_computed`` takes checkpoints."""
        if not (self.pool.enable_caching and self._takes_chunks):
            return []
        # The last known token is computed by each request of the same prompt, for its logits.
        ends = {(request.num_tokens - 1) // self.grid, min(self.offered, request.num_tokens - 1) // self.grid}
        return [end * self.grid for end in sorted(ends) if end * self.grid > num_computed]

    def next_stop(self, handle: int, num_computed: int) -> int:
        """Return the next position after ``num_computed`` at which a prefill must end a chunk; 0 if there is none."""
        return next((at for at in self._stops.get(handle, ()) if at > num_computed), 0)

    def keep_due(self, requests: Iterable[CacheRequest]) -> None:
        """Call ``keep`` for the requests at a position for a checkpoint."""
        grid = self.grid
        for request in requests:
            if not request.num_computed_tokens % grid:
                self.keep(request)

    def keep(self, request: CacheRequest) -> None:
        """Take a checkpoint of a request's state, if it is at a position for one and a slot is free."""
        at, handle, hashes = request.num_computed_tokens, request.handle, request.block_hashes
        if at % self.grid or not self.pool.enable_caching or not 0 < at <= len(hashes) // self._hashes * self.grid:
            return
        self.pool.act_for(request.account)
        stops, slot = self._stops[handle], self._working[handle]
        if not stops or at > stops[-1]:
            self._save(handle, slot, at)
        elif at in stops and self.pool.num_free_blocks:
            key = self.key(hashes, at)
            if self.pool.get_cached_block(key) is None and all(copy.key != key for copy in self._copies):
                target = self._new_slot()
                if at != stops[-1]:
                    self._shared.add(target.block_id)
                self._copies.append(_Copy(slot, target, is_ready=True, held=target, key=key))

    def _save(self, handle: int, slot: KVCacheBlock, at: int) -> None:
        """Replace the last checkpoint of a decode by its state at ``at``."""
        target, before = self._saved.get(handle, (None, 0))
        if target is None and self.pool.num_free_blocks:
            target = self._new_slot()
        if target is not None and before != at:
            self._saved[handle] = target, at
            self._copies.append(_Copy(slot, target, is_ready=True, held=None))

    def fork(self, parent: int, child: int, *, is_written: bool) -> None:
        """Give a child a slot with its parent's state. ``has_room`` must hold.

        ``is_written``: whether the parent's state is the one of the child before the step being planned; otherwise it
        is after that step.
        """
        source = self._working[parent]
        # Held, because the parent may end, and another request get its slot, before the step with the copy is sent.
        self.pool.share((source,))
        self._working[child], self._stops[child] = self._new_slot(), []
        self._copies.append(_Copy(source, self._working[child], is_written, held=source))

    def awaits_copy(self, handle: int) -> bool:
        """Whether the state of a running request is not in its slot before the next step."""
        return any(copy.target is self._working.get(handle) for copy in self._copies)

    def take(self) -> list[tuple[int, int]]:
        """Return (source, target) of the copies for the step being sent, in order; others are for the next one."""
        taken = [copy for copy in self._copies if copy.is_ready]
        self._copies = [copy for copy in self._copies if not copy.is_ready]
        for copy in self._copies:
            copy.is_ready = True
        for copy in taken:
            if copy.held is not None:
                # A checkpoint has a name only now: a request that finds it begins with a copy of it, which must be
                # behind this one.
                self._name(copy.target, copy.key)
                self.pool.free_blocks((copy.held,))
        superseded = [copy.source for copy in taken if copy.supersedes]
        if superseded:
            self._superseded.update(slot.block_id for slot in superseded)
            self.pool.evict_first(superseded)
        return [(copy.source.block_id, copy.target.block_id) for copy in taken]

    def free(self, request: CacheRequest) -> None:
        """Free the slot of a request, if it has one. Its checkpoints stay."""
        handle, hashes = request.handle, request.block_hashes
        slot = self._working.pop(handle, None)
        if slot is None:
            return
        del self._stops[handle]
        saved, at = self._saved.pop(handle, (None, 0))
        key = self.key(hashes, at) if at and at <= len(hashes) // self._hashes * self.grid else None
        for copy in [copy for copy in self._copies if copy.target is slot]:
            self._give_up(copy)
        # A checkpoint that was not copied yet: the slot itself becomes it. Nothing may wait for a step here, because in
        # a small pool the next step may need the very slot.
        for copy in [copy for copy in self._copies if copy.source is slot and copy.held is not slot]:
            self._name(slot, copy.key or key)
            self._give_up(copy)
            key = None if copy.target is saved else key
        if saved is not None:
            self._name(saved, key)
            self.pool.free_blocks((saved,))
        self.pool.free_blocks((slot,))

    def invalidate(self, request: CacheRequest, num_kept_tokens: int, tiers: Sequence[BlockPool] = ()) -> None:
        """Invalidate the checkpoints of a request's tokens after the first ``num_kept_tokens``, also in ``tiers``."""
        hashes = request.block_hashes
        first, end = num_kept_tokens // self.grid + 1, len(hashes) // self._hashes
        keys = [self.key(hashes, index * self.grid) for index in range(first, end + 1)]
        for key in keys:
            self.pool.invalidate(key)
            for pages in tiers:
                for part in self.page_keys(key):
                    pages.invalidate(part)
        for copy in [copy for copy in self._copies if copy.key in keys]:
            self._give_up(copy)
        if self._saved.get(request.handle, (None, 0))[1] > num_kept_tokens:
            self._forget_saved(request.handle)

    def drop_contents(self) -> None:
        """Drop all checkpoints. No request may have a slot."""
        assert not self._working, "a request has a state"
        self.pool.drop_contents()

    def check(self) -> None:
        """Raise AssertionError unless each slot is held by the request or by the copies that need it."""
        saved = [slot for slot, _ in self._saved.values()]
        held = [copy.held for copy in self._copies if copy.held is not None]
        own = [*self._working.values()]
        self.pool.check([own, saved, held, *self.holds.holders()])
        assert self._working.keys() == self._stops.keys(), "positions of checkpoints are known without a slot"
        assert self._saved.keys() <= self._working.keys(), "a checkpoint of a request that has no slot"
        assert len(set(map(id, own + saved))) == len(own) + len(saved), "two requests have one slot"
        targets = [copy.target for copy in self._copies if copy.held is not copy.target]
        assert all(any(target is slot for slot in own + saved) for target in targets), "a copy for no request"

    def key(self, block_hashes: Sequence[bytes], at: int) -> bytes:
        """Return the name of the checkpoint at a position of the grid."""
        return block_hashes[at // self.grid * self._hashes - 1]

    def _new_slot(self) -> KVCacheBlock:
        """Return a free slot, or else one with the checkpoint of a decode, which is only of use after its end."""
        if not self.pool.num_free_blocks:
            self._forget_saved(next(iter(self._saved)))
        slot = self.pool.get_new_blocks(1)[0]
        self._shared.discard(slot.block_id)
        return slot

    def _forget_saved(self, handle: int) -> None:
        slot, _ = self._saved.pop(handle)
        for copy in [copy for copy in self._copies if copy.target is slot]:
            self._give_up(copy)
        self.pool.free_blocks((slot,))

    def _name(self, slot: KVCacheBlock, key: bytes | None) -> None:
        self._superseded.discard(slot.block_id)
        if key is not None and self.pool.get_cached_block(key) is None:
            self.pool.cache_full_blocks((slot,), (key,))

    def _give_up(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if copy.held is not None:
            self.pool.free_blocks((copy.held,))

"""Block allocation for steady decode: the next block, in every KV group, for each of many requests in one call."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from quire.protocol.block_hash import group_suffix
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.cache_request import CacheRequest
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.windowed import SlidingWindowManager


class NewBlocks(NamedTuple):
    """Blocks to append to the tables of requests: parallel lists, in the order of requests and then of groups."""

    handles: list[int]
    block_ids: list[int]
    groups: list[int]

    def extend(self, other: "NewBlocks") -> None:
        for column, added in zip(self, other, strict=True):
            column += added

    def remove(self, handle: int) -> None:
        kept = [at for at, other in enumerate(self.handles) if other != handle]
        for column in self:
            column[:] = [column[at] for at in kept]


class HashedTokens(Protocol):
    """The view of a token store. ``block_hashes``: of its full blocks."""

    block_hashes: list[bytes]


class SteadyRequest(CacheRequest, Protocol):
    """The view of a request in steady decode. ``tables``: its blocks by group."""

    tables: Sequence[list[KVCacheBlock]]

    @property
    def tokens(self) -> HashedTokens: ...


class SteadyBlockAllocator:
    """Fast path of block allocation, for requests whose next position starts a block and while enough blocks are free.

    Owns nothing: pool, tables and hashes stay with their owners. ``allocate`` and ``cache`` have the same effect as
    ``allocate_slots`` for one position and ``cache_blocks``, request by request. In layouts of equal block sizes, with
    one kind of window, or of chunks, in the last groups (``kv_layout`` makes no others), the requests are handled
    together. All groups then have tables of equal length with as many cached entries, and the windows skip the same
    entries (``check``).
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._pool = kv.pool
        managers = kv.coordinator.managers
        self._tables = [manager.req_to_blocks for manager in managers]
        self._num_cached = [manager.num_cached_block for manager in managers]
        self._suffixes = [group_suffix(manager.group_id) for manager in managers]
        self._windows = windows = [manager for manager in managers if isinstance(manager, SlidingWindowManager)]
        self._num_skipped = [manager.num_skipped_blocks for manager in windows]
        self._num_full = len(managers) - len(windows)
        self._block_size = kv.block_size
        self._is_regular = (
            len({manager.block_size for manager in managers}) == 1
            and len({(type(manager), manager.window) for manager in windows}) <= 1
            and not any(manager.skips for manager in managers[: self._num_full])
        )

    def can_allocate(self, count: int) -> bool:
        """Return whether the pool has blocks for this many requests, not counting those that windows will free."""
        # What windows will free does not count: it is known only while they are walked, and then it is too late to
        # preempt.
        return count * len(self._tables) <= self._pool.num_free_blocks

    def join(self, request: SteadyRequest) -> int:
        """Prepare a request that joins steady decode. Returns the number of positions left in its blocks.

        It can exceed one block, after allocations for drafts that were rejected.
        """
        managers = self._kv.coordinator.managers
        request.tables = [manager.req_to_blocks[request.handle] for manager in managers]
        ends = [len(blocks) * manager.block_size for blocks, manager in zip(request.tables, managers, strict=True)]
        return min(ends) - request.num_computed_tokens

    def allocate(self, requests: Sequence[SteadyRequest]) -> NewBlocks:
        """Allocate the next block of each request in each group that needs one, after the windows' releases."""
        if not self._is_regular:
            return self._allocate_one_by_one(requests)
        # One call for the blocks of all requests and groups. The pool's cost per call is a multiple of its cost per
        # block.
        taken = self._take(requests)
        groups = [*range(len(self._tables))]
        count = len(taken) // len(groups)
        rest, requests = requests[count:], requests[:count]
        tables = chain.from_iterable([request.tables for request in requests])
        for blocks, block in zip(tables, taken, strict=True):
            blocks.append(block)
        handles = [request.handle for request in requests]
        if len(groups) > 1:
            handles = [handle for handle in handles for _ in groups]
        new = NewBlocks(handles, [block.block_id for block in taken], groups * count)
        if rest:
            new.extend(self._allocate_one_by_one(rest))
        return new

    def _take(self, requests: Sequence[SteadyRequest]) -> list[KVCacheBlock]:
        """Free blocks that windows have left, and take a new block per group, for the first requests or for all."""
        pool, num_groups = self._pool, len(self._tables)
        if not pool.is_fair:
            count = self._skip(requests) if self._num_skipped else len(requests)
            return pool.get_new_blocks(count * num_groups)
        taken: list[KVCacheBlock] = []
        for request in requests:  # each release and each new block changes which account has the most
            self._kv.act_for(request)
            # With accounts each request is handled alone, so that the pool evicts exactly what it would have evicted in
            # plain steps.
            if self._num_skipped and not self._skip((request,)):
                break
            taken += pool.get_new_blocks(num_groups)
        return taken

    def _skip(self, requests: Sequence[SteadyRequest]) -> int:
        """Free the block that each request's window has left, if any. Returns the number of requests handled.

        It stops at a request that frees several blocks (after a prefill; it is usually the last), or one without
        content: such a block is reused first, by the request that frees it. Blocks with content are reused after all
        blocks that are free now, and these are enough.
        """
        num_skipped, num_full, size = self._num_skipped[0], self._num_full, self._block_size
        first_read = self._windows[0].first_read
        null = self._pool.null_block
        freed: list[KVCacheBlock] = []
        ends: dict[int, int] = {}
        count = 0
        for request in requests:
            index = num_skipped.get(request.handle, 0)
            end = first_read(request.num_acknowledged_tokens) // size
            if end > index:
                tables = request.tables[num_full:]
                # Either would make the order of reuse differ from that of requests handled one by one: the rest of the
                # list takes the slow path.
                if end > index + 1 or tables[0][index].block_hash is None:
                    break
                for blocks in tables:
                    freed.append(blocks[index])
                    blocks[index] = null
                ends[request.handle] = end
            count += 1
        for skipped in self._num_skipped:
            skipped.update(ends)
        self._pool.free_blocks(freed)
        return count

    def _allocate_one_by_one(self, requests: Sequence[SteadyRequest]) -> NewBlocks:
        handles, block_ids, groups = new = NewBlocks([], [], [])
        for request in requests:
            allocated = self._kv.allocate_slots(request, 1)
            assert allocated is not None, "can_allocate was not called"
            for group, blocks in enumerate(allocated):
                handles += [request.handle] * len(blocks)
                block_ids += [block.block_id for block in blocks]
                groups += [group] * len(blocks)
        return new

    def cache(self, requests: Sequence[SteadyRequest]) -> None:
        """Publish the hashes of the blocks that were filled before the newly allocated ones."""
        if not requests or not self._pool.enable_caching:
            return
        if not self._is_regular:
            for request in requests:
                self._kv.cache_blocks(request, min(request.num_computed_tokens + 1, request.num_tokens))
            return
        if self._pool.events is not None and self._pool.events.describes:
            self._describe(requests, self._pool.events)
        num_cached, several = self._num_cached[0], len(self._suffixes) > 1
        filled: list[tuple[SteadyRequest, int]] = []
        blocks: list[KVCacheBlock] = []
        keys: list[bytes] = []
        for request in requests:
            handle, held, hashes = request.handle, request.tables[0], request.tokens.block_hashes
            end = min(len(held), len(hashes))  # with block size 1, the new block is full already
            for index in range(num_cached.get(handle, 0), end):  # usually one block
                blocks.append(held[index])
                keys.append(hashes[index])
                if several:
                    filled.append((request, index))
            num_cached[handle] = end
        if several:
            blocks += [held[index] for request, index in filled for held in request.tables[1:]]
            keys += [key + suffix for key in keys[:] for suffix in self._suffixes[1:]]
            ends = {request.handle: num_cached[request.handle] for request in requests}
            for other in self._num_cached[1:]:
                other.update(ends)
        if self._num_skipped and self._pool.null_block in blocks:
            kept = [at for at, block in enumerate(blocks) if not block.is_null]
            blocks, keys = [blocks[at] for at in kept], [keys[at] for at in kept]
        self._pool.cache_full_blocks(blocks, keys)
        if self._kv.states is not None:
            self._kv.states.keep_due(requests)

    def _describe(self, requests: Sequence[SteadyRequest], events: KVEventRecorder) -> None:
        for request in requests:
            first = self._num_cached[0].get(request.handle, 0)
            end = min(len(request.tables[0]), len(request.block_hashes))
            for group in range(len(self._suffixes)):
                events.describe(request, group, first, end)

    def check(self) -> None:
        """Raise AssertionError unless the groups agree on the entries of each request, as the class relies on."""
        if not self._is_regular:
            return
        for handle, held in self._tables[0].items():
            windows = [table.get(handle, []) for table in self._tables[self._num_full :]]
            for name, different in (
                ("blocks", {len(table.get(handle, ())) for table in self._tables} | {len(held)}),
                ("cached entries", {num_cached.get(handle, 0) for num_cached in self._num_cached}),
                ("skipped entries", {num_skipped.get(handle, 0) for num_skipped in self._num_skipped}),
                ("contents", {tuple(block.block_hash is None for block in blocks) for blocks in windows}),
            ):
                assert len(different) <= 1, f"handle {handle}: {name} differ between KV groups: {sorted(different)}"

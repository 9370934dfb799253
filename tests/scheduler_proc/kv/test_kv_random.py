"""Random runs over random layouts, against a worker that remembers its writes.

Each read finds the right content, each cached hash matches its content, each hit is the longest possible, and no state
is left at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import hashes_of, layout_of, picture

from quire.protocol.block_hash import group_key
from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager

pytestmark = pytest.mark.full

Prefix = tuple[int, ...]
Draw = Callable[[int, int], int]
STEP_TOKENS = 9
DEPTH = 2


def reads(group: KVGroup, position: int) -> range:
    """Return the earlier positions that the token at ``position`` reads."""
    if group.kind == "sliding_window":
        return range(max(0, position - group.window + 1), position)
    return range(position)


@dataclass(eq=False)
class Running:
    """One request of the simulation; ``script`` has all tokens that it will ever have."""

    handle: int
    script: Prefix
    num_tokens: int
    size: int
    skip_reading_prefix_cache: bool = False
    tenant: int = 0
    num_computed_tokens: int = 0
    num_acknowledged_tokens: int = 0
    num_hits: int = 0
    in_flight: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_hashes = hashes_of(self.script, self.size)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.all_hashes[: self.num_tokens // self.size]


class Simulation:
    """Scheduler and worker in one: schedules at random, and writes tags instead of keys and values."""

    def __init__(self, draw: Draw, groups: list[KVGroup], num_blocks: int, caching: bool) -> None:
        self.draw, self.groups, self.caching = draw, groups, caching
        self.kv = KVCacheManager(
            layout_of(*groups),
            num_blocks,
            caching,
            max_step_tokens=STEP_TOKENS,
            pipeline_depth=DEPTH,
        )
        self.memory: dict[tuple[int, int, int], Prefix] = {}
        """(group, block, offset) to the tokens up to that position."""
        self.names: dict[bytes, tuple[int, Prefix]] = {}
        self.running: list[Running] = []
        self.num_handles = 0
        self.unit = lcm(*(g.block_size for g in groups))

    # ---- the worker

    def execute(self, request: Running, start: int, end: int) -> None:
        """Check the reads of each token of the chunk, and write its tag; tokens are those of ``script``."""
        tables = self.kv.block_ids(request)
        for gid, group in enumerate(self.groups):
            table, size = tables[gid], group.block_size
            for position in range(start, end):
                self.write(request, gid, table[position // size], position % size, position + 1)
                for earlier in reads(group, position):
                    found = self.memory[gid, table[earlier // size], earlier % size]
                    assert found == request.script[: earlier + 1], f"{group}: {position} reads {earlier}"

    def write(self, request: Running, gid: int, block_id: int, offset: int, length: int) -> None:
        block = self.kv.pool.blocks[block_id]
        assert not block.is_null and block.ref_cnt == 1, f"{block!r} is written but not private"
        self.memory[gid, block_id, offset] = request.script[:length]

    # ---- the oracle

    def learn_names(self, request: Running) -> None:
        for gid in range(len(self.groups)):
            for index, block_hash in enumerate(request.all_hashes):
                self.names[group_key(block_hash, gid)] = (gid, request.script[: (index + 1) * request.size])

    def contents(self) -> set[tuple[int, Prefix]]:
        """Return all cached contents, after checking that each is the content that its hash names."""
        found: set[tuple[int, Prefix]] = set()
        for key, block in self.kv.pool.cached_block_hash_to_block.blocks():
            gid, prefix = self.names[key]
            size = self.groups[gid].block_size
            for offset in range(size):
                assert self.memory[gid, block.block_id, offset] == prefix[: len(prefix) - size + offset + 1]
            found.add((gid, prefix))
        return found

    def needed(self, gid: int, length: int) -> set[int]:
        group = self.groups[gid]
        return {position // group.block_size for position in reads(group, length)}

    def usable(self, gid: int, script: Prefix, length: int, found: set[tuple[int, Prefix]]) -> bool:
        size = self.groups[gid].block_size
        return all((gid, script[: (index + 1) * size]) in found for index in self.needed(gid, length))

    def longest_hit(self, request: Running) -> int:
        """Return the longest hit by trying every length."""
        if not self.caching or request.skip_reading_prefix_cache:
            return 0
        found = self.contents()
        top = (request.num_tokens - 1) // self.unit * self.unit
        lengths = range(top, 0, -self.unit)
        groups = range(len(self.groups))
        fits = (n for n in lengths if all(self.usable(gid, request.script, n, found) for gid in groups))
        return next(fits, 0)

    def look_up(self, request: Running) -> tuple[GroupBlocks, int]:
        hits, num_hits = self.kv.get_computed_blocks(request)
        assert num_hits == self.longest_hit(request)
        for gid, blocks in enumerate(hits):
            if num_hits:
                assert len(blocks) * self.groups[gid].block_size == num_hits
                assert {i for i, b in enumerate(blocks) if not b.is_null} == self.needed(gid, num_hits)
        return hits, num_hits

    # ---- actions

    def admit(self) -> None:
        length = self.draw(2, 40)
        common, own = self.draw(0, 60), self.draw(0, 2)
        script = tuple(i % 3 if i < common else 10 * own + i % 5 for i in range(length + 12))
        request = Running(self.num_handles, script, length, self.kv.block_size, self.draw(0, 9) == 0)
        self.num_handles += 1
        self.learn_names(request)
        before = picture(self.kv)
        hits, num_hits = self.look_up(request)
        num_tokens = min(self.draw(1, STEP_TOKENS), length - num_hits)
        keep_free = self.draw(0, 2)
        fits = self.kv.can_fit_full_sequence(request, length, hits)
        new = self.kv.allocate_slots(request, num_tokens, hits, num_hits, keep_free=keep_free)
        if new is None:
            assert picture(self.kv) == before and not (fits and keep_free == 0)
            return
        assert self.kv.pool.num_free_blocks >= keep_free or not any(new), (
            "a request that takes no block is always admitted"
        )
        request.num_computed_tokens = request.num_acknowledged_tokens = num_hits
        request.num_hits = num_hits
        self.running.append(request)
        self.send(request, num_tokens)

    def send(self, request: Running, num_tokens: int) -> None:
        """Execute a step whose blocks are allocated; its result arrives later."""
        start = request.num_computed_tokens
        self.execute(request, start, start + num_tokens)
        self.kv.cache_blocks(request, min(start + num_tokens, request.num_tokens))
        request.num_computed_tokens += num_tokens
        request.in_flight.append(request.num_computed_tokens)

    def advance(self, request: Running) -> None:
        start = request.num_computed_tokens
        most = max(request.num_tokens - start, 1)  # a decode step may be one ahead of its token
        if len(request.in_flight) == DEPTH or start + 1 >= len(request.script):
            return
        num_tokens = min(self.draw(1, STEP_TOKENS), most)
        before = picture(self.kv)
        new = self.kv.allocate_slots(request, num_tokens)
        if num_tokens == 1 and start % self.kv.block_size:
            assert new is not None and not any(new) and picture(self.kv) == before, (
                "a step within a block must change nothing"
            )
        if new is None:
            self.preempt(request)
        else:
            self.send(request, num_tokens)

    def draft(self, request: Running) -> None:
        """Execute one known token and drafts, the last of them rejected; only with nothing in flight."""
        num_drafts = self.draw(0, 3)
        start = request.num_computed_tokens
        ready = not request.in_flight and request.num_tokens == start + 1
        if not ready or start + num_drafts + 2 > len(request.script):
            return
        if self.kv.allocate_slots(request, 1 + num_drafts) is None:
            self.preempt(request)
            return
        accepted = self.draw(0, num_drafts)
        self.execute(request, start, start + 1 + num_drafts)
        self.kv.cache_blocks(request, request.num_tokens)
        end = start + 1 + accepted
        tables = self.kv.block_ids(request)
        for gid, group in enumerate(self.groups):
            for position in range(end, start + 1 + num_drafts):
                self.memory[gid, tables[gid][position // group.block_size], position % group.block_size] = ()
        request.num_computed_tokens = request.num_acknowledged_tokens = end
        request.num_tokens = end + 1

    def answer(self, request: Running) -> None:
        if request.in_flight:
            request.num_acknowledged_tokens = request.in_flight.pop(0)
            if request.num_acknowledged_tokens >= request.num_tokens:
                request.num_tokens = request.num_acknowledged_tokens + 1

    def preempt(self, request: Running) -> None:
        self.kv.free(request)
        self.running.remove(request)

    def go_bad(self, request: Running) -> None:
        self.kv.invalidate(request, request.num_hits)
        left = {prefix for _, prefix in self.contents() if prefix == request.script[: len(prefix)]}
        assert not any(request.num_hits < len(prefix) <= request.num_tokens for prefix in left)
        self.preempt(request)

    def check(self) -> None:
        self.kv.check()
        self.contents()
        for request in self.running:
            tables = self.kv.block_ids(request)
            longest = max(len(t) * g.block_size for t, g in zip(tables, self.groups, strict=True))
            held = sum(block_id > 0 for table in tables for block_id in table)
            assert held <= self.kv.num_blocks_for(longest)

    def drain(self) -> None:
        for request in list(self.running):
            self.preempt(request)
        self.kv.check()
        assert self.kv.pool.num_free_blocks == self.kv.pool.num_usable_blocks
        for manager in self.kv.coordinator.managers:
            kept = [name for name, value in vars(manager).items() if isinstance(value, dict) and value]
            assert not kept, f"{kept} outlived the requests"
        assert self.kv.reset_prefix_cache() and not self.kv.pool.cached_block_hash_to_block.blocks()


KINDS = ["full_attention", "sliding_window"]


@st.composite
def group_lists(draw: st.DrawFn) -> list[KVGroup]:
    sizes = st.sampled_from([2, 4, 6])
    group = st.builds(KVGroup, st.sampled_from(KINDS), sizes, st.just([0]), st.integers(1, 11))
    return [KVGroup("full_attention", 2, [0])] * draw(st.integers(0, 1)) + draw(st.lists(group, min_size=1, max_size=3))


@settings(max_examples=150)
@given(st.data(), group_lists(), st.integers(4, 70), st.booleans())
def test_random_runs(data: st.DataObject, groups: list[KVGroup], num_blocks: int, caching: bool) -> None:
    smallest = min(g.block_size for g in groups)
    groups = [g if g.block_size % smallest == 0 else KVGroup(g.kind, smallest, [0], g.window) for g in groups]
    sim = Simulation(lambda low, high: data.draw(st.integers(low, high)), groups, num_blocks, caching)
    actions = [sim.advance, sim.advance, sim.answer, sim.answer, sim.draft, sim.preempt, sim.go_bad]
    for _ in range(data.draw(st.integers(10, 60))):
        choice = sim.draw(0, len(actions))
        if choice == len(actions) or not sim.running:
            sim.admit()
        else:
            actions[choice](sim.running[sim.draw(0, len(sim.running) - 1)])
        sim.check()
    sim.drain()

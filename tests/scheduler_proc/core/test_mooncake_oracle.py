"""KVCacheManager on a real trace, one request after another: its hits equal those of a plain model.

"engine" is a paged pool with a first-in first-out free queue. "engine-u" differs in one point: a freed block without
cached content goes to the head of the queue. BlockPool is engine-u; FifoBlockPool, for replays of other engines, is
engine. The expected hits of the excerpt are computed here with lists and dicts; tests/nightly/traces has the whole half
hour.
"""

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.replay.core.fifo_pool import FifoBlockPool
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.manager import KVCacheManager

pytestmark = pytest.mark.full

TRACE_BLOCK = 512
EXCERPT = Path(__file__).parents[2] / "data" / "mooncake_excerpt.jsonl"


class Arrival(NamedTuple):
    input_length: int
    output_length: int
    hash_ids: list[int]

    def content(self, index: int, block_size: int) -> tuple[int, int]:
        """Return the identity of block ``index`` of the prompt: its last hash id, and its index within that id."""
        last_token = (index + 1) * block_size - 1
        inside = index % (TRACE_BLOCK // block_size) if block_size < TRACE_BLOCK else 0
        return self.hash_ids[last_token // TRACE_BLOCK], inside


class Found(NamedTuple):
    hit_blocks: int
    requests_with_a_hit: int
    rejected: int


def read_arrivals(lines: Iterable[str]) -> list[Arrival]:
    rows = map(json.loads, lines)
    return [Arrival(row["input_length"], row["output_length"], row["hash_ids"]) for row in rows]


# ---- plain model


def simulate(arrivals: list[Arrival], block_size: int, capacity: int, *, plain_first: bool) -> Found:
    """Compute the hits with lists and dicts. ``plain_first``: engine-u instead of engine."""
    queue = list(range(capacity))
    content_of: dict[int, Hashable] = {}
    copies: dict[Hashable, list[int]] = {}  # the oldest first
    hit_blocks = with_hit = rejected = 0
    for number, arrival in enumerate(arrivals):
        written = arrival.input_length + arrival.output_length - 1
        needed = -(-written // block_size)
        if needed > capacity:
            rejected += 1
            continue
        prompt = [arrival.content(i, block_size) for i in range(arrival.input_length // block_size)]
        held: list[int] = []
        for content in prompt[: (arrival.input_length - 1) // block_size]:
            if not copies.get(content):
                break
            held.append(copies[content][0])
        hits = len(held)
        hit_blocks += hits
        with_hit += hits > 0
        queue = [block for block in queue if block not in held]
        for _ in range(needed - hits):
            block = queue.pop(0)
            if block in content_of:
                copies[content_of.pop(block)].remove(block)
            held.append(block)
        contents = prompt + [("generated", number, i) for i in range(len(prompt), written // block_size)]
        for block, content in zip(held[hits:], contents[hits:], strict=False):
            content_of[block] = content
            copies.setdefault(content, []).append(block)
        last_first = held[::-1]
        if plain_first:
            plain = [block for block in last_first if block not in content_of]
            queue = plain + queue + [block for block in last_first if block in content_of]
        else:
            queue += last_first
    return Found(hit_blocks, with_hit, rejected)


# ---- KVCacheManager


@dataclass
class Replayed:
    """The fields of a request that the manager reads."""

    handle: int
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    num_acknowledged_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    account: int = 0


def replay(arrivals: list[Arrival], block_size: int, capacity: int, pool_class: type[BlockPool] = BlockPool) -> Found:
    """Look up, compute, extend and free each request before the next one."""
    layout = KVLayout([KVGroup("full_attention", block_size, [0])], num_kv_heads=1, head_dim=4, dtype="float32")
    kv = KVCacheManager(layout, capacity + 1, True, pool_class=pool_class)
    hit_blocks = with_hit = rejected = 0
    for number, arrival in enumerate(arrivals):
        written = arrival.input_length + arrival.output_length - 1
        if written > kv.max_tokens:
            rejected += 1
            continue
        contents = (arrival.content(i, block_size) for i in range(arrival.input_length // block_size))
        request = Replayed(number, [b"%d %d" % content for content in contents], arrival.input_length)
        hits, num_hit_tokens = kv.get_computed_blocks(request)
        given = kv.allocate_slots(request, arrival.input_length - num_hit_tokens, hits, num_hit_tokens)
        assert given is not None, "no other request holds blocks"
        request.num_computed_tokens = arrival.input_length
        kv.cache_blocks(request, arrival.input_length)
        assert kv.allocate_slots(request, arrival.output_length - 1) is not None
        request.num_computed_tokens = request.num_tokens = written
        for index in range(len(request.block_hashes), written // block_size):
            request.block_hashes.append(b"generated %d %d" % (number, index))
        kv.cache_blocks(request, written)
        kv.free(request)
        hit_blocks += num_hit_tokens // block_size
        with_hit += num_hit_tokens > 0
    kv.check()
    assert kv.pool.num_free_blocks == capacity
    return Found(hit_blocks, with_hit, rejected)


@pytest.fixture(scope="module")
def excerpt() -> list[Arrival]:
    return read_arrivals(EXCERPT.read_text(encoding="utf-8").splitlines())


class TestExcerpt:
    """Capacities from one that rejects the longest prompts to one that never evicts."""

    sizes = pytest.mark.parametrize(
        ("block_size", "capacity"),
        [(512, 60), (512, 500), (512, 2203), (512, 3572), (512, 5000), (128, 8880), (256, 700), (1024, 1860)],
    )

    @sizes
    def test_block_pool_equals_engine_u(self, excerpt: list[Arrival], block_size: int, capacity: int) -> None:
        expected = simulate(excerpt, block_size, capacity, plain_first=True)
        assert replay(excerpt, block_size, capacity) == expected

    @sizes
    def test_fifo_pool_equals_engine(self, excerpt: list[Arrival], block_size: int, capacity: int) -> None:
        expected = simulate(excerpt, block_size, capacity, plain_first=False)
        assert replay(excerpt, block_size, capacity, FifoBlockPool) == expected

    def test_excerpt_distinguishes_policies_and_capacities(self, excerpt: list[Arrival]) -> None:
        small, usual, large = (simulate(excerpt, 512, n, plain_first=True) for n in (60, 500, 5000))
        assert small.rejected > 0 and usual.rejected == large.rejected == 0
        assert small.hit_blocks < usual.hit_blocks < large.hit_blocks == 191
        for block_size, capacity in [(512, 2203), (512, 3572), (128, 8880), (1024, 1860)]:
            engine_u, engine = (simulate(excerpt, block_size, capacity, plain_first=u) for u in (True, False))
            assert engine_u.hit_blocks > engine.hit_blocks

"""Hits of public traces, one call at a time: the integers that were worked out for them without any scheduler.

"engine-u" is a paged pool with a first-in first-out free queue, in which a freed block without content is reused at
once; "engine" reuses freed blocks in the order in which they were freed. With ``QUIRE_TRACES`` set to the folder of
the whole traces, these are checked against the published figures; without, an excerpt against plain lists.
"""

import os
from pathlib import Path

import pytest

from quire.launch.replay.costs.cost import ConstantCost
from quire.launch.replay.formats.detect import load_workload
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.simulate.setup import make_setup
from quire.launch.replay.simulate.whatif import run_workload
from quire.launch.replay.workload.workload import NAME_BYTES, Workload, block_names

pytestmark = pytest.mark.full

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake_excerpt.jsonl"
TRACES = os.environ.get("QUIRE_TRACES", "")
whole = pytest.mark.skipif(not TRACES, reason="set QUIRE_TRACES to the folder of the traces")

MOONCAKE = "mooncake/conversation_0-30min.jsonl.gz"
SMALL = "agentic_coding/conversations_16_small.jsonl.xz"
LARGE = "agentic_coding/conversations_120.jsonl.xz"


def found(workload: Workload, block_size: int, blocks: str, **more: str) -> tuple[int, int, int]:
    """(hit blocks, requests with a hit, rejected)."""
    given = {"block_size": str(block_size), "num_usable_blocks": blocks, **more}
    setup = make_setup(workload, given, None)
    runs = run_workload(workload, setup, ConstantCost(10), concurrency=1).requests
    hit_tokens = sum(run.num_cached_tokens for run in runs)
    assert hit_tokens % block_size == 0
    rejected = sum(run.finish == "rejected" for run in runs)
    return hit_tokens // block_size, sum(run.num_cached_tokens > 0 for run in runs), rejected


def by_lists(workload: Workload, block_size: int, capacity: int, *, plain_first: bool) -> tuple[int, int, int]:
    """The same from the definitions: a free queue of contents, None for none; the head is reused first."""
    queue: list[bytes | None] = [None] * capacity
    hit_blocks = with_hit = rejected = 0
    for call in workload.calls:
        written = call.num_prompt_tokens + call.num_output_tokens - 1
        needed = -(-written // block_size)
        if needed > capacity:
            rejected += 1
            continue
        raw = block_names(call, block_size)
        names = [raw[at : at + NAME_BYTES] for at in range(0, len(raw), NAME_BYTES)]
        hits = 0
        while hits < (call.num_prompt_tokens - 1) // block_size and names[hits] in queue:
            queue.remove(names[hits])  # the first copy is the oldest here: copies age out in the order they came
            hits += 1
        del queue[: needed - hits]
        full = written // block_size
        held = [*names[:full], *[None] * (needed - full)]
        freed = held[::-1]
        if plain_first and full < needed:
            queue.insert(0, None)
            freed = freed[1:]
        queue += freed
        hit_blocks += hits
        with_hit += hits > 0
    return hit_blocks, with_hit, rejected


@pytest.mark.parametrize("block_size", [256, 512, 1024])
def test_an_excerpt_is_as_lists_have_it(block_size: int) -> None:
    workload = load_workload(EXCERPT, "mooncake", LoadOptions())
    capacity = 400 * 512 // block_size
    mine = found(workload, block_size, str(capacity))
    assert mine == by_lists(workload, block_size, capacity, plain_first=True)
    fifo = found(workload, block_size, str(capacity), uncached_blocks_first="false")
    assert fifo == by_lists(workload, block_size, capacity, plain_first=False)
    unlimited = found(workload, block_size, "infinite")
    assert unlimited == by_lists(workload, block_size, 2000 * 1024 // block_size, plain_first=True)
    assert unlimited[0] >= mine[0]
    assert mine[0] > 100 or block_size > 512  # so early in the trace, only the first block comes back


@whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "hits"),
    [("1000", 6358), ("10000", 30197), ("30000", 45895), ("50000", 49366), ("100000", 49889), ("infinite", 49889)],
)
def test_mooncake_as_published(blocks: str, hits: int) -> None:
    workload = load_workload(Path(TRACES) / MOONCAKE, "auto", LoadOptions())
    assert found(workload, 512, blocks) == (hits, 5718, 0)


@whole
@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "hits"), [("1000", 6329), ("10000", 29228), ("50000", 49254)])
def test_mooncake_with_blocks_reused_in_the_order_of_freeing(blocks: str, hits: int) -> None:
    workload = load_workload(Path(TRACES) / MOONCAKE, "auto", LoadOptions())
    assert found(workload, 512, blocks, uncached_blocks_first="false") == (hits, 5718, 0)


@whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "hits", "with_hit"),
    [(16, 1597181, 5718), (64, 399273, 5718), (128, 199624, 5718), (256, 99806, 5718), (1024, 22619, 2021)],
)
def test_mooncake_re_blocked_without_end(block_size: int, hits: int, with_hit: int) -> None:
    workload = load_workload(Path(TRACES) / MOONCAKE, "auto", LoadOptions())
    assert found(workload, block_size, "infinite") == (hits, with_hit, 0)


@whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "hits", "with_hit", "rejected"),
    [("2000", 136453, 149, 76), ("5000", 345769, 263, 14), ("10000", 440444, 287, 0), ("infinite", 532732, 334, 0)],
)
def test_agentic_conversations_as_published(blocks: str, hits: int, with_hit: int, rejected: int) -> None:
    workload = load_workload(Path(TRACES) / SMALL, "auto", LoadOptions())
    assert found(workload, 64, blocks) == (hits, with_hit, rejected)


@whole
@pytest.mark.slow
def test_many_agentic_conversations_without_end() -> None:
    workload = load_workload(Path(TRACES) / LARGE, "auto", LoadOptions())
    assert found(workload, 64, "infinite") == (14207074, 6808, 0)

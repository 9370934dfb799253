"""Prefix cache hits of public traces, one call at a time, against published counts made without a scheduler.

"engine-u" is a paged pool with a first-in first-out free queue, in which a freed block without content is reused at
once; "engine" reuses freed blocks in the order in which they were freed. ``QUIRE_TRACES`` names the traces' folder.
"""

import os
from pathlib import Path

import pytest

from quire.replay.costs.cost import ConstantCost
from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.simulate.setup import make_setup
from quire.replay.simulate.whatif import run_workload
from quire.replay.workload.workload import Workload

TRACES = os.environ.get("QUIRE_TRACES", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES, reason="set QUIRE_TRACES to the folder of the traces"),
]
MOONCAKE = "mooncake/conversation_0-30min.jsonl.gz"
SMALL = "agentic_coding/conversations_16_small.jsonl.xz"
LARGE = "agentic_coding/conversations_120.jsonl.xz"
BY_BLOCKS = {"1000": 6358, "10000": 30197, "30000": 45895, "50000": 49366, "100000": 49889, "infinite": 49889}
IN_ORDER = {"1000": 6329, "10000": 29228, "50000": 49254}
BY_SIZE = {16: (1597181, 5718), 64: (399273, 5718), 128: (199624, 5718), 256: (99806, 5718), 1024: (22619, 2021)}


def found(workload: Workload, block_size: int, blocks: str, **more: str) -> tuple[int, int, int]:
    """Return (hit blocks, requests with a hit, rejected requests)."""
    given = {"block_size": str(block_size), "num_usable_blocks": blocks, **more}
    setup = make_setup(workload, given, None)
    runs = run_workload(workload, setup, ConstantCost(10), concurrency=1).requests
    hit_tokens = sum(run.num_cached_tokens for run in runs)
    assert hit_tokens % block_size == 0
    rejected = sum(run.finish == "rejected" for run in runs)
    return hit_tokens // block_size, sum(run.num_cached_tokens > 0 for run in runs), rejected


@pytest.mark.parametrize(
    ("name", "block_size", "blocks", "uncached_first", "expected"),
    [
        *[(MOONCAKE, 512, blocks, "true", (hits, 5718, 0)) for blocks, hits in BY_BLOCKS.items()],
        *[(MOONCAKE, 512, blocks, "false", (hits, 5718, 0)) for blocks, hits in IN_ORDER.items()],
        *[(MOONCAKE, size, "infinite", "true", (*figures, 0)) for size, figures in BY_SIZE.items()],
        (SMALL, 64, "2000", "true", (136453, 149, 76)),
        (SMALL, 64, "5000", "true", (345769, 263, 14)),
        (SMALL, 64, "10000", "true", (440444, 287, 0)),
        (SMALL, 64, "infinite", "true", (532732, 334, 0)),
        (LARGE, 64, "infinite", "true", (14207074, 6808, 0)),
    ],
)
def test_hits_equal_published_counts(
    name: str, block_size: int, blocks: str, uncached_first: str, expected: tuple[int, int, int]
) -> None:
    workload = load_workload(Path(TRACES) / name, "auto", LoadOptions())
    assert found(workload, block_size, blocks, uncached_blocks_first=uncached_first) == expected

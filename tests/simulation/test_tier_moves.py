"""Blocks between tiers under every fault of a copy: no wrong content is used, and some request always advances."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from tier_load import TierLoad
from tiers import thinned

from quire.kernels.cpu.pages.page_moves import PageMoves
from quire.scheduler_proc.features.transfers import Transfers
from quire.scheduler_proc.kv.block_pool import BlockPool


@pytest.mark.parametrize("first", thinned(range(0, 96, 8), keep=1))
def test_moves_under_faults(first: int) -> None:
    """In all 116,000 moves; ``tier_moves.py`` runs more."""
    num_moves = sum(TierLoad(seed, check_every=20).run()["moves"] for seed in range(first, first + 8))
    assert num_moves > 7_000


@pytest.mark.full
@pytest.mark.parametrize("first", thinned(range(0, 2400, 300), keep=1))
def test_requests_advance_in_tiny_pools(first: int) -> None:
    for seed in range(first, first + 300):
        TierLoad(seed, short=True, check_every=10).run()


def _no_failures(self: Any, answer: Any, moved: Any = Transfers.moved) -> None:
    moved(self, msgspec.structs.replace(answer, failed=[]))


def _unchecked(self: Any, memory: Any, moves: Any, *, is_load: bool, move: Any = PageMoves.move) -> Any:
    move(self, memory, moves, is_load=is_load)
    return np.zeros(len(moves.blocks), np.uint8)


GUARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "failed pages are not used": lambda: mock.patch.object(Transfers, "moved", _no_failures),
    "tags are compared": lambda: mock.patch.object(PageMoves, "move", _unchecked),
    "sources are held": lambda: mock.patch.multiple(
        BlockPool, begin_copy=lambda self, blocks: None, end_copy=lambda self, blocks, places: None
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("guard", GUARDS)
def test_moves_fail_without_guard(guard: str) -> None:
    with GUARDS[guard](), pytest.raises(AssertionError):
        for seed in range(20):
            TierLoad(seed, check_every=20).run()

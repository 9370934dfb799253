"""No two rows write the same slot: a correct scheduler is accepted, and every overlap is refused.

``tests/abuse/test_steps.py`` has the plain overlaps of a diff.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.protocol.model.kv_layout import KVGroup
from quire.worker_proc.batch.group_tables import make_block_tables
from quire.worker_proc.batch.input_batch import StepRefused

CPU = torch.device("cpu")
NUM_BLOCKS = 64
FULL = KVGroup("full_attention", 4, [0])
WINDOW = KVGroup("sliding_window", 4, [1], window=6)


class Rows:
    """Tables with owners, and a column of computed positions as in a batch."""

    def __init__(self, *groups: KVGroup, max_rows: int = 4) -> None:
        self.num_computed = np.zeros(max_rows, np.int32)
        self.tables = make_block_tables(groups, NUM_BLOCKS, 80, self.num_computed, CPU)

    def add(self, row: int, *block_ids: list[int], computed: int = 0) -> None:
        """Add a row as a step does: check its blocks to write first."""
        own = [block_id for ids in block_ids for block_id in ids[computed // 4 :]]
        self.tables.require_free(np.array(own, np.int64), ())
        self.num_computed[row] = computed
        self.tables.add_row(row, block_ids)

    def append(self, row: int, group: int, block_ids: list[int]) -> None:
        self.append_rows([row] * len(block_ids), [group] * len(block_ids), block_ids)

    def append_rows(self, rows: list[int], groups: list[int], block_ids: list[int]) -> None:
        real = np.array(block_ids, np.int64)
        self.tables.require_free(real[real != 0], ())
        self.tables.append_rows(np.array(rows, np.int64), np.array(groups, np.int64), real)

    def move(self, source: int, target: int) -> None:
        """Move a row as a batch does: move columns and tables, then clear the source."""
        self.num_computed[target] = self.num_computed[source]
        self.tables.move_row(source, target)
        self.clear(source)

    def clear(self, row: int) -> None:
        self.num_computed[row] = 0
        self.tables.clear_row(row)


def refused() -> "pytest.RaisesExc[StepRefused]":
    return pytest.raises(StepRefused, match="slot overlap")


def test_prefix_hits_are_shared_and_later_blocks_are_not() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2, 3], computed=0)
    rows.num_computed[0] = 9
    rows.add(1, [1, 2, 4], computed=8)
    rows.add(2, [1, 2, 5], computed=8)
    rows.tables.check()
    with refused():  # block 3 is half full: row 3 continues in the middle of it
        rows.add(3, [1, 2, 3], computed=9)


def test_full_block_of_a_running_row_stays_claimed() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2])
    rows.num_computed[0] = 8
    with refused():
        rows.add(1, [1])


def test_prefix_hit_is_not_written_after_its_writer_is_removed() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2])
    rows.num_computed[0] = 5
    rows.add(1, [1, 3], computed=4)
    rows.add(2, [1, 4], computed=4)
    rows.tables.commit()
    rows.clear(0)
    rows.clear(1)
    rows.tables.check()
    rows.append(2, 0, [3, 2])  # no row has these any more
    with refused():
        rows.add(0, [1])
    rows.clear(0)
    rows.clear(2)
    rows.add(0, [1])
    rows.tables.check()


def test_prefix_may_be_read_in_the_step_that_writes_it() -> None:
    rows = Rows(FULL)
    rows.add(0, [1])
    rows.tables.commit()
    rows.add(1, [1, 2, 4], computed=8)  # block 2 is full when this step is done
    rows.append(0, 0, [2, 3])
    rows.tables.check()
    rows.tables.commit()
    rows.num_computed[0] = 9
    rows.clear(0)
    with refused():
        rows.add(0, [2])


def test_row_removed_in_its_first_step_counts_no_reads() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2], computed=4)
    rows.clear(0)
    rows.add(0, [3])
    rows.tables.commit()
    rows.tables.check()
    rows.add(1, [1])


def test_blocks_of_a_removed_row_are_free_in_the_same_step() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2, 3])
    rows.clear(0)
    rows.add(0, [3, 1])
    rows.add(1, [2])
    rows.tables.check()


def test_claims_move_with_their_row() -> None:
    rows = Rows(FULL)
    rows.add(0, [1])
    rows.add(1, [2])
    rows.add(2, [3])
    rows.clear(0)
    rows.move(2, 0)
    rows.tables.check()
    rows.append(1, 0, [1])
    with refused():
        rows.append(1, 0, [3])


def test_move_ends_the_claims_of_its_target() -> None:
    rows = Rows(FULL)
    rows.add(0, [1])
    rows.add(1, [2])
    rows.tables.move_row(1, 0)
    rows.append(2, 0, [1])
    with refused():
        rows.append(2, 0, [2])


def test_groups_share_one_pool() -> None:
    rows = Rows(FULL, WINDOW)
    rows.add(0, [1], [2])
    with refused():
        rows.append(0, 1, [1])
    with refused():
        rows.add(1, [3], [3])


def test_block_left_of_the_window_may_be_reassigned() -> None:
    computed = 8  # the last position that still reads block 1, which holds positions 0 to 3: a window of 6 sees 3 to 8
    rows = Rows(WINDOW)
    rows.add(0, [1, 2, 3])
    rows.num_computed[0] = computed
    with refused():
        rows.add(1, [1])
    rows.clear(1)
    rows.num_computed[0] = computed + 1
    rows.add(1, [1])
    rows.tables.check()
    with refused():
        rows.append(0, 0, [1])


def test_row_may_get_back_its_block_left_of_the_window() -> None:
    rows = Rows(WINDOW)
    rows.add(0, [1, 2, 3])
    rows.num_computed[0] = 9
    rows.append(0, 0, [1])
    rows.tables.check()
    with refused():
        rows.append(0, 0, [1])


def test_null_blocks_have_no_owner() -> None:
    rows = Rows(WINDOW, WINDOW)
    for row in range(3):
        rows.add(row, [0, 0, 3 * row + 1], [0, 0, 3 * row + 2], computed=8)
        rows.append(row, 1, [0, 3 * row + 3])
    rows.tables.check()


def test_check_finds_an_overlap() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2])
    rows.add(1, [3])
    rows.tables.tables[0].append_row(1, [2])  # past the owners
    with pytest.raises(AssertionError, match="rows 0 and 1 write to block 2"):
        rows.tables.check()


def test_check_finds_a_block_without_a_claim() -> None:
    rows = Rows(FULL)
    rows.add(0, [1])
    rows.tables.tables[0].append_row(0, [2])
    with pytest.raises(AssertionError, match="has not claimed 2"):
        rows.tables.check()


def test_check_finds_a_writer_of_a_read_block() -> None:
    rows = Rows(FULL)
    rows.add(0, [1, 2], computed=4)
    rows.num_computed[0] = 0
    with pytest.raises(AssertionError, match=r"has not claimed 1"):
        rows.tables.check()


# ---- a correct scheduler, and one with a mistake


class Pool:
    """A small scheduler with one full and one window group, prefix hits and removals. Counts references."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows = Rows(FULL, WINDOW, max_rows=5)
        self.refs = [1] + [0] * (NUM_BLOCKS - 1)
        self.held: list[tuple[list[int], list[int]]] = []
        self.computed: list[int] = []

    def free_blocks(self, count: int) -> list[int]:
        free = [block_id for block_id, refs in enumerate(self.refs) if not refs]
        taken = self.rng.sample(free, count)
        for block_id in taken:
            self.refs[block_id] = 1
        return taken

    def add(self) -> None:
        """Add a row; half of the rows share the full blocks of another row."""
        if len(self.held) == 5 or self.refs.count(0) < 4:
            return
        full, window, computed = [], [], 0
        if self.held and self.rng.random() < 0.5:
            other = self.rng.randrange(len(self.held))
            hit = self.computed[other] // 4
            full = self.held[other][0][:hit]
            first = max(0, hit * 4 - WINDOW.window + 1) // 4
            window = [0] * first + self.held[other][1][first:hit]
            if 0 in window[first:]:
                return
            computed = hit * 4
            for block_id in full + window[first:]:
                self.refs[block_id] += 1
        self.held.append((full + self.free_blocks(1), window + self.free_blocks(1)))
        self.computed.append(computed)
        self.rows.add(len(self.held) - 1, *self.held[-1], computed=computed)

    def run(self) -> None:
        """Compute a few positions of every row; blocks left of its window may be allocated by the next row at once."""
        for row, (full, window) in enumerate(self.held):
            count = self.rng.randrange(4)
            end = self.computed[row] + count
            skipped = max(0, self.computed[row] - WINDOW.window + 1) // 4
            for index, block_id in enumerate(window[:skipped]):
                if block_id:
                    self.refs[block_id] -= 1
                    window[index] = 0
            missing = -(-end // 4) - len(full)
            if end > 80 or self.refs.count(0) < 2 * max(missing, 0):
                continue
            for group, blocks in enumerate((full, window)):
                new = self.free_blocks(max(missing, 0))
                blocks += new
                self.rows.append(row, group, new)
            self.computed[row] = end
        # The worker's column is updated after the step, like the scheduler's acknowledged count.
        self.rows.num_computed[: len(self.computed)] = self.computed

    def remove(self) -> None:
        if not self.held:
            return
        row, last = self.rng.randrange(len(self.held)), len(self.held) - 1
        for block_id in filter(None, self.held[row][0] + self.held[row][1]):
            self.refs[block_id] -= 1
        self.rows.clear(row)
        if row != last:
            self.rows.move(last, row)
        self.held[row], self.computed[row] = self.held[last], self.computed[last]
        self.held.pop()
        self.computed.pop()

    def used_in_full_group(self) -> list[int]:
        return [block_id for full, _ in self.held for block_id in full]


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32))
def test_accepts_correct_scheduler_and_refuses_every_mistake(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(rng)
    for _ in range(30):
        rng.choice((pool.add, pool.run, pool.run, pool.remove))()
        pool.rows.tables.commit()
        pool.rows.tables.check()
    used = pool.used_in_full_group()
    if used:
        with refused():
            pool.rows.append(rng.randrange(len(pool.held)), rng.randrange(2), [rng.choice(used)])

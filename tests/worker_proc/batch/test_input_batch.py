"""Rows stay without gaps, columns follow every change, and a batch update has all row changes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tiers import thinned

from quire.protocol.request.logits_processors import BatchUpdate, MoveDirectionality
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.block_table import BlockTable
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch, RowColumn

MAX_ROWS, MAX_LEN = 6, 12
COLUMNS = (
    *("handles", "num_computed", "num_known", "num_prompt", "active", "seed", "temperature", "top_k", "top_p"),
    *("min_p", "num_logprobs"),
)


def make_new(handle: int, tokens: list[int], **sampling: Any) -> NewRequestData:
    params = SamplingParams(seed=handle, **sampling)
    return NewRequestData(handle, f"r{handle}", len(tokens), len(tokens), handle % len(tokens), [1], params, handle**3)


def random_new(rng: random.Random, handle: int) -> tuple[NewRequestData, list[int]]:
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, MAX_LEN))]
    new = make_new(
        handle,
        tokens,
        temperature=rng.choice((0.0, 0.5, 2.0)),
        top_k=rng.choice((-1, 0, 5)),
        top_p=rng.choice((0.25, 1.0)),
        min_p=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 0, 3)),
    )
    return new, tokens


def packed(tokens: list[list[int]]) -> Int32 | None:
    return np.array([t for row in tokens for t in row], np.int32) if tokens else None


class Mirror:
    """Row state derived from batch updates alone: removed, then added, then moved."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def apply(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        for row in update.removed:
            del self.rows[row]
        for added in update.added:
            self.rows[added.row] = added.params.seed or 0
        for source, target, directionality in update.moved:
            assert directionality is MoveDirectionality.UNIDIRECTIONAL
            assert target not in self.rows, "a move onto an occupied row"
            self.rows[target] = self.rows.pop(source)
        assert sorted(self.rows) == list(range(update.batch_size))


class World:
    """A batch with a block table and an extra column, and the expected state of each handle."""

    def __init__(self) -> None:
        self.batch = InputBatch(MAX_ROWS, MAX_LEN)
        self.table = BlockTable(4, MAX_ROWS, MAX_LEN, 10_000, torch.device("cpu"))
        self.batch.register(MultiGroupBlockTable([self.table]))
        self.extra = torch.zeros(MAX_ROWS, 2)
        self.batch.register(RowColumn(self.extra))
        self.held: dict[int, tuple[NewRequestData, list[int]]] = {}

    def change(self, removed: list[int], new: list[tuple[NewRequestData, list[int]]]) -> BatchUpdate | None:
        for handle in removed:
            del self.held[handle]
        rows = self.batch.change_rows(removed, [n for n, _ in new], packed([t for _, t in new]))
        for row, (data, tokens) in zip(rows, new, strict=True):
            self.held[data.handle] = (data, tokens)
            self.table.append_row(row, [data.handle + 1])
            self.extra[row] = data.handle
        self.batch.check()
        return self.batch.builder.get_and_reset(self.batch.num_rows)

    def check_against_a_fresh_batch(self) -> None:
        order = sorted(self.held, key=lambda handle: self.batch.row(handle))
        fresh = InputBatch(MAX_ROWS, MAX_LEN)
        fresh.change_rows([], [self.held[h][0] for h in order], packed([self.held[h][1] for h in order]))
        assert fresh.num_rows == self.batch.num_rows and fresh.row_of == self.batch.row_of
        for name in COLUMNS:
            assert np.array_equal(getattr(self.batch, name), getattr(fresh, name)), name
        assert np.array_equal(self.batch.tokens.length, fresh.tokens.length)
        for handle, (_, tokens) in self.held.items():
            row = self.batch.row(handle)
            assert self.batch.tokens.data[row, : len(tokens)].tolist() == tokens
            assert self.table.slots(np.array([row]), np.array([1])).tolist() == [(handle + 1) * 4 + 1]
            assert self.extra[row].tolist() == [handle, handle]
        assert not self.table.num_blocks_per_row[self.batch.num_rows :].any()
        assert not self.extra[self.batch.num_rows :].any()


@pytest.mark.parametrize("seed", thinned(range(10), keep=3))
def test_columns_equal_a_newly_built_batch_after_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    world, mirror, next_handle = World(), Mirror(), 0
    for _ in range(120):
        removed = rng.sample(sorted(world.held), rng.randrange(len(world.held) + 1))
        room = MAX_ROWS - len(world.held) + len(removed)
        new = [random_new(rng, next_handle + i) for i in range(rng.randrange(room + 1))]
        next_handle += len(new)
        mirror.apply(world.change(removed, new))
        world.check_against_a_fresh_batch()
        assert mirror.rows == {row: handle for handle, row in world.batch.row_of.items()}


def three() -> World:
    world = World()
    world.change([], [(make_new(h, [h, h]), [h, h]) for h in (1, 2, 3)])
    return world


def test_freed_and_refilled_row_is_only_an_addition() -> None:
    """If it were also a removal, a processor would clear the state that it has just added."""
    update = three().change([2], [(make_new(9, [5]), [5])])
    assert update is not None
    assert (update.removed, [(a.row, a.params.seed) for a in update.added], update.moved) == ((), [(1, 9)], ())


def test_last_row_fills_a_gap() -> None:
    update = three().change([1], [])
    assert update is not None
    assert (update.batch_size, update.removed, update.added, update.moved) == (
        2,
        (0,),
        (),
        ((2, 0, MoveDirectionality.UNIDIRECTIONAL),),
    )


def test_gaps_at_the_end_need_no_move() -> None:
    update = three().change([2, 3], [])
    assert update is not None and (update.batch_size, update.removed, update.moved) == (1, (2, 1), ())


def test_no_update_if_no_row_changed() -> None:
    assert three().change([], []) is None


def test_removing_and_adding_the_same_handle_resets_its_row() -> None:
    world = three()
    world.change([2], [(make_new(2, [7, 8, 9], temperature=0.5), [7, 8, 9])])
    world.check_against_a_fresh_batch()


def test_each_update_is_returned_once() -> None:
    world = three()
    world.change([1], [])
    assert world.batch.builder.get_and_reset(2) is None


@pytest.mark.parametrize("damage", ["map", "gap", "active", "computed"])
def test_check_fails_on_damage(damage: str) -> None:
    batch = three().batch
    batch.check()
    if damage == "map":
        batch.handles[1] = 77
    elif damage == "gap":
        batch.num_rows = 4
    elif damage == "active":
        batch.active[5] = True
    else:
        batch.num_computed[0] = 3
    with pytest.raises(AssertionError):
        batch.check()

"""Guarantees of BatchUpdateBuilder for the batch and for logits processors."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protocol.request.logits_processors import AddedRequest, MoveDirectionality, MovedRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.batch_update import BatchUpdateBuilder


def removals(rows: list[int]) -> BatchUpdateBuilder:
    builder = BatchUpdateBuilder()
    for row in rows:
        builder.removed_append(row)
    return builder


@given(st.lists(st.integers(0, 63), unique=True), st.integers(0, 8))
def test_removed_is_descending_and_pop_returns_the_smallest(rows: list[int], taken: int) -> None:
    builder = removals(random.Random(7).sample(rows, len(rows)))
    left = sorted(rows)
    for _ in range(taken):
        assert builder.pop_removed() == (left.pop(0) if left else None)
    assert builder.removed == left[::-1]


@pytest.mark.parametrize("look", ["removed", "pop_removed"])
def test_rejects_removal_after_a_read(look: str) -> None:
    builder = removals([3, 5])
    {"removed": lambda: builder.removed, "pop_removed": builder.pop_removed}[look]()
    with pytest.raises(RuntimeError, match="after the removed rows were read"):
        builder.removed_append(1)


def test_builder_is_empty_after_an_update() -> None:
    builder = removals([2, 4])
    assert builder.get_and_reset(6) is not None
    builder.removed_append(1)
    update = builder.get_and_reset(5)
    assert update is not None and update.removed == (1,) and update.batch_size == 5


def test_returned_update_does_not_change() -> None:
    builder = removals([0, 2])
    added = AddedRequest(2, SamplingParams(), [1], [])
    assert builder.pop_removed() == 0
    builder.added.append(added)
    moved = MovedRequest(3, 2, MoveDirectionality.UNIDIRECTIONAL)
    builder.moved.append(moved)
    update = builder.get_and_reset(3)
    builder.removed_append(1)
    builder.added.append(added)
    builder.moved.append(moved)
    assert update is not None
    assert (update.removed, update.added, update.moved) == ((2,), (added,), (moved,))


def test_no_update_without_changes() -> None:
    builder = BatchUpdateBuilder()
    assert builder.get_and_reset(4) is None
    assert not builder.reset()
    builder.removed_append(0)
    assert builder.reset()
    assert builder.get_and_reset(4) is None


def test_refilled_row_is_not_a_removal() -> None:
    builder = removals([0])
    assert builder.pop_removed() == 0
    assert builder.get_and_reset(1) is None

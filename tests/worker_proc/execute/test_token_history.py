"""The host's tokens: behind the device until somebody asks, then exact, whatever happened to the rows meanwhile."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.execute.pending_result import HostCopy
from quire.worker_proc.execute.token_history import TokenHistory

ROWS, LENGTH = 4, 16


class Late(HostCopy):
    """A copy that counts how often it was waited for."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__([torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.bool)], None)
        self.waits = 0
        self.there = False

    @property
    def ready(self) -> bool:
        return self.there

    def arrays(self) -> list[Any]:
        self.waits += 1
        return super().arrays()


class World:
    """A batch whose samples are told by hand; ``lists``: answers are kept as lists."""

    def __init__(self, *, lists: bool = True) -> None:
        self.batch = InputBatch(ROWS, LENGTH, lambda sampling: lists)
        self.history = TokenHistory(self.batch)

    def change(self, removed: list[int], added: dict[int, list[int]]) -> None:
        """``added``: handle → prompt of two tokens and what was answered so far."""
        new = [NewRequestData(h, f"r{h}", 2, len(t), 0, [1], SamplingParams(), 0) for h, t in added.items()]
        tokens = [token for own in added.values() for token in own]
        self.batch.change_rows(removed, new, np.array(tokens, np.int32) if added else None)
        self.batch.builder.reset()

    def sample(self, tokens: list[int]) -> Late:
        copy = Late(tokens)
        rows = np.arange(len(tokens))
        self.history.sampled(rows, copy)
        self.batch.num_known[rows] += 1
        return copy

    def known(self, handle: int) -> list[int]:
        row = self.batch.row(handle)
        found: list[int] = self.batch.tokens.data[row, : self.batch.tokens.length[row]].tolist()
        return found

    def output(self, handle: int) -> list[int] | None:
        return self.batch.outputs.data[self.batch.row(handle)]


def test_nobody_waits_until_somebody_asks() -> None:
    world = World()
    world.change([], {1: [5, 6], 2: [7, 8]})
    copies = [world.sample([10, 20]), world.sample([11, 21])]
    assert [copy.waits for copy in copies] == [0, 0] and world.known(1) == [5, 6] and world.output(1) == []
    world.history.catch_up()
    assert [copy.waits for copy in copies] == [1, 1]
    assert world.known(1) == [5, 6, 10, 11] and world.output(2) == [20, 21]
    world.batch.check()


def test_the_list_is_the_same_object_all_along() -> None:
    world = World()
    world.change([], {1: [5, 6, 9]})
    output = world.output(1)
    assert output == [9]
    world.sample([10])
    world.history.catch_up()
    world.history.extend(0, [11, 12])
    world.batch.num_known[0] += 2
    assert output is world.output(1) and output == [9, 10, 11, 12] and world.known(1) == [5, 6, 9, 10, 11, 12]
    world.batch.check()


def test_what_is_there_is_taken_in_order() -> None:
    world = World()
    world.change([], {1: [5, 6]})
    first = world.sample([10])
    first.there = True
    assert world.known(1) == [5, 6]
    world.sample([11])
    assert world.known(1) == [5, 6, 10] and first.waits == 1


def test_copies_that_would_become_stale_are_read_in_time() -> None:
    world = World()
    world.change([], {1: [5, 6]})
    copies = [world.sample([10 + i]) for i in range(5)]
    assert [copy.waits for copy in copies] == [1, 1, 1, 0, 0]
    assert world.known(1) == [5, 6, 10, 11, 12]


def test_rows_that_moved_or_went_meanwhile() -> None:
    world = World()
    world.change([], {1: [1, 1], 2: [2, 2], 3: [3, 3]})
    world.sample([10, 20, 30])
    world.change([1], {})  # 3 moves into its row
    world.sample([31, 21])
    world.history.catch_up()
    assert world.known(3) == [3, 3, 30, 31] and world.output(2) == [20, 21]
    world.batch.check()


def test_a_handle_that_came_again_has_its_tokens_already() -> None:
    world = World()
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.change([1], {1: [1, 1, 10]})
    world.sample([11])
    world.history.catch_up()
    assert world.known(1) == [1, 1, 10, 11] and world.output(1) == [10, 11]


@pytest.mark.parametrize("length", [2, 3])
def test_a_handle_that_is_anothers_now_gets_none_of_the_old_ones(length: int) -> None:
    world = World()
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.change([1], {1: [7] * length})
    world.history.catch_up()
    assert world.known(1) == [7] * length


def test_lists_are_kept_of_those_only_whose_processors_look() -> None:
    world = World(lists=False)
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.history.catch_up()
    assert world.output(1) is None and world.known(1) == [1, 1, 10] and world.batch.outputs.num_kept == 0


def test_after_all_rows_are_gone_nothing_is_left_to_read() -> None:
    world = World()
    world.change([], {1: [1, 1]})
    copy = world.sample([10])
    world.change([1], {})
    world.history.clear()
    world.history.catch_up()
    assert copy.waits == 0

"""Tokens on the host: late until ``catch_up``, then exact, even if rows were moved or removed in between."""

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
    """A copy that counts how often a caller waited for it."""

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
    """A batch with scripted samples; ``lists``: output tokens are kept as lists."""

    def __init__(self, *, lists: bool = True) -> None:
        self.batch = InputBatch(ROWS, LENGTH, lambda sampling: lists)
        self.history = TokenHistory(self.batch)

    def change(self, removed: list[int], added: dict[int, list[int]]) -> None:
        """``added``: handle → prompt of two tokens and the output so far."""
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


def test_does_not_wait_before_catch_up() -> None:
    world = World()
    world.change([], {1: [5, 6], 2: [7, 8]})
    copies = [world.sample([10, 20]), world.sample([11, 21])]
    assert [copy.waits for copy in copies] == [0, 0] and world.known(1) == [5, 6] and world.output(1) == []
    world.history.catch_up()
    assert [copy.waits for copy in copies] == [1, 1]
    assert world.known(1) == [5, 6, 10, 11] and world.output(2) == [20, 21]
    world.batch.check()


def test_output_list_stays_the_same_object() -> None:
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


def test_ready_copies_are_stored_in_order() -> None:
    world = World()
    world.change([], {1: [5, 6]})
    first = world.sample([10])
    first.there = True
    assert world.known(1) == [5, 6]
    world.sample([11])
    assert world.known(1) == [5, 6, 10] and first.waits == 1


def test_reads_copies_before_their_memory_is_reused() -> None:
    world = World()
    world.change([], {1: [5, 6]})
    copies = [world.sample([10 + i]) for i in range(5)]
    assert [copy.waits for copy in copies] == [1, 1, 1, 0, 0]
    assert world.known(1) == [5, 6, 10, 11, 12]


def test_rows_moved_or_removed_before_the_copy_is_read() -> None:
    world = World()
    world.change([], {1: [1, 1], 2: [2, 2], 3: [3, 3]})
    world.sample([10, 20, 30])
    world.change([1], {})  # 3 moves into its row
    world.sample([31, 21])
    world.history.catch_up()
    assert world.known(3) == [3, 3, 30, 31] and world.output(2) == [20, 21]
    world.batch.check()


def test_readmitted_handle_already_has_its_tokens() -> None:
    world = World()
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.change([1], {1: [1, 1, 10]})
    world.sample([11])
    world.history.catch_up()
    assert world.known(1) == [1, 1, 10, 11] and world.output(1) == [10, 11]


@pytest.mark.parametrize("length", [2, 3])
def test_reused_handle_gets_no_tokens_of_the_old_request(length: int) -> None:
    world = World()
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.change([1], {1: [7] * length})
    world.history.catch_up()
    assert world.known(1) == [7] * length


def test_keeps_output_lists_only_for_processors_that_read_them() -> None:
    world = World(lists=False)
    world.change([], {1: [1, 1]})
    world.sample([10])
    world.history.catch_up()
    assert world.output(1) is None and world.known(1) == [1, 1, 10] and world.batch.outputs.num_kept == 0


def test_clear_discards_pending_copies() -> None:
    world = World()
    world.change([], {1: [1, 1]})
    copy = world.sample([10])
    world.change([1], {})
    world.history.clear()
    world.history.catch_up()
    assert copy.waits == 0

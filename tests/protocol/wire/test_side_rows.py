"""Rows beside tokens: parts of different widths, and a new kind, which is one entry in the table."""

from typing import Any

import numpy as np
import pytest
from fake_worker import logprob_rows
from scheduler_driver import Driver
from side_parts import side_rows

from quire.frontend.engine.streams import Stream, StreamTable
from quire.frontend.engine.update import Update
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest, SchedulerToFrontEnd
from quire.protocol.wire.logprobs import TokenLogprobs
from quire.protocol.wire.side_rows import LOGPROBS, SIDE_KINDS, RowsOf, SideKind, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput, WorkerToScheduler
from quire.scheduler_proc.messages.results import WorkerFault

ROWS = RowsOf.POSITIONS
MADE_UP = SideKind(9, "made-up rows", ROWS, "routed_experts", 1, (True,), lambda *_: 2, lambda rows: rows[0])


def pairs(*tokens: int) -> list[list[tuple[int, float]]]:
    return [[(token, -1.0), (token + 1, -2.0), (token + 2, -3.0)] for token in tokens]


def test_parts_of_different_widths_keep_their_order() -> None:
    """The table has the widest rows, as a worker computes them; each request gets those that it asked for."""
    table = logprob_rows(pairs(10, 20, 30, 40))
    rows = SideRows.of_table(LOGPROBS, [7, 5, 6], [0, 0, 0], [1, 2, 1], [1, 3, 1], table)
    assert rows.shape_error() is None
    want = [TokenLogprobs(10, -1.0, 1, []), TokenLogprobs(20, -1.0, 1, [(21, -2.0), (22, -3.0)])]
    assert rows.items()[:2] == want and [len(each.top) for each in rows.items()] == [0, 2, 2, 0]
    cut = rows.first_rows([0, 1, 1])
    assert cut is not None and cut.shape_error() is None and rows.first_rows([0, 0, 0]) is None
    assert [(handle, [each.tolist() for each in own]) for handle, _, own in cut.parts()] == [
        (5, [[[20, 21, 22]], [[1]], [[-1.0, -2.0, -3.0]]]),
        (6, [[[40]], [[1]], [[-1.0]]]),
    ]
    assert rows.first_rows([1, 2, 1]) is rows


def passed_on(union: Any, message: Any) -> Any:
    return Codec(union).decode([bytes(frame) for frame in Codec(union).encode(0, 1, message)]).message


def test_a_new_kind_is_an_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes from the worker's message through the scheduler to the updates of two front ends, and is checked."""
    monkeypatch.setitem(SIDE_KINDS, MADE_UP.number, MADE_UP)
    driver, updates = Driver(), dict[int, Update | None]()
    for client, name in enumerate("ab"):
        driver.add(name, [1, 2 + client], client=client, max_tokens=9)
    driver.schedule()
    made = [(handle, 0, [np.full((2, 2), 5 + handle, np.int32)]) for handle in (0, 1)]
    result = ModelRunnerOutput(1, np.array([10, 11], np.int32), np.array([0, 1], np.int32))
    narrow = side_rows(MADE_UP, (0, 0, [np.zeros((2, 1), np.int32)]))
    with pytest.raises(WorkerFault, match=r"made-up rows of handle 0: .* with 1 values, expected .* with 2 values"):
        driver.scheduler.consume(ModelRunnerOutput(1, result.tokens, result.handles, side=[narrow]))
    result = ModelRunnerOutput(1, result.tokens, result.handles, side=SideRows.of(MADE_UP, made))
    driver.scheduler.consume(passed_on(WorkerToScheduler, result))
    for client, message in driver.scheduler.take_messages():
        table = StreamTable()
        stream = Stream(AddRequest("ab"[client], np.array([1, 2], np.int32), SamplingParams(), 0))
        table.add(stream)
        table.apply(passed_on(SchedulerToFrontEnd, message))
        updates[client] = stream.take()
    assert [each.routed_experts.tolist() for each in updates.values() if each] == [[[5, 5]] * 2, [[6, 6]] * 2]  # type: ignore[union-attr]

"""Rows that arrive in parts: pooled rows and routed experts of streams, also after repeats."""

import weakref
from typing import Any

import numpy as np

from quire.frontend.engine.new_rows import NewRows
from quire.frontend.engine.streams import Stream, StreamTable
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import AddRequest, Ended, EndReason, Introduced, StepOutputs
from quire.protocol.wire.side_rows import POOLED, ROUTED_EXPERTS, SideKind, SideRows


def rows(first: int, count: int, dtype: Any = np.float32) -> Any:
    """Return rows with different values."""
    return np.arange(10 * first, 10 * (first + count), dtype=dtype).reshape(count, 10)[:, :2]


def test_repeats_are_dropped_and_nothing_follows_a_gap() -> None:
    found: NewRows = NewRows()
    assert found.take() is None
    for start, count in ((0, 3), (1, 2), (2, 3)):
        found.add(start, [rows(start, count)])
    np.testing.assert_array_equal(found.take(), [rows(0, 5)])
    found.add(0, [rows(0, 6)])
    found.add(7, [rows(7, 1)])
    np.testing.assert_array_equal(found.take(), [rows(5, 1)])
    assert found.take() is None


def test_rows_do_not_keep_those_of_other_requests() -> None:
    """They are views of one message, which has the rows of all requests of a step."""
    found: NewRows = NewRows()
    values = np.zeros((1000, 2), np.float32)
    message = weakref.ref(values)
    found.add(0, [values[5:6]])
    del values
    assert message() is None
    assert len(found.take()) == 1  # type: ignore[arg-type]


def table_of(*request_ids: str) -> tuple[StreamTable, list[Stream]]:
    """Return streams with prompts of two tokens; their handles count from 0."""
    table, prompt = StreamTable(), np.array([1, 2], np.int32)
    streams = [Stream(AddRequest(request_id, prompt, SamplingParams(), 0)) for request_id in request_ids]
    for stream in streams:
        table.add(stream)
    table.apply(StepOutputs([Introduced(i, name, 0) for i, name in enumerate(request_ids)], None, None, []))
    return table, streams


def step(
    *,
    ended: list[Ended] | None = None,
    tokens: dict[int, int] | None = None,
    side: list[SideRows] | None = None,
) -> StepOutputs:
    handles, values = (np.array(list(each), np.int32) for each in ((tokens or {}).keys(), (tokens or {}).values()))
    return StepOutputs([], handles, values, ended or [], side=side or [])


def side_of(kind: SideKind, *parts: tuple[int, int, Any]) -> list[SideRows]:
    """Return the rows of (handle, start, rows)."""
    return SideRows.of(kind, [(handle, start, [own]) for handle, start, own in parts])


def test_pooled_rows_come_with_the_end_and_once() -> None:
    table, (first, second) = table_of("a", "b")
    table.apply(step(side=side_of(POOLED, (0, 0, rows(0, 2)), (1, 0, rows(5, 1)))))
    assert first.take() is None
    table.apply(step(side=side_of(POOLED, (0, 0, rows(0, 2)), (0, 2, rows(2, 1)))))  # preempted in between
    end = int(EndReason.STOPPED)
    table.apply(step(ended=[Ended(0, end, 0), Ended(1, int(EndReason.ERROR), 0, None, "it broke")]))
    update, failed = first.take(), second.take()
    assert update is not None and failed is not None and failed.pooled is None and failed.detail == "it broke"
    assert (update.ended, update.token_ids, update.num_output_tokens) == (EndReason.STOPPED, [], 0)
    assert update.pooled is not None and update.pooled.dtype == np.float32
    np.testing.assert_array_equal(update.pooled, rows(0, 3))


def test_pooled_request_is_resubmitted_after_the_death_of_its_scheduler() -> None:
    table = StreamTable()
    request = AddRequest("a", np.arange(4, dtype=np.int32), SamplingParams(), 0, pooling=PoolingParams())
    stream = Stream(request)
    table.add(stream)
    assert stream.submission(1) is request
    stream.link_number = 1
    table.apply(StepOutputs([Introduced(3, "a", 0)], None, None, [], side=side_of(POOLED, (3, 0, rows(0, 2)))))
    table.forget_handles()
    second = stream.submission(2)
    assert second.resubmitted and second.pooling == PoolingParams() and second.output_token_ids is None
    pooled = side_of(POOLED, (0, 0, rows(0, 4)))
    table.apply(StepOutputs([Introduced(0, "a", 0)], None, None, [Ended(0, int(EndReason.STOPPED), 0)], side=pooled))
    update = stream.take()
    assert update is not None
    np.testing.assert_array_equal(update.pooled, rows(0, 4))


def test_routed_experts_come_with_the_tokens_but_not_for_the_last_one() -> None:
    table, (stream,) = table_of("a")
    experts = rows(0, 9, np.int32)
    table.apply(step(tokens={0: 5}, side=side_of(ROUTED_EXPERTS, (0, 0, experts[:2]))))
    update = stream.take()
    assert update is not None and update.routed_experts is not None and update.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(update.routed_experts, experts[:2])
    table.apply(step(tokens={0: 6}, side=side_of(ROUTED_EXPERTS, (0, 0, experts[:3]))))  # recomputed
    update = stream.take()
    assert update is not None
    np.testing.assert_array_equal(update.routed_experts, experts[2:3])
    table.apply(step(tokens={0: 7}, side=side_of(ROUTED_EXPERTS, (0, 3, experts[3:6]))))  # drafts after the end
    update = stream.take()
    assert update is not None
    np.testing.assert_array_equal(update.routed_experts, experts[3:4])


def test_muted_streams_keep_no_rows() -> None:
    table, (stream,) = table_of("a")
    stream.muted = True
    for kind in (POOLED, ROUTED_EXPERTS):
        table.apply(step(side=side_of(kind, (0, 0, rows(0, 1)))))
    stream.muted = False
    table.apply(step(ended=[Ended(0, int(EndReason.STOPPED), 0)]))
    update = stream.take()
    assert update is not None and update.pooled is None and update.routed_experts is None

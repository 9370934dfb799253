"""The stream table: applying a step's messages, mainly log probabilities of prompts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.frontend.engine.streams import Stream, StreamTable
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import AddRequest, Ended, EndReason, Introduced, StepOutputs
from quire.protocol.wire.logprobs import LogprobArrays
from quire.protocol.wire.side_rows import PROMPT_LOGPROBS, SideRows

WIDTH = 3


def request_of(request_id: str) -> AddRequest:
    return AddRequest(request_id, np.array([1, 2], np.int32), SamplingParams(), 0)


def table_of(*request_ids: str) -> tuple[StreamTable, list[Stream]]:
    table = StreamTable()
    streams = [Stream(request_of(request_id)) for request_id in request_ids]
    for stream in streams:
        table.add(stream)
    introduced = [Introduced(i, request_id, 0) for i, request_id in enumerate(request_ids)]
    table.apply(StepOutputs(introduced, None, None, []))
    return table, streams


def values_of(handle: int, places: range) -> tuple[Any, Any, Any]:
    """Return log probabilities that differ at each position, so that misplaced values are detected."""
    ids = np.array([[100 * handle + place, *range(1, WIDTH)] for place in places], np.int32)
    return ids, -ids.astype(np.float32), np.array(places, np.int32)


def parts_of(*parts: tuple[int, int, int], tokens: dict[int, int] | None = None) -> StepOutputs:
    """One message of (handle, start, count) parts, and a token for some handles."""
    found = []
    for handle, start, count in parts:
        ids, values, ranks = values_of(handle, range(start, start + count))
        found.append((handle, start, [ids, ranks[:, None], values]))
    tokens = tokens or {}
    handles, values = (np.array(list(each), np.int32) for each in (tokens, tokens.values()))
    return StepOutputs([], handles, values, [], side=SideRows.of(PROMPT_LOGPROBS, found))


def complete(table: LogprobArrays | None, handle: int, num_prompt: int) -> None:
    assert table is not None
    for got, wanted in zip(table.columns(), values_of(handle, range(1, num_prompt)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_prompt_logprobs_arrive_with_the_first_token() -> None:
    table, (first, second) = table_of("a", "b")
    table.apply(parts_of((0, 1, 4), (1, 1, 2)))
    assert first.take() is None
    table.apply(parts_of((1, 3, 5), (0, 5, 1), tokens={0: 7}))
    update = first.take()
    assert update is not None
    assert update.token_ids == [7]
    complete(update.prompt_logprobs, 0, 6)
    assert second.take() is None
    table.apply(StepOutputs([], np.array([0, 1], np.int32), np.array([8, 9], np.int32), []))
    later, of_second = first.take(), second.take()
    assert later is not None
    assert of_second is not None
    assert later.prompt_logprobs is None
    complete(of_second.prompt_logprobs, 1, 8)


def test_repeated_prompt_logprobs_are_dropped() -> None:
    table, (stream,) = table_of("a")
    table.apply(parts_of((0, 1, 3), tokens={0: 7}))
    assert stream.take() is not None
    table.apply(parts_of((0, 1, 3), tokens={0: 8}))
    update = stream.take()
    assert update is not None
    assert (update.token_ids, update.prompt_logprobs) == ([8], None)


def test_a_muted_stream_has_no_updates() -> None:
    table, (stream,) = table_of("a")
    stream.muted = True
    table.apply(parts_of((0, 1, 3), tokens={0: 7}))
    assert stream.take() is None


def test_an_end_before_the_first_token() -> None:
    table, (stream,) = table_of("a")
    table.apply(parts_of((0, 1, 3)))
    table.apply(StepOutputs([], None, None, [Ended(0, EndReason.ERROR, 0, detail="request_failed: x")]))
    update = stream.take()
    assert update is not None
    assert (update.ended, update.detail) == (EndReason.ERROR, "request_failed: x")
    assert len(table) == 0


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_repeated_parts(data: st.DataObject) -> None:
    """A preempted request starts again, maybe with other chunks."""
    num_prompt = data.draw(st.integers(2, 20))
    stream = Stream(request_of("a"))
    for _ in range(data.draw(st.integers(0, 2))):
        _place(data, stream, data.draw(st.integers(1, num_prompt - 1)))
    _place(data, stream, num_prompt)
    stream.pending()
    update = stream.take()
    assert update is not None
    assert update.prompt_logprobs is not None
    complete(update.prompt_logprobs, 4, num_prompt)


def _place(data: st.DataObject, stream: Stream, upto: int) -> None:
    place = 1
    while place < upto:
        end = data.draw(st.integers(place + 1, upto))
        ids, values, ranks = values_of(4, range(place, end))
        stream.add_rows(PROMPT_LOGPROBS, place, [ids, ranks[:, None], values])
        place = end


@pytest.mark.parametrize("num_best", [0, 1, 2, 20])
def test_entries(num_best: int) -> None:
    (entry,) = LogprobArrays(*values_of(4, range(1, 2))).entries(num_best)
    assert (entry.token_id, entry.logprob, entry.rank) == (401, -401.0, 1)
    assert entry.top == [(1, -1.0), (2, -2.0)][:num_best]

"""The states of a request have no gaps."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from quire.replay.run.request_states import STATES, StateInterval, state_intervals
from quire.replay.run.run_record import Moment, RequestRun


def test_states_with_a_preemption() -> None:
    run = RequestRun("a", 1.0, 9, scheduled=2.0, first_token=3.0, end=7.0, finish="stop")
    run.moments = [Moment(1.5, "wait", "queued"), Moment(4.0, "preempt", "youngest", "b"), Moment(5.0, "resume", "")]
    assert state_intervals(run, 99) == [
        StateInterval("queued", 1, 2),
        StateInterval("prefill", 2, 3),
        StateInterval("decode", 3, 4),
        StateInterval("preempted", 4, 5, "youngest", "b"),
        StateInterval("decode", 5, 7),
    ]


def test_token_in_flight_does_not_end_a_preemption() -> None:
    run = RequestRun("a", 0.0, 9, scheduled=1.0, first_token=3.0, end=6.0, finish="stop")
    run.moments = [Moment(2.0, "preempt", "itself"), Moment(4.0, "resume", "")]
    assert [each.state for each in state_intervals(run, 9)] == ["queued", "prefill", "preempted", "decode"]
    run.moments[1] = Moment(2.5, "resume", "")
    assert [each.state for each in state_intervals(run, 9)] == ["queued", "prefill", "preempted", "prefill", "decode"]


def test_unfinished_request_ends_at_cut_and_rejected_has_no_states() -> None:
    assert state_intervals(RequestRun("a", 2.0, 9), 5.0) == [StateInterval("queued", 2, 5)]
    assert state_intervals(RequestRun("a", 2.0, 9, end=2.0, finish="rejected"), 5.0) == []
    assert state_intervals(RequestRun("a", 2.0, 9), 1.0) == []


times = st.floats(-1, 20)
moments = st.lists(st.builds(Moment, st.floats(0, 20), st.sampled_from(["wait", "preempt", "resume"]), st.just("why")))


@given(st.floats(0, 10), times, times, times, moments)
def test_no_gaps_and_no_overlaps(
    arrival: float, scheduled: float, first: float, end: float, found: list[Moment]
) -> None:
    run = RequestRun("a", arrival, 9, scheduled=scheduled, first_token=first, end=end, moments=found)
    made = state_intervals(run, 30.0)
    assert all(each.begin < each.end and each.state in STATES for each in made)
    assert all(one.end == other.begin for one, other in pairwise(made))
    if made:
        assert (made[0].begin, made[-1].end) == (arrival, end if end >= 0 else 30.0)

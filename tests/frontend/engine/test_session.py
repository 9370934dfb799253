"""The front end's side of the link: resubmission when schedulers die or links break."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    CallsTool,
    Ended,
    EndReason,
    EngineState,
    Introduced,
    Rejected,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.link_messages import Hello, Refused, Welcome
from quire.protocol.wire.timeline import TimelineEvent


class Link:
    """A session, the messages that it sent on its current link, and the scheduler's side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sent: list[Any] = []
        self.session = Session(self.sent.append, 7, clock=clock)
        self.begin()

    def begin(self, *, after_death: bool = False, ready: bool = True) -> None:
        self.sent.clear()
        self.session.begin_link(after_death=after_death)
        assert isinstance(self.sent.pop(0), Hello)
        assert self.session.take(Welcome(1, "")) and self.session.take(EngineState("loading"))
        assert not self.sent
        if ready:
            self.session.take(EngineState("ready"))

    def die(self) -> None:
        self.begin(after_death=True)

    def add(self, name: str) -> Stream:
        return self.session.add(AddRequest(name, np.array([1, 2, 3], np.int32), SamplingParams(), 5))

    def give(self, stream: Stream, *tokens: int, ended: EndReason | None = None) -> None:
        """Send tokens to a stream, whose handle is its request id as a number."""
        handle = int(stream.request_id)
        introduced = [Introduced(handle, stream.request_id, 4)] if stream.handle is None else []
        endings = [] if ended is None else [Ended(handle, int(ended), len(stream.tokens) + len(tokens))]
        for token in tokens[:-1]:
            self.session.take(StepOutputs(introduced, np.array([handle], np.int32), np.array([token], np.int32), []))
            introduced = []
        last = (np.array([handle], np.int32), np.array(tokens[-1:], np.int32)) if tokens else (None, None)
        assert self.session.take(StepOutputs(introduced, *last, endings))

    def submitted(self) -> list[tuple[str, list[int]]]:
        """Return the submitted requests with their output tokens."""
        adds = [message for message in self.sent if isinstance(message, AddRequest)]
        return [(a.request_id, [] if a.output_token_ids is None else a.output_token_ids.tolist()) for a in adds]


def test_requests_in_flight_are_resubmitted_with_their_tokens() -> None:
    link = Link()
    one, two, done = link.add("1"), link.add("2"), link.add("3")
    link.give(one, 10, 11)
    link.give(done, 12, ended=EndReason.LENGTH)
    link.die()
    assert link.submitted() == [("1", [10, 11]), ("2", [])]
    link.give(one, 13, ended=EndReason.STOPPED)
    update = one.take()
    assert update is not None
    assert (update.token_ids, update.num_output_tokens, update.num_cached_tokens) == ([10, 11, 13], 3, 4)
    assert two.take() is None and len(link.session.table) == 1


def adds(link: Link) -> list[tuple[str, str, list[int]]]:
    """Return (id, parent, prompt) of each submitted request."""
    sent = [message for message in link.sent if isinstance(message, AddRequest)]
    return [(each.request_id, each.forked_from, each.prompt_token_ids.tolist()) for each in sent]


def test_a_prompt_is_sent_once_for_several_answers() -> None:
    link = Link()
    first = link.add("1")
    request = AddRequest("2", np.array([1, 2, 3], np.int32), SamplingParams(), 6)
    second = link.session.add(request, parent=first)
    assert adds(link) == [("1", "", [1, 2, 3]), ("2", "1", [])]
    assert link.sent[-1].num_forked_tokens == 3 and link.sent[-1].seed == 6
    link.give(second, 7)
    link.die()
    assert adds(link) == [("1", "", [1, 2, 3]), ("2", "", [1, 2, 3])], "a restart does not depend on the parent"
    assert link.submitted() == [("1", []), ("2", [7])]


@pytest.mark.parametrize("how", ["ended", "aborted", "stopped"])
def test_an_answer_whose_parent_is_over_has_its_own_prompt(how: str) -> None:
    link = Link()
    first = link.add("1")
    if how == "ended":
        link.give(first, 5, ended=EndReason.LENGTH)
    elif how == "aborted":
        link.session.abort(first)
    else:
        link.session.stop_at(first, 0)
    link.session.add(AddRequest("2", np.array([1, 2, 3], np.int32), SamplingParams(), 6), parent=first)
    assert adds(link)[-1] == ("2", "", [1, 2, 3])


def test_answers_added_while_there_is_no_scheduler_share_a_prompt() -> None:
    link = Link()
    link.begin(after_death=True, ready=False)
    first = link.add("1")
    link.session.add(AddRequest("2", np.array([1, 2, 3], np.int32), SamplingParams(), 6), parent=first)
    link.session.take(EngineState("ready"))
    assert adds(link) == [("1", "", [1, 2, 3]), ("2", "1", [])]


def test_a_late_fork_is_submitted_whole() -> None:
    link = Link()
    first = link.add("1")
    second = link.session.add(AddRequest("2", np.array([1, 2, 3], np.int32), SamplingParams(), 6), parent=first)
    assert link.session.take(Rejected("2", "parent_not_found", "forked_from", "there is no request '1' to fork"))
    assert adds(link)[-1] == ("2", "", [1, 2, 3])
    link.give(second, 5, ended=EndReason.LENGTH)
    update = second.take()
    assert update is not None and update.token_ids == [5]
    assert link.session.take(Rejected("9", "parent_not_found", "forked_from", "it was aborted since"))


def test_a_request_is_resubmitted_with_its_adapter() -> None:
    """A fork too, and also if its name stands for another content by then."""
    link, adapter = Link(), AdapterRef("sql", bytes(32), "/sql")
    prompt = np.array([1, 2, 3], np.int32)
    first = link.session.add(AddRequest("1", prompt, SamplingParams(), 5, adapter=adapter))
    link.session.add(AddRequest("2", prompt, SamplingParams(), 6, adapter=adapter), parent=first)
    link.add("3")
    link.give(first, 9)
    for _ in range(2):
        assert [each.adapter for each in link.sent if isinstance(each, AddRequest)] == [adapter, adapter, None]
        link.die()


def test_a_request_is_resubmitted_with_its_job_and_a_dead_scheduler_learns_no_tool() -> None:
    link, prompt = Link(), np.array([1, 2, 3], np.int32)
    stream = link.session.add(AddRequest("1", prompt, SamplingParams(), 5, job_id="mine", is_last_step=True))
    link.give(stream, 9)
    link.session.calls_tool(stream, "x" * 100)
    assert link.sent[-1] == CallsTool("1", "x" * 64)
    link.die()
    (again,) = (each for each in link.sent if isinstance(each, AddRequest))
    assert (again.job_id, again.is_last_step, again.resubmitted) == ("mine", True, True)
    link.give(stream, 8, ended=EndReason.LENGTH)
    link.begin(after_death=True)
    link.session.calls_tool(stream, "late")
    assert not link.sent


def test_requests_wait_while_there_is_no_scheduler() -> None:
    link = Link()
    link.begin(after_death=True, ready=False)
    assert link.session.state == "recovering"
    stream = link.add("1")
    assert not link.sent
    link.session.take(EngineState("ready"))
    assert link.submitted() == [("1", [])]
    link.session.take(EngineState("recovering"))
    link.session.take(EngineState("ready"))
    assert link.submitted() == [("1", [])], "a scheduler with new workers still has the request"
    link.give(stream, 5)


def test_aborted_and_stopped_requests_are_not_resubmitted() -> None:
    link = Link()
    aborted, stopped = link.add("1"), link.add("2")
    link.give(stopped, 1, 2, 3)
    link.session.abort(aborted)
    link.session.stop_at(stopped, 2)
    assert link.sent[-2:] == [Abort(["1"]), Stop("2", 2)]
    link.die()
    assert not link.submitted() and not len(link.session.table)


def test_an_abort_without_a_scheduler_sends_nothing() -> None:
    link = Link()
    link.begin(after_death=True, ready=False)
    stream = link.add("1")
    link.session.abort(stream)
    link.session.take(EngineState("ready"))
    assert not link.sent


@pytest.mark.parametrize("ready", [True, False])
def test_shutdown_ends_submitted_and_unsubmitted_streams(ready: bool) -> None:
    link = Link()
    streams = [link.add("1")]
    link.begin(after_death=True, ready=ready)
    streams.append(link.add("2"))
    link.session.shut_down("server_shutdown: the server is shutting down")
    for stream in streams:
        update = stream.take()
        assert update is not None and update.ended is EndReason.ERROR and update.detail.startswith("server_shutdown")
    assert not len(link.session.table)
    assert [message for message in link.sent if isinstance(message, Abort)] == ([Abort(["1", "2"])] if ready else [])


@pytest.mark.parametrize(
    "message",
    [
        ProtocolError("crc", "checksum does not match"),
        Refused("a message was damaged"),
        StepOutputs([], np.array([77], np.int32), np.array([1], np.int32), []),
        StepOutputs([], None, None, [Ended(77, 1, 1)]),
    ],
    ids=["damaged", "cut", "unknown handle", "unknown ending"],
)
def test_a_broken_link_is_replaced(message: Any) -> None:
    link = Link()
    stream = link.add("1")
    link.give(stream, 9)
    assert not link.session.take(message)
    link.begin()
    assert link.submitted() == [("1", [9])] and stream.num_deaths == 0


def test_a_final_refusal_fails_the_session() -> None:
    """A session whose first message is damaged tries again any number of times."""
    session = Session(lambda message: None, 1)
    for _ in range(20):
        session.begin_link()
        assert not session.take(Refused("a message was damaged, lost or unknown"))
    session.begin_link()
    assert session.take(Refused("protocol version 1 does not match the scheduler's 2", final=True))
    assert session.state == "failed"
    with pytest.raises(EngineError, match="protocol version"):
        session.add(AddRequest("1", np.array([1], np.int32), SamplingParams(), 0))


def test_a_request_that_crashes_schedulers_ends_after_three_deaths() -> None:
    link = Link()
    poison, other = link.add("0"), link.add("1")
    for _ in range(2):
        assert len(link.submitted()) == 2
        link.die()
    link.give(other, 1)
    link.die()
    update = poison.take()
    assert update is not None and update.ended is EndReason.ERROR and update.detail.startswith("engine_fault: ")
    assert link.submitted() == [("1", [1])], "its token resets the count"
    link.give(other, 2, ended=EndReason.LENGTH)
    update = other.take()
    assert update is not None and (update.token_ids, update.ended) == ([1, 2], EndReason.LENGTH)
    assert not len(link.session.table)


def test_all_requests_without_a_token_between_three_deaths_end() -> None:
    """All requests that were in flight at the same three deaths end; a later one continues."""
    link = Link()
    streams = [link.add(str(i)) for i in range(3)]
    link.give(streams[1], 1)
    for _ in range(2):
        link.die()
    late = link.add("3")
    link.die()
    assert all(stream.over for stream in streams) and not late.over
    assert link.submitted() == [("3", [])]


def test_a_token_resets_the_count_of_deaths() -> None:
    link = Link()
    stream = link.add("1")
    for token in range(10):
        link.give(stream, token)
        link.die()
        link.die()
    assert not stream.over and link.submitted() == [("1", list(range(10)))]


def test_only_deaths_after_submission_count() -> None:
    link = Link()
    stream = link.add("1")
    link.die()
    for _ in range(10):
        link.begin(after_death=True, ready=False)
    assert not stream.over
    link.session.take(EngineState("ready"))
    link.die()
    assert stream.over and not link.submitted()


def test_refusals_are_raised_to_the_reader() -> None:
    link = Link()
    stream = link.add("1")
    link.session.take(Rejected("1", "queue_full", "", "too many wait"))
    with pytest.raises(InvalidRequest, match="too many wait"):
        stream.take()
    with pytest.raises(InvalidRequest, match="in use"):
        link.add("2"), link.add("2")


def test_seconds_without_progress() -> None:
    """Counts from the first request of an idle engine, from each token, and from the start of a recovery."""
    now = [100.0]
    session = Session(lambda message: None, 7, clock=lambda: now[0])
    session.begin_link()
    session.take(EngineState("ready"))
    now[0] += 1000
    assert session.seconds_without_progress == 0
    for name in "12":
        session.add(AddRequest(name, np.array([1], np.int32), SamplingParams(), 0))
        now[0] += 5
    assert session.seconds_without_progress == 10
    session.take(StepOutputs([Introduced(0, "1", 0)], np.array([0], np.int32), np.array([3], np.int32), []))
    assert session.seconds_without_progress == 0
    length = int(EndReason.LENGTH)
    session.take(StepOutputs([Introduced(1, "2", 0)], None, None, [Ended(0, length, 1), Ended(1, length, 0)]))
    for _ in range(2):
        session.take(EngineState("recovering"))
        now[0] += 7
    assert session.seconds_without_progress == 14
    session.take(EngineState("ready"))
    assert session.seconds_without_progress == 0


def test_a_pause_does_not_count_as_lack_of_progress() -> None:
    now = [100.0]
    session = Session(lambda message: None, 7, clock=lambda: now[0])
    session.begin_link()
    session.take(EngineState("ready"))
    session.add(AddRequest("1", np.array([1], np.int32), SamplingParams(), 0))
    session.take(EngineState("ready", pause="pause_new"))
    now[0] += 500
    assert (session.pause, session.seconds_without_progress) == ("pause_new", 0)
    session.take(EngineState("ready"))
    now[0] += 5
    assert (session.pause, session.seconds_without_progress) == ("", 5)


def test_the_timeline_of_an_answer_continues_on_a_new_scheduler() -> None:
    """Times are those of the machine's clock and continue; what the first scheduler reported is kept."""
    link = Link(lambda: 12.0)
    params = SamplingParams(return_timeline=True)
    stream = link.session.add(AddRequest("1", np.array([1, 2, 3], np.int32), params, 5, arrival=10.0))
    other = link.add("2")
    for event in (TimelineEvent("scheduled", 10.5, tokens=2), TimelineEvent("first_token", 11.0)):
        assert link.session.take(StepOutputs([], None, None, [], timeline=[("1", event), ("gone", event)]))
    link.give(stream, 10)
    link.die()
    assert link.session.take(StepOutputs([], None, None, [], timeline=[("1", TimelineEvent("scheduled", 12.5))]))
    link.give(stream, 11, ended=EndReason.LENGTH)
    update = stream.take()
    assert update is not None and update.timeline is not None and other.timeline is None
    events = [(event.event, event.seconds) for event in update.timeline]
    first = [("queued", 10.0), ("scheduled", 10.5), ("first_token", 11.0)]
    assert events == [*first, ("resubmitted", 12.0), ("scheduled", 12.5)]

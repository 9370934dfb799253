"""Links accept exactly the sent messages, in order; the in-memory channel behaves like the sockets."""

from typing import Any

import pytest
from memory_channel import memory_pair

from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import Abort, FrontEndToScheduler
from quire.protocol.wire.link_messages import Heartbeat
from quire.protocol.wire.worker_messages import SchedulerToWorker, Shutdown, WorkerToScheduler


def sent(count: int, worker_epoch: int = 0) -> list[Any]:
    link = Link(FrontEndToScheduler, worker_epoch)
    return [link.outgoing(Abort([str(i)])) for i in range(count)]


def taken(link: Link, frames: Any) -> str | list[str]:
    """Return the accepted request ids, or the kind of the error."""
    try:
        return link.incoming(frames).message.request_ids
    except ProtocolError as error:
        return error.kind


def test_messages_arrive_in_order() -> None:
    link = Link(FrontEndToScheduler)
    assert [taken(link, frames) for frames in sent(3)] == [["0"], ["1"], ["2"]]
    assert not link.refused


def test_gaps_duplicates_and_late_messages_are_refused_and_counted() -> None:
    link = Link(FrontEndToScheduler)
    first, second, third = sent(3)
    assert taken(link, second) == "gap"
    assert taken(link, first) == ["0"]
    assert taken(link, first) == "gap"
    assert taken(link, third) == "gap"
    assert taken(link, second) == ["1"]
    assert taken(link, first) == "gap"
    assert link.refused == {"gap": 4}


def test_messages_of_another_epoch_are_refused_and_counted() -> None:
    link = Link(FrontEndToScheduler, worker_epoch=2)
    for other in (1, 3):
        assert taken(link, sent(1, other)[0]) == "epoch"
    assert taken(link, sent(1, 2)[0]) == ["0"]
    assert link.refused == {"epoch": 2}


def test_damaged_message_does_not_advance_the_numbering() -> None:
    link = Link(FrontEndToScheduler)
    frames = sent(1)[0]
    assert taken(link, [bytes(frames[0][:-1]) + b"\xff"]) == "crc"
    assert taken(link, [b"x"]) == "frames"
    assert taken(link, frames) == ["0"]
    assert link.refused == {"crc": 1, "frames": 1}


def test_received_frames_equal_sent_frames() -> None:
    frames = sent(1)[0]
    assert [bytes(f) for f in Link(FrontEndToScheduler).incoming(frames).frames] == [bytes(f) for f in frames]


def test_memory_pair_carries_both_directions() -> None:
    scheduler, worker = memory_pair(WorkerToScheduler, SchedulerToWorker, worker_epoch=4)
    assert worker.receive() is None
    scheduler.send(Shutdown())
    worker.send(Heartbeat(1.5))
    got, answer = worker.receive(), scheduler.receive(None)
    assert got is not None and got.message == Shutdown()
    assert answer is not None and answer.message == Heartbeat(1.5)


def test_memory_pair_refuses_messages_of_the_wrong_direction() -> None:
    scheduler, worker = memory_pair(WorkerToScheduler, SchedulerToWorker)
    worker.send(Shutdown())
    with pytest.raises(ProtocolError):
        scheduler.receive()


def test_closed_memory_channel_drops_pending_messages() -> None:
    scheduler, worker = memory_pair(WorkerToScheduler, SchedulerToWorker)
    scheduler.send(Shutdown())
    worker.close()
    assert worker.receive() is None

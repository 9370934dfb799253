"""The scheduler binds its sockets once more when another process removes or replaces their files."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quire.protocol.wire.channel import Link
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd
from quire.protocol.wire.link_messages import Heartbeat
from quire.protocol.wire.zmq_channel import ZmqChannel, frontend_address, worker_address
from quire.scheduler_proc.process import sockets
from quire.scheduler_proc.process.sockets import Sockets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "sockets"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sockets]:
    monkeypatch.setattr(sockets, "RECLAIM_S", 0.0)
    opened = Sockets(folder, 1, 1)
    yield opened
    opened.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def connected(context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> ZmqChannel:
    return ZmqChannel(context, zmq.DEALER, frontend_address(folder), Link(SchedulerToFrontEnd), bind=False)


def is_heard(opened: Sockets, channel: ZmqChannel) -> bool:
    channel.send(Heartbeat(1.0))
    return any(opened.wait(20) and opened.hub.receive() is not None for _ in range(100))


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_socket_file_is_restored(
    opened: Sockets,
    context: "zmq.Context[zmq.Socket[bytes]]",
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """The front end that was connected stays connected."""
    before = connected(context, folder)
    assert is_heard(opened, before)
    group = opened.open_group(1)
    files = [
        Path(address.removeprefix("ipc://")) for address in (frontend_address(folder), worker_address(folder, 1, 0))
    ]
    others = []
    for file in files:
        if how == "removed":
            file.unlink()
        else:
            others.append(context.socket(zmq.ROUTER))
            others[-1].bind(f"ipc://{file}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            opened.wait(0)
    assert caplog.text.count("socket file was replaced or removed") == 2
    after = connected(context, folder)
    assert is_heard(opened, after) and is_heard(opened, before)
    assert not any(other.poll(0) for other in others)
    for end in (before, after, *others):
        end.close()
    opened.close_group(group)


def test_removed_directory_changes_nothing(opened: Sockets, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder)
    opened.wait(0)
    assert not caplog.records and not folder.exists()

"""Folders and files that exist already: those of other users, or accessible to them, are not used."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.errors import EngineError
from quire.protocol.wire.front_end_messages import FrontEndToScheduler
from quire.protocol.wire.zmq_channel import ZmqHub, check_socket_directory, frontend_address
from quire.worker_proc.parallel.shared_memory import SharedMemoryGroup

MODES = [
    *(0o701, 0o702, 0o704, 0o705, 0o707, 0o710, 0o720, 0o740, 0o750, 0o755, 0o770, 0o775, 0o777, 0o1777, 0o2770),
    0o4711,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    return folder


def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files of this user appear to belong to another user."""
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)


@pytest.mark.parametrize("mode", MODES, ids=[f"{mode:o}" for mode in MODES])
def test_accessible_socket_directory_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(EngineError, match="mode 0700"):
        check_socket_directory(folder)


def test_a_socket_directory_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_socket_directory(folder)
    another_user(monkeypatch)
    with pytest.raises(EngineError, match="belongs to user id"):
        check_socket_directory(folder)


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))


THINGS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a right one": lambda place, other: place.symlink_to(other),
    "a link to nothing": lambda place, other: place.symlink_to(other / "nothing"),
    "a link to itself": lambda place, other: place.symlink_to(place),
    "a file": lambda place, other: place.touch(mode=0o600),
    "a pipe": lambda place, other: os.mkfifo(place, 0o600),
    "a socket": lambda place, other: _socket(place),
}


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
def test_socket_directory_of_another_type(folder: Path, tmp_path: Path, make: Callable[[Path, Path], object]) -> None:
    make(tmp_path / "other", folder)
    with pytest.raises(EngineError, match="not a directory"):
        check_socket_directory(tmp_path / "other")


def test_supervisor_creates_its_own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an unpredictable name, and mode 0700 under any umask."""
    from scheduler_driver import make_config

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        supervisors = [Supervisor(make_config()) for _ in range(3)]
    finally:
        os.umask(before)
    assert len({s.directory for s in supervisors}) == 3
    for supervisor in supervisors:
        assert stat.S_IMODE(supervisor.directory.lstat().st_mode) == 0o700
        check_socket_directory(supervisor.directory)
        supervisor.stop()
    assert not list(tmp_path.iterdir()), "the directory is removed at exit"


def test_planted_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    address = frontend_address(folder)
    Path(address.removeprefix("ipc://")).symlink_to(precious)
    with zmq.Context() as context:
        hub = ZmqHub(context, address, FrontEndToScheduler)
        hub.close()
    assert precious.read_text() == "keep"


# ---- shared memory

MEMORY: dict[str, Callable[[Path, Path], Any]] = {
    "a link to a file": lambda place, other: (other / "x").touch(mode=0o600) or place.symlink_to(other / "x"),
    "a link to nothing": lambda place, other: place.symlink_to(other / "nothing"),
    "a link to a device": lambda place, other: place.symlink_to("/dev/zero"),
    "a folder": lambda place, other: place.mkdir(),
    "a pipe": lambda place, other: os.mkfifo(place, 0o600),
    "a socket": lambda place, other: _socket(place),
    "a file with two names": lambda place, other: (other / "x").touch(mode=0o600) or os.link(other / "x", place),
    **{
        f"a file of mode {mode:o}": lambda place, other, mode=mode: (place.touch(), place.chmod(mode))
        for mode in (0o601, 0o604, 0o606, 0o640, 0o644, 0o660, 0o664, 0o666, 0o700 | 0o004, 0o777)
    },
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_shared_memory_of_another_type(folder: Path, tmp_path: Path, make: Callable[[Path, Path], Any]) -> None:
    place = folder / "ranks.memory"
    make(place, tmp_path)
    size = (tmp_path / "x").stat().st_size if (tmp_path / "x").exists() else 0
    with pytest.raises(EngineError, match="shared memory"):
        SharedMemoryGroup(place, 0, 2)
    assert (size == 0 and not (tmp_path / "x").exists()) or (tmp_path / "x").stat().st_size == 0, "nothing was written"
    assert not (tmp_path / "nothing").exists()


def test_shared_memory_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "ranks.memory"
    SharedMemoryGroup(place, 0, 1)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    another_user(monkeypatch)
    with pytest.raises(EngineError, match="belong to this user alone"):
        SharedMemoryGroup(place, 0, 1)

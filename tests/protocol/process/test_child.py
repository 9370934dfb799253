"""A child's two pipes: reports, commands, and its exit when the supervisor exits."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.process import child as child_module
from quire.protocol.process.child import EX_CONFIG, Child, Command, Report

WAIT_S = 10.0


class Ends:
    """A Child, and the supervisor's ends of its pipes."""

    def __init__(self) -> None:
        self._status, status = os.pipe()
        lifeline, self._lifeline = os.pipe()
        self._fds = [self._status, status, lifeline]
        self._partial = b""
        self.child = Child(status, lifeline)

    def send(self, *commands: Command) -> None:
        os.write(self._lifeline, b"".join(msgspec.json.encode(command) + b"\n" for command in commands))

    def receive(self) -> Report:
        """Return the next report."""
        while b"\n" not in self._partial:
            assert select.select([self._status], [], [], WAIT_S)[0], "no report arrived"
            self._partial += os.read(self._status, 65536)
        line, self._partial = self._partial.split(b"\n", 1)
        return msgspec.json.decode(line, type=Report)

    def commands(self, count: int) -> list[Command]:
        taken: list[Command] = []
        while len(taken) < count:
            assert select.select([self.child.fileno()], [], [], WAIT_S)[0], "no command arrived"
            taken += self.child.take_commands()
        return taken


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """The lifeline thread would end the process; here only the thread ends."""
    monkeypatch.setattr(child_module, "HEARTBEAT_S", 0.01)
    ended = threading.Event()

    listen = Child._listen

    def end(self: Child) -> None:
        ended.set()
        raise SystemExit

    def listen_to_the_end(self: Child) -> None:
        with contextlib.suppress(SystemExit):
            listen(self)

    monkeypatch.setattr(Child, "_end_with_parent", end)
    monkeypatch.setattr(Child, "_listen", listen_to_the_end)
    ends = Ends()
    yield ends
    os.close(ends._lifeline)
    assert ended.wait(WAIT_S)
    ends.child.close()
    for fd in ends._fds:
        os.close(fd)


def test_heartbeats_continue_while_commands_arrive_all_the_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "HEARTBEAT_S", 0.1)
    until = time.monotonic() + 3.0
    while not select.select([ends._status], [], [], 0)[0]:
        assert time.monotonic() < until, "no heartbeat"
        ends.send(Command("engines"))


def test_command_put_while_commands_are_taken_is_not_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Command("worker_epoch", worker_epoch=1), Command("worker_epoch", worker_epoch=2)
    taken: list[Command] = []
    write = os.eventfd_write

    def write_and_be_overtaken(fd: int, value: int) -> None:
        write(fd, value)
        taken.extend(ends.child.take_commands())

    ends.child.put(first)
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", write_and_be_overtaken)
        ends.child.put(second)
    while taken[-1:] != [second]:
        assert select.select([ends.child.fileno()], [], [], 0)[0], "no wake-up for a queued command"
        taken += ends.child.take_commands()
    assert taken == [first, second]
    ends.child.put(first)
    assert ends.commands(1) == [first]


def test_commands_arrive_in_order_and_wake_the_waiter(ends: Ends) -> None:
    sent = [Command("join", worker_epoch=worker_epoch, rank=worker_epoch % 2) for worker_epoch in range(50)]
    ends.send(*sent[:20])
    assert ends.commands(20) == sent[:20]
    assert not ends.child.take_commands()
    ends.send(*sent[20:])
    ends.child.put(Command("stop"))
    rest = ends.commands(31)
    assert [command for command in rest if command.kind == "join"] == sent[20:]
    while select.select([ends.child.fileno()], [], [], 0)[0]:  # a wake-up for a command that was already taken
        assert not ends.child.take_commands()


def test_heartbeats_are_sent(ends: Ends) -> None:
    assert [ends.receive().event for _ in range(3)] == ["alive"] * 3
    ends.child.report(Report("joined", worker_epoch=7))
    while (report := ends.receive()).event == "alive":
        pass
    assert (report.event, report.worker_epoch) == ("joined", 7)


def test_hang_is_reported_once_and_stops_heartbeats(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_module, "HANG_TIMEOUT_S", -1.0)
    hung: list[int] = []
    called = threading.Event()

    def on_hang() -> None:
        hung.append(1)
        called.set()

    ends.child.watch_progress(on_hang)
    assert called.wait(WAIT_S)
    while ends.child._on_hang is not None:
        pass
    while select.select([ends._status], [], [], 0)[0]:  # earlier reports
        os.read(ends._status, 65536)
    assert not select.select([ends._status], [], [], 0.1)[0] and hung == [1]
    assert "most recent call first" in capfd.readouterr().err
    monkeypatch.setattr(child_module, "HANG_TIMEOUT_S", 60.0)
    ends.child.progress()
    assert ends.receive().event == "alive"


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (ConfigError("no such\nfile"), "no such file", EX_CONFIG),
        (ValueError("oh"), "ValueError: oh", 1),
    ],
)
def test_failure_is_reported_in_one_line(ends: Ends, error: Exception, text: str, status: int) -> None:
    with pytest.raises(SystemExit) as ended:
        ends.child.fail(error)
    assert ended.value.code == status
    while (report := ends.receive()).event == "alive":
        pass
    assert (report.event, report.text, report.exit_status) == ("failed", text, status)


def test_child_leaves_signals_of_its_group_to_the_supervisor(tmp_path: Path) -> None:
    program = (
        "import pathlib, os, sys\n"
        "from quire.protocol.process.child import init_child\n"
        f"init_child(1, 0, pathlib.Path({str(tmp_path)!r}))\n"
        "sys.stdout.write(open('/proc/self/status').read())"
    )
    stdin, other_end = os.pipe()
    status = subprocess.run(
        [sys.executable, "-P", "-c", program], stdin=stdin, capture_output=True, text=True, check=True
    ).stdout
    os.close(stdin)
    os.close(other_end)
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    for number in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM"):
        assert ignored >> (getattr(signal, f"SIG{number}") - 1) & 1, number


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("death_signal", [signal.SIGCONT, signal.SIGKILL])
def test_child_exits_with_its_parent_and_removes_the_socket_directory(
    tmp_path: Path, death_signal: int, stopped: bool
) -> None:
    """The parent is a separate process here, which is killed; the child may be stopped at that moment."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    child = (
        "import sys, pathlib, time, os\n"
        "from quire.protocol.process.child import init_child\n"
        f"place = pathlib.Path({str(directory)!r})\n"
        f"init_child(int(sys.argv[1]), int(sys.argv[2]), place, death_signal={death_signal})\n"
        "os.write(1, b'up')\n"
        "time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "status, lifeline = os.pipe(), os.pipe()\n"
        f"made = subprocess.Popen([sys.executable, '-P', '-c', {child!r}, str(status[1]), str(lifeline[0])],"
        " pass_fds=(status[1], lifeline[0]), stdout=subprocess.PIPE)\n"
        "made.stdout.read(2)\n"
        "print(made.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    watched = os.pidfd_open(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert select.select([watched], [], [], 2.0)[0], "still alive two seconds after its parent died"
    os.close(watched)
    process.stdout.close()
    if death_signal == signal.SIGCONT:
        assert not directory.exists()

"""One process that the supervisor has started, its two pipes (``protocol/process/child.py``) and its pidfd.

A pidfd is readable once its process has ended, with all threads and its memory freed. The end of the status pipe says
the same, unless a process that the child has forked holds it open; where the system has no pidfd, it alone counts.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from quire.protocol.process.child import Command, Report

KILL_DEADLINE = 10.0


class ChildProcess:
    """One process and its pipes.

    Attributes:
        watched: descriptors of which one becomes readable when the child reports or ends; empty once it is closed.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        import_paths: Sequence[str] = (),
    ) -> None:
        """``environment``: variables for the child, where the user's own do not set them.

        ``import_paths``: where the child finds modules, besides where it would.
        """
        status, child_status = os.pipe()
        child_lifeline, self._lifeline = os.pipe()
        os.set_blocking(self._lifeline, False)
        command = [sys.executable, "-P", "-m", module, "--status-fd", str(child_status)]
        command += ["--lifeline-fd", str(child_lifeline), *arguments]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(child_status, child_lifeline, *pass_fds),
                env={**(environment or {}), **os.environ, **python_path(import_paths)},
            )
        finally:
            os.close(child_status)
            os.close(child_lifeline)
        self._status = status
        os.set_blocking(status, False)
        self.watched = [status, *_pidfd_of(self.pid)]
        self._partial = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_reports(self) -> tuple[list[Report], bool]:
        """What the child wrote; and whether it has ended."""
        has_ended = self.process.poll() is not None  # before the pipe is read: its last words count
        reports: list[Report] = []
        while True:
            try:
                data = os.read(self._status, 65536)
            except BlockingIOError:
                return reports, has_ended
            if not data:
                return reports, True
            *lines, self._partial = (self._partial + data).split(b"\n")
            reports += [msgspec.json.decode(line, type=Report) for line in lines]

    def send(self, command: Command) -> None:
        """Without effect on one that has ended, or does not listen: that is noticed otherwise."""
        with contextlib.suppress(OSError):
            os.write(self._lifeline, msgspec.json.encode(command) + b"\n")

    def how_it_ended(self, name: str) -> str:
        """In words, for a process that has ended and said nothing itself; waits where only its pipe has."""
        code = self.process.wait()
        if code < 0:
            return f"the {name} process was killed by {signal.Signals(-code).name}"
        return f"the {name} process ended with status {code} and said nothing"

    def kill(self) -> None:
        """Returns once it is gone, and its memory with it; or leaves one to itself that the kernel holds."""
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_DEADLINE)

    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic), then kill. Leaves nothing behind."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self.close()

    def close(self) -> None:
        for fd in (*self.watched, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.watched.clear()
        self._status = self._lifeline = -1


def _pidfd_of(pid: int) -> list[int]:
    """A pidfd in a list, which is empty where there is none: on other systems than Linux, and in some sandboxes."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except OSError:
        return []


def python_path(more: Sequence[str]) -> dict[str, str]:
    """The variable by which a child also finds what lies in ``more``; behind the user's own entries."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*entries, *more]))} if more else {}

"""One child process of the supervisor: its two pipes (``protocol/process/child.py``) and its pidfd.

A pidfd is readable once all threads of its process have ended and its memory is free. The end of the status pipe means
the same, unless a process forked by the child holds the pipe open. It is the only signal on systems without pidfds.
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


class StatusPipe:
    """The end of a process's status pipe that is read. Does not own the descriptor, which does not block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._partial = b""

    def read(self) -> tuple[list[Report], bool]:
        """Return the reports since the last call, and whether the pipe has ended."""
        reports: list[Report] = []
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return reports, False
            if not data:
                return reports, True
            *lines, self._partial = (self._partial + data).split(b"\n")
            reports += [msgspec.json.decode(line, type=Report) for line in lines]


class ChildProcess:
    """One process and its pipes.

    Attributes:
        watched: descriptors, one of which becomes readable when the child reports or ends; empty after ``close``.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        import_paths: Sequence[str] = (),
    ) -> None:
        """Start ``python -P -m module``.

        Args:
            environment: variables for the child; they take precedence over those of the user's environment.
            import_paths: folders to append to the child's module search path.
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
                env={**os.environ, **(environment or {}), **python_path(import_paths)},
            )
        except BaseException:  # such as too many processes: the caller tries again later
            os.close(status)
            os.close(self._lifeline)
            raise
        finally:
            os.close(child_status)
            os.close(child_lifeline)
        os.set_blocking(status, False)
        self._status = StatusPipe(status)
        self._unsent = b""
        self.watched = [status, *_pidfd_of(self.pid)]

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_reports(self) -> tuple[list[Report], bool]:
        """Return the reports that the child wrote since the last call, and whether it has ended."""
        self._flush()
        has_ended = self.process.poll() is not None  # polled before the read, so that its last reports are not lost
        reports, is_closed = self._status.read()
        return reports, has_ended or is_closed

    def send(self, command: Command) -> None:
        """Send a command; what its pipe has no room for follows its next report. No effect if the child has ended."""
        self._unsent += msgspec.json.encode(command) + b"\n"
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # full, or the child has ended
            self._unsent = self._unsent[os.write(self._lifeline, self._unsent) :]

    def describe_end(self, name: str) -> str:
        """Describe the end of a process that reported no reason; wait for its end if only its pipe has ended."""
        code = self.process.wait()
        if code < 0:
            return f"the {name} process was killed by {signal.Signals(-code).name}"
        return f"the {name} process exited with status {code} without reporting a reason"

    def kill(self) -> None:
        """Kill the process and wait for its end.

        Returns without an error after ``KILL_DEADLINE`` seconds: the operating system may need longer to end a process,
        for example while a device driver call runs.
        """
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_DEADLINE)

    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic), then kill. Closes all descriptors."""
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
        self._lifeline = -1


def _pidfd_of(pid: int) -> list[int]:
    """Return a list with a pidfd, or an empty one if unsupported: on systems other than Linux, in some sandboxes."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except OSError:
        return []


def python_path(more: Sequence[str]) -> dict[str, str]:
    """Return PYTHONPATH with the entries of ``more`` appended to the user's own; {} if ``more`` is empty."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*entries, *more]))} if more else {}

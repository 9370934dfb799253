"""One process that the supervisor has started, and its two pipes (``protocol/process/child.py``).

The kernel closes a dead process' pipes only when it has freed its memory, which takes 0.1 to 0.6 ms per MB, and so does
the end of every thread that might be waited for. The flags of a process say at once that it has begun to end.
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
PF_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``. It is the kernel's own and in no man page, but older than all that we run on."""


class ChildProcess:
    """One process and its pipes."""

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
        self.status = status
        os.set_blocking(status, False)
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._partial = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_reports(self) -> tuple[list[Report], bool]:
        """What the child wrote; and whether it has closed its end, which it does by ending."""
        reports: list[Report] = []
        while True:
            try:
                data = os.read(self.status, 65536)
            except BlockingIOError:
                return reports, False
            if not data:
                return reports, True
            *lines, self._partial = (self._partial + data).split(b"\n")
            reports += [msgspec.json.decode(line, type=Report) for line in lines]

    def tell(self, command: Command) -> None:
        """Without effect on one that has ended, or does not listen: that is noticed otherwise."""
        with contextlib.suppress(OSError):
            os.write(self._lifeline, msgspec.json.encode(command) + b"\n")

    def is_ending(self) -> bool:
        """Whether it runs no more, though the kernel may still be freeing its memory."""
        return bool(int(self._state()[6]) & PF_EXITING)

    def how_it_ends(self, name: str) -> str:
        """In words, for one that is ending and said nothing itself."""
        status = int(self._state()[49])
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return _in_words(name, code)

    def how_it_ended(self, name: str) -> str:
        """The same once it has closed its pipe: waits for the little that is left."""
        return _in_words(name, self.process.wait())

    def _state(self) -> list[bytes]:
        """The fields of ``/proc/PID/stat`` behind the name, which may hold anything: the process' state comes first."""
        return os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()

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
        for fd in (self.status, self._lifeline, self._stat):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.status = self._lifeline = self._stat = -1


def _in_words(name: str, code: int) -> str:
    if code < 0:
        return f"the {name} process was killed by {signal.Signals(-code).name}"
    return f"the {name} process ended with status {code} and said nothing"


def python_path(more: Sequence[str]) -> dict[str, str]:
    """The variable by which a child also finds what lies in ``more``; behind the user's own entries."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*entries, *more]))} if more else {}

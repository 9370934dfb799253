"""What the owner of one engine's processes has in common with that of several engines' (../fleet/fleet.py)."""

import contextlib
import copy
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self, cast

from quire.launch.supervision.children import Children
from quire.launch.supervision.directory import make_directory
from quire.launch.supervision.members import Member, Process, Role, WatchedProcess
from quire.protocol.errors import QuireError
from quire.protocol.process.child import Command, Report
from quire.protocol.process.owned_folder import remove_folder
from quire.protocol.process.restarts import Restarts, write_pids, write_restarts


class Policy(Protocol):
    """Decides what to do about reports, ends and times. ``fatal_error`` is set if the server cannot continue."""

    @property
    def fatal_error(self) -> QuireError | None: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def members(self) -> list[Member]: ...

    @property
    def front_ends(self) -> Sequence[Member]: ...

    def reported(self, process: Process, report: Report, now: float) -> None: ...

    def ended(self, process: Process, how: str, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def next_event(self, now: float) -> float: ...

    def drain(self) -> None: ...

    def stop(self) -> None: ...


class ProcessOwner(ABC):
    """Executes the decisions of a policy: watches processes, publishes their figures, and ends them in order.

    Owns the socket directory (mode 0700) and the children; a context manager that removes and ends them. All methods
    must be called from one thread, which must not end before the children: they are killed when it ends.
    """

    policy: Policy
    stop_order: tuple[tuple[Role, ...], ...]
    """Roles that end together, the first ones first."""
    stop_deadline: float
    """Seconds to end all processes."""

    def __init__(self, directory: Path | None = None) -> None:
        """``directory``: the socket directory, if the caller has made it; None: make one."""
        self._children = Children()
        self.directory, self._lock = (directory, -1) if directory is not None else make_directory()
        self._written_restarts = Restarts()
        self._written_pids: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop()

    @property
    def is_ready(self) -> bool:
        return self.policy.is_ready

    @property
    def wakeup_fd(self) -> int:
        """A descriptor; a byte written to it makes ``watch`` return."""
        return self._children.wakeup_fd

    def watch(self, timeout: float | None) -> None:
        """Process reports and ends of children; return after the first ones, or after ``timeout`` seconds.

        Raises:
            ConfigError, EngineError: the server cannot continue, with the reason.
        """
        wait = self._longest_wait(time.monotonic())
        for child, reports, ended in self._children.wait(wait if timeout is None else min(timeout, wait)):
            self._take(child, reports, ended)
        self.policy.tick(time.monotonic())
        self._publish(time.monotonic())
        if self.policy.fatal_error is not None:
            raise self.policy.fatal_error

    def _longest_wait(self, now: float) -> float:
        return self.policy.next_event(now)

    def _take(self, child: WatchedProcess, reports: Sequence[Report], ended: bool) -> None:
        now = time.monotonic()
        for report in reports:
            self.policy.reported(child, report, now)
        if ended:
            member = next((m for m in self.policy.members if m.process is child), None)
            reason = child.describe_end(member.role if member is not None else "child")
            self._children.close_child(child)
            self.policy.ended(child, reason, now)

    @abstractmethod
    def _publish(self, now: float) -> None:
        """Call ``_write`` with the newest figures."""

    def _write(self, restarts: Restarts, pids: dict[str, list[int]]) -> None:
        """Write what changed for the front ends. A full disk must not end the server: the next change retries."""
        if restarts != self._written_restarts:
            self._written_restarts = copy.copy(restarts)
            with contextlib.suppress(OSError):
                write_restarts(self.directory, restarts)
        pids = {"supervisor": [os.getpid()], **pids}
        if pids != self._written_pids:
            self._written_pids = pids
            with contextlib.suppress(OSError):
                write_pids(self.directory, pids)

    # ---- policy.Runner

    def send(self, process: Process, command: Command) -> None:
        _watched(process).send(command)

    def kill(self, process: Process) -> None:
        self._children.kill(_watched(process))

    # ---- shutdown

    def drain(self) -> None:
        """Let front ends refuse new requests, finish the running ones and end."""
        self.policy.drain()

    def has_front_ends(self) -> bool:
        return bool(self.policy.front_ends)

    def stop(self) -> None:
        """Stop all children in order, front ends first, and remove the directory. May be called twice.

        If the server has failed, front ends do not drain: their streams end with an error.
        """
        self.policy.stop()
        died = self.policy.fatal_error is not None
        reason = " ".join(str(self.policy.fatal_error).split()) if died else ""
        deadline = time.monotonic() + self.stop_deadline
        for roles in self.stop_order:
            members = [member for member in self.policy.members if member.role in roles]
            for member in members:
                failed = died and member.role == "frontend"
                self.send(member.process, Command("engine_failed") if failed else Command("stop", text=reason))
            for member in members:
                _watched(member.process).end(deadline)
        self._all_ended()
        self._children.close()
        remove_folder(self.directory, self._lock)
        self._lock = -1

    def _all_ended(self) -> None:  # noqa: B027
        """Release what else a subclass has. The directory still exists."""

    def kill_all(self) -> None:
        """Kill all children now. The processes of engines that are killed end with them."""
        self.policy.stop()
        for member in self.policy.members:
            _watched(member.process).kill()


def _watched(process: Process) -> WatchedProcess:
    """Return a process that the Runner has started as what it is there."""
    return cast(WatchedProcess, process)

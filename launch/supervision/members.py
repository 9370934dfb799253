"""The supervision policy's records of processes, and the standby workers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from quire.protocol.process.child import Command, Report

Role = Literal["scheduler", "worker", "frontend", "engine", "router"]

STANDBY_DELAY_S = 2.0
"""Delay of standbys after the group is ready, so that their imports do not slow its first steps; and after a death."""
STANDBY_DELAY_MAX_S = 60.0
"""Limit of the delay, which doubles with each death of a standby until one is used."""


class Process(Protocol):
    """A handle of a process, of the Runner's own type."""

    @property
    def pid(self) -> int:
        """Its id on this machine; 0 for a process on another machine."""
        ...


class WatchedProcess(Process, Protocol):
    """A process that a selector waits for: a child, or a worker on a node.

    Attributes:
        watched: descriptors, one of which becomes readable when the process reports or ends; empty after ``close``.
    """

    watched: list[int]

    def read_reports(self) -> tuple[list[Report], bool]:
        """Return the reports since the last call, and whether the process has ended."""
        ...

    def send(self, command: Command) -> None:
        """Send a command; no effect on a process that has ended."""
        ...

    def describe_end(self, name: str) -> str:
        """Describe the end of a process that reported no reason. ``name``: what it is."""
        ...

    def kill(self) -> None: ...

    def end(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (monotonic), then kill. Closes all descriptors."""
        ...

    def close(self) -> None: ...


class RemoteWorkers(Protocol):
    """Starts the workers of an engine whose ranks are on nodes."""

    def open(self, directory: Path) -> None:
        """Connect to the nodes. ``directory``: the engine's socket directory."""
        ...

    def prepare_group(self, worker_epoch: int) -> None:
        """Make the links of a group before the scheduler and the workers need them; no effect if they exist."""
        ...

    def start(self, rank: int, *, is_quiet: bool) -> WatchedProcess: ...

    def close(self) -> None:
        """Kill the workers that are left, and disconnect. May be called twice."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """One process, and the contents of its reports."""

    role: Role
    process: Process
    last_report_at: float
    index: int = 0
    """The rank of a worker in the group, or the number of a front end or of an engine."""
    started: bool = False
    phase: str = ""
    """What the start of a worker does, for people."""
    ready: bool = False
    joined: int = 0
    """The last worker epoch that it reported to have joined."""
    failure: Report | None = None
    failed_at: float = 0.0
    ready_report: Report = field(default_factory=lambda: Report("ready"))

    @property
    def name(self) -> str:
        return self.role


class Standbys:
    """Workers that have done the slow part of starting and belong to no group. ``count``: number to keep."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._delay = STANDBY_DELAY_S
        self.members: list[Member] = []
        self.due: float | None = None
        """When to start the missing standbys, or None."""

    def group_is_ready(self, now: float) -> None:
        if self.due is None and len(self.members) < self._count:
            self.due = now + STANDBY_DELAY_S

    def num_to_start(self, now: float) -> int:
        """Return how many standbys to start now. The caller starts them."""
        if self.due is None or now < self.due:
            return 0
        self.due = None
        return self._count - len(self.members)

    def take(self) -> Member | None:
        """Remove and return a standby, preferably one that has started, or None."""
        if not self.members:
            return None
        member = next((m for m in self.members if m.started), self.members[0])
        self.members.remove(member)
        self._delay = STANDBY_DELAY_S
        return member

    def lose(self, member: Member, now: float) -> None:
        self.members.remove(member)
        self.due = now + self._delay
        self._delay = min(2 * self._delay, STANDBY_DELAY_MAX_S)

"""The supervision policy's records of processes, and the standby workers."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.protocol.process.child import Report

Role = Literal["scheduler", "worker", "frontend", "engine", "router"]

STANDBY_DELAY_S = 2.0
"""Delay of standbys after the group is ready, so that their imports do not slow its first steps; and after a death."""
STANDBY_DELAY_MAX_S = 60.0
"""Limit of the delay, which doubles with each death of a standby until one is used."""


class Process(Protocol):
    """A handle of a process, of the Runner's own type."""

    @property
    def pid(self) -> int: ...


@dataclass(slots=True, eq=False)
class Member:
    """One process, and the contents of its reports."""

    role: Role
    process: Process
    last_report_at: float
    index: int = 0
    """The rank of a worker in the group, or the number of a front end or of an engine."""
    started: bool = False
    ready: bool = False
    joined: int = 0
    """The last worker epoch that it reported to have joined."""
    failure: Report | None = None
    failed_at: float = 0.0
    detail: dict[str, float] = field(default_factory=dict)

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

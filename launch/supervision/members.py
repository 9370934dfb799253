"""The processes of an engine as the Overseer knows them, and the workers that stand by."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.protocol.process.child import Report

Role = Literal["scheduler", "worker", "frontend"]

STANDBY_DELAY_S = 2.0
"""After the group is ready, whose first steps come before a standby's imports; and after a standby died."""
STANDBY_DELAY_MAX_S = 60.0
"""Each standby that dies doubles the delay up to this, until one is of use."""


class Process(Protocol):
    """A handle of a process, of the type that its Runner likes."""

    @property
    def pid(self) -> int: ...


@dataclass(slots=True, eq=False)
class Member:
    """One process, and what it has said."""

    role: Role
    process: Process
    last_report_at: float
    index: int = 0
    """The rank of a worker of the group; the number of a front end."""
    started: bool = False
    ready: bool = False
    joined: int = 0
    """The epoch that it last said it went to."""
    failure: Report | None = None
    failed_at: float = 0.0
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.role


class Standbys:
    """Workers of no group yet, which have done the slow part of starting. ``count``: how many there are to be."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._delay = STANDBY_DELAY_S
        self.members: list[Member] = []
        self.due: float | None = None
        """When those that are not there are to be started, once that is known."""

    def group_is_ready(self, now: float) -> None:
        if self.due is None and len(self.members) < self._count:
            self.due = now + STANDBY_DELAY_S

    def num_to_start(self, now: float) -> int:
        """They are no longer due."""
        if self.due is None or now < self.due:
            return 0
        self.due = None
        return self._count - len(self.members)

    def take(self) -> Member | None:
        """One that has started, if there is one. It stands by no more."""
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

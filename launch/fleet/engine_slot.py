"""The fleet policy's record of an engine."""

from dataclasses import dataclass, field
from typing import Literal

from quire.launch.supervision.members import Member
from quire.protocol.process.child import Report
from quire.protocol.routing import EnginePlace, PlaceState

Goal = Literal["serve", "drain", "restart", "remove"]
"""What an engine is to do: serve, or once it is drained stay so, start again, or end."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of the server, over all of its starts.

    Attributes:
        member: its process, or None while it is not running.
        due: when to start it, while it is not running.
        deadline: draining: when it counts as drained even if front ends have not reported it; stopped: when its
            process is killed.
        drained: the front ends that have no request on it.
        num_failures: ends in a row after it had not served for long.
        serving_since: when the present process began to serve.
        ready_report: its last report that it is ready.
        has_settled: it has served, or its first start has failed.
    """

    number: int
    state: PlaceState = "starting"
    goal: Goal = "serve"
    member: Member | None = None
    due: float | None = None
    deadline: float | None = None
    drained: set[Member] = field(default_factory=set)
    num_starts: int = 0
    num_failures: int = 0
    serving_since: float | None = None
    has_settled: bool = False
    incarnation: int = 1
    detail: str = ""
    ready_report: Report = field(default_factory=lambda: Report("ready"))

    def place(self, root: str) -> EnginePlace:
        """Return what is sent to front ends and the router. ``root``: the fleet's directory."""
        return EnginePlace(
            self.number,
            f"{root}/{directory_name(self.number, self.num_starts)}" if self.member is not None else "",
            self.incarnation,
            self.state,
            int(self.ready_report.detail.get("block_size", 0)),
            self.num_starts,
            self.detail,
            self.ready_report.text,
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert (self.member is None) == (self.state == "failed") == (self.due is not None), self
        assert (self.deadline is not None) == (self.state in ("draining", "stopped")), self
        assert self.goal != "serve" or self.state in ("starting", "serving", "failed"), self
        assert self.member is None or self.num_starts > 0, self


def directory_name(engine: int, num_starts: int) -> str:
    """Return the name of the directory of an engine's process within the fleet's."""
    return f"engine-{engine}.{num_starts}"

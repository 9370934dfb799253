"""Supervision policy: decides which processes to start, stop or notify. No I/O; the Supervisor executes the decisions.

Workers form a *group*: one process per rank, all with the same worker epoch. When a worker dies, hangs or returns an
invalid result, the whole group is killed and a new group starts with the next epoch. *Standby* workers, which have done
the slow part of starting, replace it as soon as its memory is free. Each new scheduler has the next *incarnation*
number. It takes over the existing workers under a new epoch, and front ends submit their unfinished requests to it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.launch.supervision.members import Member, Process, Role, Standbys
from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import ConfigError, EngineError, QuireError
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.log import event_logger
from quire.protocol.process.restarts import Restarts

log = event_logger("supervisor")

MAX_DEATHS = 5
"""Deaths of one role in a row, with no token committed in between, after which the engine gives up."""
START_S = 60.0
"""Time limit for a process to report that it has started."""
SILENT_S = 10.0
"""Time limit between reports of a started process. It reports twice a second, but native code may delay that."""
END_S = 5.0
"""Time limit for a process to exit after it reported why it fails."""
ADOPTION_S = 2.0
"""Time limit for workers to join a new scheduler. One that exceeds it is blocked in a step forever."""
BACKOFF_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Delay before the first, second, ... restart in a row."""


class ProcessRunner(Protocol):
    """Executes decisions: starts, notifies and kills processes."""

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> Process: ...

    def send(self, process: Process, command: Command) -> None:
        """Send a command; no effect on a process that has ended."""
        ...

    def kill(self, process: Process) -> None: ...

    def scheduler_replaced(self, incarnation: int) -> None:
        """Connect a front end in this process to the scheduler of this incarnation."""
        ...


class ProcessCounts(NamedTuple):
    """How many processes of each role to run. ``standby``: one standby worker per rank."""

    num_ranks: int = 1
    num_front_ends: int = 0
    standby: bool = False


class SupervisionPolicy:
    """Supervision policy of one engine's processes. ``fatal_error`` is set if the engine cannot continue.

    Invariants (``check``): there is at most one scheduler, and at most one worker per rank in the group; a missing
    process has a time at which it will be started.
    """

    def __init__(self, counts: ProcessCounts, runner: ProcessRunner) -> None:
        self._counts = counts
        self._runner = runner
        self.worker_epoch = FIRST_WORKER_EPOCH
        self.incarnation = 1
        self.members: list[Member] = []
        self.group: dict[int, Member] = {}
        """By rank."""
        self.standbys = Standbys(counts.num_ranks if counts.standby else 0)
        self.fatal_error: QuireError | None = None
        self._deaths: dict[Role, int] = {"scheduler": 0, "worker": 0, "frontend": 0}
        self.restarts = Restarts()
        self._num_fatal_requests = 0
        self._due: dict[tuple[Role, int], float] = {}
        """When to start each missing process, by (role, index)."""
        self._adopt_by: float | None = None
        self._was_ready = False
        self._draining = self._stopping = False

    # ---- events

    def begin(self, now: float) -> None:
        """Start scheduler and workers. ``admit_front_ends`` starts the front ends."""
        self._start("scheduler", 0, now)
        for rank in range(self._counts.num_ranks):
            self._assign_worker(rank, now)

    def admit_front_ends(self, now: float) -> None:
        for index in range(self._counts.num_front_ends):
            self._start("frontend", index, now)

    def drain(self) -> None:
        """Let front ends finish their requests and end. The engine keeps running until they have ended."""
        self._draining = True
        for index in range(self._counts.num_front_ends):
            self._due.pop(("frontend", index), None)
        for front_end in self.front_ends:
            self._runner.send(front_end.process, Command("drain"))

    def stop(self) -> None:
        """Stop replacing processes, which are now expected to end."""
        self._stopping = True
        self._due.clear()
        self.standbys.due = self._adopt_by = None

    def reported(self, process: Process, report: Report, now: float) -> None:
        """Process a report."""
        member = self._find(process)
        if member is None:
            return
        member.last_report_at = now
        match report.event:
            case "started":
                member.started = True
            case "alive":
                member.phase = report.text or member.phase
            case "joined":
                member.joined = report.worker_epoch
                self._check_adoption()
            case "ready":
                self._ready(member, report, now)
            case "progress":
                self._deaths = dict.fromkeys(self._deaths, 0)
                self._num_fatal_requests = 0
            case "suspect_confirmed":
                self._count_fatal_request(report.text)
            case "group_failed":
                if report.worker_epoch == self.worker_epoch:
                    self._lose_group(report.text, now)
            case "failed":
                member.failure, member.failed_at = report, now

    def ended(self, process: Process, how: str, now: float) -> None:
        """Process the end of a process, whose memory is free. ``how``: the reason, if it reported none."""
        member = self._find(process)
        if member is None:
            return
        self.members.remove(member)
        if self._stopping:
            return
        reason = member.failure.text if member.failure is not None else how
        if member in self.standbys.members:  # first: its role is that of a worker, but no group is lost with it
            self.standbys.lose(member, now)
            return
        if self._is_final(member):
            self._give_up(member, reason)
        elif member.role == "worker":
            self._lose_group(reason, now)
        elif member.role == "scheduler":
            self._lose_scheduler(reason, now)
        else:
            self._lose_front_end(member, reason, now)

    def tick(self, now: float) -> None:
        """Start the processes that are due, and kill those that have not reported for too long."""
        for member in list(self.members):
            limit = SILENT_S if member.started else START_S
            if now > member.last_report_at + limit:
                log.error("process stopped reporting", role=member.role, pid=member.process.pid, seconds=limit)
                self._end(member, f"the {member.role} process sent no heartbeat for {limit:g} s", now)
            elif member.failure is not None and now > member.failed_at + END_S:
                self._end(member, member.failure.text, now)
        if self._adopt_by is not None and now > self._adopt_by:
            self._adopt_by = None
            self._lose_group(f"a worker did not join the new scheduler within {ADOPTION_S:g} s", now)
        for role, index in [key for key, when in self._due.items() if when <= now]:
            del self._due[role, index]
            if role == "worker":
                self._assign_worker(index, now)
            else:
                self._start(role, index, now)
        for _ in range(self.standbys.num_to_start(now)):
            self.standbys.members.append(self._spawn("worker", 0, now))

    def next_event(self, now: float) -> float:
        """Return the number of seconds until ``tick`` must be called."""
        times = [*self._due.values()]
        times += [when for when in (self.standbys.due, self._adopt_by) if when is not None]
        times += [m.last_report_at + (SILENT_S if m.started else START_S) for m in self.members]
        return max(0.0, min(times, default=now + 1.0) - now)

    # ---- state

    @property
    def is_ready(self) -> bool:
        """Whether the scheduler (which waits for the workers) and the front ends are ready."""
        needed = [m for m in self.members if m.role != "worker"]
        return len(needed) == 1 + self._counts.num_front_ends and all(m.ready for m in needed)

    @property
    def awaited(self) -> str:
        """What the processes do that a start waits for, for people."""
        doing = [f"{m.role} {m.phase or 'loads its Python modules'}" for m in self.members if m.phase or not m.started]
        return ", ".join(doing).replace("frontend", "front end") or "connecting"

    @property
    def pids(self) -> dict[str, list[int]]:
        """The ids of the processes on this machine by role; a worker without a group is a standby."""
        found: dict[str, list[int]] = {}
        for member in (each for each in self.members if each.process.pid):
            role = "standby" if member in self.standbys.members else member.role
            found.setdefault(role, []).append(member.process.pid)
        return found

    @property
    def ready_report(self) -> Report:
        """What the scheduler reported when the workers were ready."""
        return self.scheduler.ready_report if self.scheduler is not None else Report("ready")

    @property
    def scheduler(self) -> Member | None:
        return next((m for m in self.members if m.role == "scheduler"), None)

    @property
    def front_ends(self) -> Sequence[Member]:
        return [m for m in self.members if m.role == "frontend"]

    # ---- losses

    def _lose_group(self, reason: str, now: float) -> None:
        """Kill the group and start another one under the next epoch."""
        if self._stopping or not self._count_death("worker", reason):
            return
        self.restarts.worker += 1
        log.error("restarting the workers", reason=reason)
        # The scheduler gets the new epoch before the old workers are killed: from then on it takes nothing of theirs,
        # so the order in which their ends and their last results arrive does not matter.
        self.worker_epoch += 1
        if (scheduler := self.scheduler) is not None:
            scheduler.ready = False
            self._runner.send(scheduler.process, Command("worker_epoch", worker_epoch=self.worker_epoch, text=reason))
        self._kill_group()
        when = now + self._backoff("worker")
        for rank in range(self._counts.num_ranks):
            self._due["worker", rank] = when
        self.tick(now)

    def _kill_group(self) -> None:
        for member in self.group.values():
            if member in self.members:
                self.members.remove(member)
                self._runner.kill(member.process)
        self.group.clear()
        self._adopt_by = None

    def _lose_scheduler(self, reason: str, now: float) -> None:
        if not self._count_death("scheduler", reason):
            return
        self.restarts.scheduler += 1
        log.error("restarting the scheduler", reason=reason)
        self.incarnation += 1
        self._due["scheduler", 0] = now + self._backoff("scheduler")
        self.tick(now)

    def _lose_front_end(self, member: Member, reason: str, now: float) -> None:
        if self._draining:
            return  # its end is expected
        if not self._count_death("frontend", reason):
            return
        self.restarts.frontend += 1
        log.error("restarting a front end", reason=reason)
        if (scheduler := self.scheduler) is not None:
            # No process reads its answers any more, and its silence alone would show that only seconds later.
            self._runner.send(scheduler.process, Command("front_end_exited", pid=member.process.pid))
        self._due["frontend", member.index] = now + self._backoff("frontend")
        self.tick(now)

    def _end(self, member: Member, reason: str, now: float) -> None:
        """Kill a process that does not end by itself."""
        self._runner.kill(member.process)
        self.ended(member.process, reason, now)

    def _count_death(self, role: Role, reason: str) -> bool:
        """Count a death; return False if the engine must give up."""
        self._deaths[role] += 1
        if self._deaths[role] < MAX_DEATHS:
            return True
        self.fatal_error = EngineError(f"{reason} ({MAX_DEATHS} times in a row, with no token in between)")
        return False

    def _count_fatal_request(self, reason: str) -> None:
        """Reset the workers' deaths, which one request caused; give up if too many requests in a row do that."""
        self._deaths["worker"] = 0
        self._num_fatal_requests += 1
        if self._num_fatal_requests == MAX_DEATHS:
            self.fatal_error = EngineError(f"{reason} ({MAX_DEATHS} requests in a row, with no token in between)")

    def _backoff(self, role: Role) -> float:
        return BACKOFF_S[min(self._deaths[role], len(BACKOFF_S)) - 1]

    def _is_final(self, member: Member) -> bool:
        """Return whether a restart would fail again: a first start failed with a reason, or a front end's settings."""
        if member.failure is None:
            return False
        return not self._was_ready or (member.role == "frontend" and member.failure.exit_status == EX_CONFIG)

    def _give_up(self, member: Member, reason: str) -> None:
        refused = member.failure is not None and member.failure.exit_status == EX_CONFIG
        self.fatal_error = (ConfigError if refused else EngineError)(reason)

    # ---- starts

    def _start(self, role: Role, index: int, now: float) -> None:
        """Start a process. A scheduler after the first takes over the existing workers."""
        if role == "scheduler" and self.incarnation > 1:
            # The workers are the same, but results of steps that the dead scheduler sent must not look like the new
            # one's. The epoch rises here and not at the death, because the workers may be lost in between, too.
            self.worker_epoch += 1
        member = self._spawn(role, index, now)
        if role == "frontend":
            self._runner.send(member.process, Command("scheduler", incarnation=self.incarnation))
        elif self.incarnation > 1:
            self.rejoin_group(now)
            for front_end in self.front_ends:
                self._runner.send(front_end.process, Command("scheduler", incarnation=self.incarnation))
            self._runner.scheduler_replaced(self.incarnation)

    def rejoin_group(self, now: float) -> None:
        """Send the workers to the new scheduler, with ADOPTION_S to join it."""
        # A worker that is blocked in a step of the dead scheduler does not join, and need not fall silent either: this
        # time limit finds it.
        for rank, member in self.group.items():
            self._runner.send(member.process, Command("join", worker_epoch=self.worker_epoch, rank=rank))
        self._adopt_by = now + ADOPTION_S
        self._check_adoption()

    def _check_adoption(self) -> None:
        """Clear the deadline once all ready workers have joined. One that still starts or loads joins afterwards."""
        if all(m.joined == self.worker_epoch or not m.ready for m in self.group.values()):
            self._adopt_by = None

    def _assign_worker(self, rank: int, now: float) -> None:
        """Give a rank a worker: a standby, or a new process."""
        member = self.standbys.take() or self._spawn("worker", rank, now)
        member.index = rank
        self.group[rank] = member
        self._runner.send(member.process, Command("join", worker_epoch=self.worker_epoch, rank=rank))

    def _spawn(self, role: Role, index: int, now: float) -> Member:
        process = self._runner.start(role, incarnation=self.incarnation, worker_epoch=self.worker_epoch, index=index)
        member = Member(role, process, now, index)
        self.members.append(member)
        return member

    def _ready(self, member: Member, report: Report, now: float) -> None:
        if member.role == "scheduler":
            if report.worker_epoch != self.worker_epoch:
                return
            self._was_ready = True
            for worker in self.group.values():
                worker.ready = True
            self.standbys.group_is_ready(now)
        else:
            self._deaths["frontend"] = 0  # front ends can start, so the next death is not one in a row
        member.ready = True
        member.ready_report = report

    def _find(self, process: Process) -> Member | None:
        return next((m for m in self.members if m.process is process), None)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        if self._stopping or self.fatal_error is not None:
            return
        assert sum(m.role == "scheduler" for m in self.members) + (("scheduler", 0) in self._due) == 1
        for rank in range(self._counts.num_ranks):
            assert (rank in self.group) != (("worker", rank) in self._due), f"rank {rank}"
        assert all(m in self.members for m in (*self.group.values(), *self.standbys.members))

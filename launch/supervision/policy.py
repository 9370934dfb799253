"""Which processes are started, ended and told what. Pure decisions; the Supervisor carries them out.

Workers are a *group*: one process per rank, all of one *epoch*. When one of them dies, hangs, or is found to be wrong,
the whole group is killed and another one is started under the next epoch; *standby* processes, which have done the slow
part of starting already, take over as soon as the memory of those before is free. A scheduler has a number, too, its
*life*: a new one adopts the workers that there are, under a new epoch, and front ends bring it the requests of the old.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.launch.supervision.members import Member, Process, Role, Standbys
from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import ConfigError, EngineError, QuireError
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.log import event_logger

log = event_logger("supervisor")

MAX_DEATHS = 5
"""Of one role in a row, with no token committed in between, after which the engine gives up."""
START_S = 60.0
"""How long a process may take to say that it has started."""
SILENT_S = 10.0
"""How long a process that has started may say nothing. Twice a second is the rule; native code may hold it up."""
END_S = 5.0
"""How long one that has said why it ends may take to end."""
ADOPTION_S = 2.0
"""How long a worker may take to hear that it has another scheduler: one that does not is in a step for ever."""
BACKOFF_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Before the first, second, ... restart in a row."""


class Runner(Protocol):
    """What can be done with processes."""

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> Process: ...

    def send(self, process: Process, command: Command) -> None:
        """Without effect on one that has ended."""
        ...

    def kill(self, process: Process) -> None: ...

    def scheduler_replaced(self, incarnation: int) -> None:
        """Front ends within this process are to connect to the scheduler of ``incarnation``."""
        ...


class ProcessCounts(NamedTuple):
    """How many there are to be of each. ``standby``: of each rank."""

    num_ranks: int = 1
    num_front_ends: int = 0
    standby: bool = False


class SupervisionPolicy:
    """Knows every process of one engine. ``fatal_error`` is set once the engine cannot go on.

    Invariants (``check``): at most one scheduler, at most one worker per rank in the group; what is not there is due
    at a time that is known.
    """

    def __init__(self, crew: ProcessCounts, runner: Runner) -> None:
        self._crew = crew
        self._runner = runner
        self.worker_epoch = FIRST_WORKER_EPOCH
        self.incarnation = 1
        self.members: list[Member] = []
        self.group: dict[int, Member] = {}
        """By rank."""
        self.standbys = Standbys(crew.num_ranks if crew.standby else 0)
        self.fatal_error: QuireError | None = None
        self._deaths: dict[Role, int] = {"scheduler": 0, "worker": 0, "frontend": 0}
        self._num_condemned = 0
        self._due: dict[tuple[Role, int], float] = {}
        """(role, index) of each process that is to be started, and when."""
        self._adopt_by: float | None = None
        self._was_ready = False
        self._draining = self._stopping = False

    # ---- what happens

    def begin(self, now: float) -> None:
        """Start the engine; front ends come with ``admit_front_ends``."""
        self._start("scheduler", 0, now)
        for rank in range(self._crew.num_ranks):
            self._fill(rank, now)

    def admit_front_ends(self, now: float) -> None:
        for index in range(self._crew.num_front_ends):
            self._start("frontend", index, now)

    def drain(self) -> None:
        """Front ends are to end when nothing runs any more; until then the engine is kept alive."""
        self._draining = True
        for index in range(self._crew.num_front_ends):
            self._due.pop(("frontend", index), None)
        for front_end in self.front_ends:
            self._runner.send(front_end.process, Command("drain"))

    def stop(self) -> None:
        """From now on the end of a process is as it should be."""
        self._stopping = True
        self._due.clear()
        self.standbys.due = self._adopt_by = None

    def reported(self, process: Process, report: Report, now: float) -> None:
        """A process said something."""
        member = self._find(process)
        if member is None:
            return
        member.last_report_at = now
        match report.event:
            case "started":
                member.started = True
            case "joined":
                member.joined = report.worker_epoch
                self._check_adoption()
            case "ready":
                self._ready(member, report, now)
            case "progress":
                self._deaths = dict.fromkeys(self._deaths, 0)
                self._num_condemned = 0
            case "suspect_confirmed":
                self._count_fatal_request(report.text)
            case "group_failed":
                if report.worker_epoch == self.worker_epoch:
                    self._lose_group(report.text, now)
            case "failed":
                member.failure, member.failed_at = report, now

    def ended(self, process: Process, how: str, now: float) -> None:
        """A process is gone, and its memory is free. ``how``: in words, where it said nothing itself."""
        member = self._find(process)
        if member is None:
            return
        self.members.remove(member)
        if self._stopping:
            return
        reason = member.failure.text if member.failure is not None else how
        if member in self.standbys.members:
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
        """Time has passed: start the processes that are due, end those that have been silent for too long."""
        for member in list(self.members):
            limit = SILENT_S if member.started else START_S
            if now > member.last_report_at + limit:
                log.error("process stopped reporting", role=member.role, pid=member.process.pid, seconds=limit)
                self._end(member, f"the {member.role} process said nothing for {limit:g} s", now)
            elif member.failure is not None and now > member.failed_at + END_S:
                self._end(member, member.failure.text, now)
        if self._adopt_by is not None and now > self._adopt_by:
            self._adopt_by = None
            self._lose_group("a worker did not come to its new scheduler", now)
        for role, index in [key for key, when in self._due.items() if when <= now]:
            del self._due[role, index]
            if role == "worker":
                self._fill(index, now)
            else:
                self._start(role, index, now)
        for _ in range(self.standbys.num_to_start(now)):
            self.standbys.members.append(self._spawn("worker", 0, now))

    def next_event(self, now: float) -> float:
        """Seconds until ``tick`` has something to do, at most."""
        times = [*self._due.values()]
        times += [when for when in (self.standbys.due, self._adopt_by) if when is not None]
        times += [m.last_report_at + (SILENT_S if m.started else START_S) for m in self.members]
        return max(0.0, min(times, default=now + 1.0) - now)

    # ---- looking in

    @property
    def is_ready(self) -> bool:
        """Whether the scheduler (which waits for the workers) and the front ends are ready."""
        needed = [m for m in self.members if m.role != "worker"]
        return len(needed) == 1 + self._crew.num_front_ends and all(m.ready for m in needed)

    @property
    def scheduler(self) -> Member | None:
        return next((m for m in self.members if m.role == "scheduler"), None)

    @property
    def front_ends(self) -> Sequence[Member]:
        return [m for m in self.members if m.role == "frontend"]

    # ---- losses

    def _lose_group(self, reason: str, now: float) -> None:
        """All of it goes; what comes is another epoch's."""
        if self._stopping or not self._count_death("worker", reason):
            return
        log.error("restarting the workers", reason=reason)
        self.worker_epoch += 1
        if (scheduler := self.scheduler) is not None:
            scheduler.ready = False
            self._runner.send(scheduler.process, Command("worker_epoch", worker_epoch=self.worker_epoch, text=reason))
        self._disband()
        when = now + self._patience("worker")
        for rank in range(self._crew.num_ranks):
            self._due["worker", rank] = when
        self.tick(now)

    def _disband(self) -> None:
        for member in self.group.values():
            if member in self.members:
                self.members.remove(member)
                self._runner.kill(member.process)
        self.group.clear()
        self._adopt_by = None

    def _lose_scheduler(self, reason: str, now: float) -> None:
        if not self._count_death("scheduler", reason):
            return
        log.error("restarting the scheduler", reason=reason)
        self.incarnation += 1
        self._due["scheduler", 0] = now + self._patience("scheduler")
        self.tick(now)

    def _lose_front_end(self, member: Member, reason: str, now: float) -> None:
        if self._draining:
            return
        if not self._count_death("frontend", reason):
            return
        log.error("restarting a front end", reason=reason)
        if (scheduler := self.scheduler) is not None:
            self._runner.send(scheduler.process, Command("front_end_exited", pid=member.process.pid))
        self._due["frontend", member.index] = now + self._patience("frontend")
        self.tick(now)

    def _end(self, member: Member, reason: str, now: float) -> None:
        """One that does not end by itself."""
        self._runner.kill(member.process)
        self.ended(member.process, reason, now)

    def _count_death(self, role: Role, reason: str) -> bool:
        """False when that was one too many."""
        self._deaths[role] += 1
        if self._deaths[role] < MAX_DEATHS:
            return True
        self.fatal_error = EngineError(f"{reason} ({MAX_DEATHS} times in a row, with no token in between)")
        return False

    def _count_fatal_request(self, reason: str) -> None:
        """A request ended the workers, and is gone: those deaths are explained, unless each request is like it."""
        self._deaths["worker"] = 0
        self._num_condemned += 1
        if self._num_condemned == MAX_DEATHS:
            self.fatal_error = EngineError(
                f"{reason} ({MAX_DEATHS} requests in a row did that, with no token in between)"
            )

    def _patience(self, role: Role) -> float:
        return BACKOFF_S[min(self._deaths[role], len(BACKOFF_S)) - 1]

    def _is_final(self, member: Member) -> bool:
        """A first start that fails with a reason of its own would fail again, and so would a front end's settings."""
        if member.failure is None:
            return False
        return not self._was_ready or (member.role == "frontend" and member.failure.exit_status == EX_CONFIG)

    def _give_up(self, member: Member, reason: str) -> None:
        refused = member.failure is not None and member.failure.exit_status == EX_CONFIG
        self.fatal_error = (ConfigError if refused else EngineError)(reason)

    # ---- beginnings

    def _start(self, role: Role, index: int, now: float) -> None:
        """A scheduler after the first takes over the workers that there are."""
        if role == "scheduler" and self.incarnation > 1:
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
        """Tell the workers of the new scheduler to join it, and give them until ADOPTION_S from now."""
        for rank, member in self.group.items():
            self._runner.send(member.process, Command("join", worker_epoch=self.worker_epoch, rank=rank))
        self._adopt_by = now + ADOPTION_S
        self._check_adoption()

    def _check_adoption(self) -> None:
        """One that has not even started hears of it when it does, and so does one that loads."""
        if all(m.joined == self.worker_epoch or not m.ready for m in self.group.values()):
            self._adopt_by = None

    def _fill(self, rank: int, now: float) -> None:
        """A worker for a rank: one that stands by, or a new one."""
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
            self._deaths["frontend"] = 0  # whatever ended the one before, it is not how they begin
        member.ready = True
        member.detail = report.detail

    def _find(self, process: Process) -> Member | None:
        return next((m for m in self.members if m.process is process), None)

    def check(self) -> None:
        """Raise AssertionError unless each missing process is due."""
        if self._stopping or self.fatal_error is not None:
            return
        assert sum(m.role == "scheduler" for m in self.members) + (("scheduler", 0) in self._due) == 1
        for rank in range(self._crew.num_ranks):
            assert (rank in self.group) != (("worker", rank) in self._due), f"rank {rank}"
        assert all(m in self.members for m in (*self.group.values(), *self.standbys.members))

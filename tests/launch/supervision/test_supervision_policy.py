"""Supervision policy: which processes are started, killed and notified; with fake processes and a fake clock."""

from dataclasses import dataclass, field

import pytest

from quire.launch.supervision.members import STANDBY_DELAY_S, Process, Role
from quire.launch.supervision.supervision_policy import (
    ADOPTION_S,
    BACKOFF_S,
    MAX_DEATHS,
    SILENT_S,
    START_S,
    ProcessCounts,
    SupervisionPolicy,
)
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.restarts import Restarts


@dataclass(eq=False)
class FakeProcess:
    """A process; ``commands``: the commands sent to it, in order."""

    pid: int
    role: Role
    incarnation: int
    worker_epoch: int
    index: int
    commands: list[Command] = field(default_factory=list)
    alive: bool = True

    @property
    def worker_epochs(self) -> list[int]:
        return [command.worker_epoch for command in self.commands if command.kind in ("join", "worker_epoch")]


class FakeRunner:
    """The policy's Runner, and a clock."""

    def __init__(self, **counts: int | bool) -> None:
        self.now = 0.0
        self.started: list[FakeProcess] = []
        self.incarnations: list[int] = []
        self.policy = SupervisionPolicy(ProcessCounts(**counts), self)  # type: ignore[arg-type]
        self.policy.begin(self.now)
        self.policy.admit_front_ends(self.now)

    # ---- policy.Runner

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> FakeProcess:
        self.started.append(FakeProcess(len(self.started) + 100, role, incarnation, worker_epoch, index))
        return self.started[-1]

    def send(self, process: Process, command: Command) -> None:
        assert isinstance(process, FakeProcess)
        process.commands.append(command)

    def kill(self, process: Process) -> None:
        assert isinstance(process, FakeProcess)
        process.alive = False

    def scheduler_replaced(self, incarnation: int) -> None:
        self.incarnations.append(incarnation)

    # ---- events

    def alive(self, role: Role) -> list[FakeProcess]:
        return [process for process in self.started if process.role == role and process.alive]

    def one(self, role: Role) -> FakeProcess:
        (process,) = self.alive(role)
        return process

    def die(self, process: FakeProcess, how: str = "killed by SIGKILL", failure: Report | None = None) -> None:
        if failure is not None:
            self.policy.reported(process, failure, self.now)
        process.alive = False
        self.policy.ended(process, how, self.now)
        self.policy.check()

    def report(self, process: FakeProcess, event: str, **more: object) -> None:
        self.policy.reported(process, Report(event, **more), self.now)  # type: ignore[arg-type]
        self.policy.check()

    def become_ready(self, *, progress: bool = True) -> None:
        """Send the reports of a successful start from all live processes."""
        for process in self.alive("worker") + self.alive("frontend") + self.alive("scheduler"):
            self.report(process, "started")
        for process in self.alive("frontend"):
            self.report(process, "ready")
        for scheduler in self.alive("scheduler"):
            self.report(scheduler, "ready", worker_epoch=self.policy.worker_epoch)
            if progress:
                self.report(scheduler, "progress", worker_epoch=self.policy.worker_epoch)

    def pass_time(self, seconds: float, *, silent: tuple[FakeProcess, ...] = ()) -> None:
        """Advance the clock in small steps; all live processes but ``silent`` report at each."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for process in self.started:
                if process.alive and process not in silent:
                    self.policy.reported(process, Report("alive"), self.now)
            self.policy.tick(self.now)
            self.policy.check()


def test_names_what_a_start_waits_for() -> None:
    runner = FakeRunner(num_front_ends=1)
    doing = "loads its Python modules"
    assert runner.policy.awaited == f"scheduler {doing}, worker {doing}, front end {doing}"
    for process in runner.started:
        runner.policy.reported(process, Report("started"), runner.now)
    assert runner.policy.awaited == "connecting"
    for report in (Report("alive", "loads weights"), Report("alive")):
        runner.policy.reported(runner.one("worker"), report, runner.now)
        assert runner.policy.awaited == "worker loads weights"


def test_start_of_an_engine() -> None:
    runner = FakeRunner(num_ranks=2, num_front_ends=2)
    assert [process.role for process in runner.started] == ["scheduler", "worker", "worker", "frontend", "frontend"]
    assert [worker.commands for worker in runner.alive("worker")] == [
        [Command("join", worker_epoch=1, rank=0)],
        [Command("join", worker_epoch=1, rank=1)],
    ]
    assert [front_end.commands for front_end in runner.alive("frontend")] == [[Command("scheduler", incarnation=1)]] * 2
    assert not runner.policy.is_ready
    runner.become_ready()
    assert runner.policy.is_ready


class TestWorkers:
    @pytest.mark.parametrize("victim", [0, 1])
    def test_death_of_one_rank_replaces_the_group(self, victim: int) -> None:
        runner = FakeRunner(num_ranks=2)
        runner.become_ready()
        group = runner.alive("worker")
        runner.die(group[victim])
        assert not group[1 - victim].alive
        assert [worker.worker_epochs for worker in runner.alive("worker")] == [[2], [2]]
        assert runner.one("scheduler").commands == [Command("worker_epoch", worker_epoch=2, text="killed by SIGKILL")]
        assert not runner.policy.is_ready
        runner.become_ready()
        assert runner.policy.is_ready and runner.policy.worker_epoch == 2

    def test_a_standby_replaces_a_worker_and_is_replaced(self) -> None:
        runner = FakeRunner(standby=True)
        runner.become_ready()
        assert len(runner.alive("worker")) == 1
        runner.pass_time(STANDBY_DELAY_S + 1)
        first, standby = runner.alive("worker")
        assert not standby.commands
        runner.report(standby, "started")
        runner.die(first)
        assert runner.one("worker") is standby and standby.commands == [Command("join", worker_epoch=2, rank=0)]
        runner.become_ready()
        runner.pass_time(STANDBY_DELAY_S + 1)
        assert len(runner.alive("worker")) == 2

    def test_a_standby_that_dies_is_replaced_without_a_new_epoch(self) -> None:
        runner = FakeRunner(standby=True)
        runner.become_ready()
        runner.pass_time(STANDBY_DELAY_S + 1)
        runner.die(runner.alive("worker")[1])
        assert runner.policy.worker_epoch == 1 and runner.policy.is_ready and len(runner.alive("worker")) == 1
        runner.pass_time(STANDBY_DELAY_S + 1)
        assert len(runner.alive("worker")) == 2

    def test_delay_of_standbys_doubles_with_each_death_until_one_is_used(self) -> None:
        runner = FakeRunner(standby=True)
        runner.become_ready()
        runner.pass_time(STANDBY_DELAY_S + 1)
        for wait in (2, 4, 8, 16, 32, 60, 60):
            runner.die(runner.alive("worker")[1])
            runner.pass_time(wait - 0.5)
            assert len(runner.alive("worker")) == 1
            runner.pass_time(0.5)
            assert len(runner.alive("worker")) == 2
        worker, standby = runner.alive("worker")
        runner.die(worker)
        assert runner.one("worker") is standby
        runner.become_ready()
        for _ in range(2):
            runner.pass_time(STANDBY_DELAY_S + 0.5)
            _, standby = runner.alive("worker")
            runner.die(standby)

    def test_the_scheduler_can_fail_the_current_group_only(self) -> None:
        runner = FakeRunner()
        runner.become_ready()
        scheduler, worker = runner.one("scheduler"), runner.one("worker")
        runner.report(scheduler, "group_failed", text="step timed out", worker_epoch=1)
        assert not worker.alive and runner.policy.worker_epoch == 2
        runner.report(scheduler, "group_failed", text="step timed out", worker_epoch=1)
        assert runner.policy.worker_epoch == 2
        runner.policy.ended(worker, "killed by SIGKILL", runner.now)  # killed by the policy itself
        assert runner.policy.worker_epoch == 2

    def test_restarts_back_off_and_then_end_the_engine(self) -> None:
        runner = FakeRunner()
        runner.become_ready(progress=False)
        for death in range(1, MAX_DEATHS):
            runner.die(runner.one("worker"))
            waits = BACKOFF_S[death - 1]
            if waits:
                runner.pass_time(waits - 0.01)
                assert not runner.alive("worker"), f"after death {death}"
                runner.pass_time(0.02)
            runner.become_ready(progress=False)
        assert runner.policy.fatal_error is None
        runner.die(runner.one("worker"))
        assert isinstance(runner.policy.fatal_error, EngineError)
        assert str(runner.policy.fatal_error) == "killed by SIGKILL (5 times in a row, with no token in between)"

    def test_a_token_resets_the_count_of_deaths(self) -> None:
        runner = FakeRunner()
        runner.become_ready()
        for _ in range(3 * MAX_DEATHS):
            runner.die(runner.one("worker"))
            assert runner.one("worker"), "at once"
            runner.become_ready()
        assert runner.policy.fatal_error is None

    def test_deaths_caused_by_a_request_count_only_after_five_requests(self) -> None:
        runner = FakeRunner()
        runner.become_ready()
        for number in range(1, MAX_DEATHS + 1):
            assert runner.policy.fatal_error is None
            for _ in range(3):
                runner.pass_time(BACKOFF_S[-1] + 0.1)
                runner.die(runner.one("worker"))
            runner.report(
                runner.one("scheduler"),
                "suspect_confirmed",
                text=f"request crashed workers {number}",
                worker_epoch=runner.policy.worker_epoch,
            )
            runner.become_ready(progress=False)
        assert (
            str(runner.policy.fatal_error)
            == "request crashed workers 5 (5 requests in a row, with no token in between)"
        )

    def test_a_first_start_that_fails_with_a_reason_is_not_retried(self) -> None:
        runner = FakeRunner()
        runner.die(runner.one("worker"), failure=Report("failed", "no such tensor", EX_CONFIG))
        assert isinstance(runner.policy.fatal_error, ConfigError) and str(runner.policy.fatal_error) == "no such tensor"

    def test_a_first_start_that_is_killed_is_retried(self) -> None:
        runner = FakeRunner()
        runner.die(runner.one("worker"))
        assert runner.policy.fatal_error is None and runner.one("worker").worker_epochs == [2]

    def test_a_restart_that_fails_with_a_reason_is_retried(self) -> None:
        runner = FakeRunner()
        runner.become_ready()
        runner.die(runner.one("worker"))
        runner.die(runner.one("worker"), failure=Report("failed", "the memory is not free yet", EX_CONFIG))
        runner.pass_time(1)
        assert runner.policy.fatal_error is None and runner.one("worker").worker_epochs == [3]


class TestSilence:
    @pytest.mark.parametrize("role", ["worker", "scheduler", "frontend"])
    def test_a_process_without_heartbeat_is_killed(self, role: Role) -> None:
        runner = FakeRunner(num_front_ends=1)
        runner.become_ready()
        frozen = runner.one(role)
        runner.pass_time(SILENT_S - 1, silent=(frozen,))
        assert frozen.alive
        runner.pass_time(2, silent=(frozen,))
        assert not frozen.alive and runner.one(role)

    def test_a_starting_process_has_a_longer_limit(self) -> None:
        runner = FakeRunner()
        slow = runner.one("worker")
        runner.pass_time(START_S - 1, silent=(slow,))
        assert slow.alive
        runner.pass_time(2, silent=(slow,))
        assert not slow.alive

    def test_next_event_is_never_late(self) -> None:
        runner = FakeRunner()
        runner.become_ready(progress=False)
        for _ in range(3):
            runner.die(runner.one("worker"))
            wait = runner.policy.next_event(runner.now)
            assert 0 <= wait <= SILENT_S
            runner.pass_time(wait + 0.001)
            runner.become_ready(progress=False)


class TestScheduler:
    def test_a_new_scheduler_takes_over_workers_and_front_ends(self) -> None:
        runner = FakeRunner(num_ranks=2, num_front_ends=1)
        runner.become_ready()
        workers = runner.alive("worker")
        runner.die(runner.one("scheduler"))
        scheduler = runner.one("scheduler")
        assert (scheduler.incarnation, scheduler.worker_epoch) == (2, 2) and runner.incarnations == [2]
        assert [worker.worker_epochs for worker in workers] == [[1, 2], [1, 2]]
        assert runner.one("frontend").commands == [
            Command("scheduler", incarnation=1),
            Command("scheduler", incarnation=2),
        ]
        for worker in workers:
            runner.report(worker, "joined", worker_epoch=2)
        runner.pass_time(ADOPTION_S + 1)
        assert runner.alive("worker") == workers
        runner.become_ready()
        assert runner.policy.is_ready

    def test_a_group_that_does_not_join_the_new_scheduler_is_replaced(self) -> None:
        runner = FakeRunner(num_ranks=2)
        runner.become_ready()
        workers = runner.alive("worker")
        runner.die(runner.one("scheduler"))
        runner.report(workers[0], "joined", worker_epoch=2)
        runner.pass_time(ADOPTION_S + 1)
        assert not any(worker.alive for worker in workers)
        assert [worker.worker_epochs for worker in runner.alive("worker")] == [[3], [3]]
        assert runner.one("scheduler").worker_epochs == [3]

    def test_worker_and_scheduler_die_together(self) -> None:
        runner = FakeRunner()
        runner.become_ready()
        worker, scheduler = runner.one("worker"), runner.one("scheduler")
        runner.die(worker)
        runner.die(scheduler)
        assert runner.one("worker").worker_epochs == [2, 3] and runner.one("scheduler").worker_epoch == 3
        runner.become_ready()
        runner.die(runner.one("scheduler"))
        runner.die(runner.one("worker"))
        assert runner.one("worker").worker_epochs[-1] == runner.policy.worker_epoch
        runner.become_ready()
        assert runner.policy.is_ready

    def test_a_scheduler_that_never_starts_ends_the_engine(self) -> None:
        runner = FakeRunner()
        runner.become_ready(progress=False)
        for _ in range(MAX_DEATHS):
            runner.pass_time(BACKOFF_S[-1] + 0.1)
            runner.die(runner.one("scheduler"))
        assert isinstance(runner.policy.fatal_error, EngineError)


class TestFrontEnds:
    def test_the_scheduler_is_notified_of_a_front_ends_death(self) -> None:
        runner = FakeRunner(num_front_ends=2)
        runner.become_ready()
        gone, stays = runner.alive("frontend")
        runner.die(gone)
        assert runner.one("scheduler").commands == [Command("front_end_exited", pid=gone.pid)]
        assert stays.alive and len(runner.alive("frontend")) == 2
        assert runner.alive("frontend")[1].index == gone.index

    def test_restarts_are_counted_by_role(self) -> None:
        runner = FakeRunner(num_ranks=2, num_front_ends=2)
        runner.become_ready()
        for role, expected in (
            ("scheduler", Restarts(scheduler=1)),
            ("worker", Restarts(scheduler=1, worker=1)),
            ("frontend", Restarts(scheduler=1, worker=1, frontend=1)),
        ):
            runner.die(runner.alive(role)[0])  # type: ignore[arg-type]
            assert runner.policy.restarts == expected
        runner.policy.drain()
        runner.die(runner.alive("frontend")[0])
        assert runner.policy.restarts == Restarts(1, 1, 1)

    def test_front_ends_may_end_while_draining_and_workers_are_replaced(self) -> None:
        runner = FakeRunner(num_front_ends=2)
        runner.become_ready()
        runner.policy.drain()
        assert all(front_end.commands[-1] == Command("drain") for front_end in runner.alive("frontend"))
        runner.die(runner.alive("frontend")[0])
        assert len(runner.alive("frontend")) == 1
        runner.die(runner.one("worker"))
        assert runner.one("worker").worker_epochs == [2]

    def test_no_process_is_started_after_stop(self) -> None:
        runner = FakeRunner(num_front_ends=1, standby=True)
        runner.become_ready()
        runner.policy.stop()
        for role in ("frontend", "scheduler", "worker"):
            runner.die(runner.one(role))  # type: ignore[arg-type]
        runner.pass_time(100)
        assert not any(process.alive for process in runner.started) and runner.policy.fatal_error is None

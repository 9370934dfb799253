"""Who is started, ended and told what, when processes die: decisions only, on pretended processes, by no clock."""

from dataclasses import dataclass, field

import pytest

from quire.launch.supervision.members import STANDBY_DELAY_S, Process, Role
from quire.launch.supervision.policy import (
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


@dataclass(eq=False)
class Pretended:
    """A process; ``told`` is what it was told, in order."""

    pid: int
    role: Role
    incarnation: int
    worker_epoch: int
    index: int
    told: list[Command] = field(default_factory=list)
    alive: bool = True

    @property
    def worker_epochs(self) -> list[int]:
        return [command.worker_epoch for command in self.told if command.kind in ("join", "worker_epoch")]


class House:
    """The overseer's Runner, and the clock."""

    def __init__(self, **crew: int | bool) -> None:
        self.now = 0.0
        self.started: list[Pretended] = []
        self.lives: list[int] = []
        self.policy = SupervisionPolicy(ProcessCounts(**crew), self)  # type: ignore[arg-type]
        self.policy.begin(self.now)
        self.policy.admit_front_ends(self.now)

    # ---- as overseer.Runner

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> Pretended:
        self.started.append(Pretended(len(self.started) + 100, role, incarnation, worker_epoch, index))
        return self.started[-1]

    def send(self, process: Process, command: Command) -> None:
        assert isinstance(process, Pretended)
        process.told.append(command)

    def kill(self, process: Process) -> None:
        assert isinstance(process, Pretended)
        process.alive = False

    def scheduler_replaced(self, incarnation: int) -> None:
        self.lives.append(incarnation)

    # ---- what happens

    def alive(self, role: Role) -> list[Pretended]:
        return [process for process in self.started if process.role == role and process.alive]

    def one(self, role: Role) -> Pretended:
        (process,) = self.alive(role)
        return process

    def die(self, process: Pretended, how: str = "killed by SIGKILL", failure: Report | None = None) -> None:
        if failure is not None:
            self.policy.reported(process, failure, self.now)
        process.alive = False
        self.policy.ended(process, how, self.now)
        self.policy.check()

    def say(self, process: Pretended, event: str, **more: object) -> None:
        self.policy.reported(process, Report(event, **more), self.now)  # type: ignore[arg-type]
        self.policy.check()

    def become_ready(self, *, progress: bool = True) -> None:
        """All that live say what they say when nothing goes wrong."""
        for process in self.alive("worker") + self.alive("frontend") + self.alive("scheduler"):
            self.say(process, "started")
        for process in self.alive("frontend"):
            self.say(process, "ready")
        for scheduler in self.alive("scheduler"):
            self.say(scheduler, "ready", worker_epoch=self.policy.worker_epoch)
            if progress:
                self.say(scheduler, "progress", worker_epoch=self.policy.worker_epoch)

    def pass_time(self, seconds: float, *, silent: tuple[Pretended, ...] = ()) -> None:
        """In small parts, in which everyone who lives says so."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for process in self.started:
                if process.alive and process not in silent:
                    self.policy.reported(process, Report("alive"), self.now)
            self.policy.tick(self.now)
            self.policy.check()


def test_an_engine_begins() -> None:
    house = House(num_ranks=2, num_front_ends=2)
    assert [process.role for process in house.started] == ["scheduler", "worker", "worker", "frontend", "frontend"]
    assert [worker.told for worker in house.alive("worker")] == [
        [Command("join", worker_epoch=1, rank=0)],
        [Command("join", worker_epoch=1, rank=1)],
    ]
    assert [front_end.told for front_end in house.alive("frontend")] == [[Command("scheduler", incarnation=1)]] * 2
    assert not house.policy.is_ready
    house.become_ready()
    assert house.policy.is_ready


class TestWorkers:
    @pytest.mark.parametrize("victim", [0, 1])
    def test_one_rank_takes_the_group_with_it(self, victim: int) -> None:
        house = House(num_ranks=2)
        house.become_ready()
        group = house.alive("worker")
        house.die(group[victim])
        assert not group[1 - victim].alive
        assert [worker.worker_epochs for worker in house.alive("worker")] == [[2], [2]]
        assert house.one("scheduler").told == [Command("worker_epoch", worker_epoch=2, text="killed by SIGKILL")]
        assert not house.policy.is_ready
        house.become_ready()
        assert house.policy.is_ready and house.policy.worker_epoch == 2

    def test_a_standby_takes_over_at_once_and_another_one_stands_by(self) -> None:
        house = House(standby=True)
        house.become_ready()
        assert len(house.alive("worker")) == 1
        house.pass_time(STANDBY_DELAY_S + 1)
        first, standby = house.alive("worker")
        assert not standby.told
        house.say(standby, "started")
        house.die(first)
        assert house.one("worker") is standby and standby.told == [Command("join", worker_epoch=2, rank=0)]
        house.become_ready()
        house.pass_time(STANDBY_DELAY_S + 1)
        assert len(house.alive("worker")) == 2

    def test_a_standby_that_dies_is_replaced_later_and_nobody_else_hears_of_it(self) -> None:
        house = House(standby=True)
        house.become_ready()
        house.pass_time(STANDBY_DELAY_S + 1)
        house.die(house.alive("worker")[1])
        assert house.policy.worker_epoch == 1 and house.policy.is_ready and len(house.alive("worker")) == 1
        house.pass_time(STANDBY_DELAY_S + 1)
        assert len(house.alive("worker")) == 2

    def test_standbys_that_keep_dying_are_started_ever_more_seldom_until_one_is_of_use(self) -> None:
        house = House(standby=True)
        house.become_ready()
        house.pass_time(STANDBY_DELAY_S + 1)
        for wait in (2, 4, 8, 16, 32, 60, 60):
            house.die(house.alive("worker")[1])
            house.pass_time(wait - 0.5)
            assert len(house.alive("worker")) == 1
            house.pass_time(0.5)
            assert len(house.alive("worker")) == 2
        worker, standby = house.alive("worker")
        house.die(worker)
        assert house.one("worker") is standby
        house.become_ready()
        for _ in range(2):
            house.pass_time(STANDBY_DELAY_S + 0.5)
            _, standby = house.alive("worker")
            house.die(standby)

    def test_the_scheduler_can_give_up_a_group_but_not_an_older_one(self) -> None:
        house = House()
        house.become_ready()
        scheduler, worker = house.one("scheduler"), house.one("worker")
        house.say(scheduler, "group_failed", text="no step in time", worker_epoch=1)
        assert not worker.alive and house.policy.worker_epoch == 2
        house.say(scheduler, "group_failed", text="no step in time", worker_epoch=1)
        assert house.policy.worker_epoch == 2
        house.policy.ended(worker, "killed by SIGKILL", house.now)  # which was done here
        assert house.policy.worker_epoch == 2

    def test_restarts_in_a_row_wait_longer_and_longer_and_then_end_the_engine(self) -> None:
        house = House()
        house.become_ready(progress=False)
        for death in range(1, MAX_DEATHS):
            house.die(house.one("worker"))
            waits = BACKOFF_S[death - 1]
            if waits:
                house.pass_time(waits - 0.01)
                assert not house.alive("worker"), f"after death {death}"
                house.pass_time(0.02)
            house.become_ready(progress=False)
        assert house.policy.fatal_error is None
        house.die(house.one("worker"))
        assert isinstance(house.policy.fatal_error, EngineError)
        assert str(house.policy.fatal_error) == "killed by SIGKILL (5 times in a row, with no token in between)"

    def test_a_token_in_between_makes_them_not_in_a_row(self) -> None:
        house = House()
        house.become_ready()
        for _ in range(3 * MAX_DEATHS):
            house.die(house.one("worker"))
            assert house.one("worker"), "at once"
            house.become_ready()
        assert house.policy.fatal_error is None

    def test_deaths_that_a_request_was_why_do_not_count_until_there_are_too_many_such_requests(self) -> None:
        house = House()
        house.become_ready()
        for condemned in range(1, MAX_DEATHS + 1):
            assert house.policy.fatal_error is None
            for _ in range(3):
                house.pass_time(BACKOFF_S[-1] + 0.1)
                house.die(house.one("worker"))
            house.say(
                house.one("scheduler"),
                "suspect_confirmed",
                text=f"found out {condemned}",
                worker_epoch=house.policy.worker_epoch,
            )
            house.become_ready(progress=False)
        assert str(house.policy.fatal_error) == "found out 5 (5 requests in a row, with no token in between)"

    def test_a_first_start_that_fails_with_a_reason_is_not_tried_again(self) -> None:
        house = House()
        house.die(house.one("worker"), failure=Report("failed", "no such tensor", EX_CONFIG))
        assert isinstance(house.policy.fatal_error, ConfigError) and str(house.policy.fatal_error) == "no such tensor"

    def test_a_first_start_that_is_killed_is_tried_again(self) -> None:
        house = House()
        house.die(house.one("worker"))
        assert house.policy.fatal_error is None and house.one("worker").worker_epochs == [2]

    def test_a_restart_that_fails_with_a_reason_is_tried_again(self) -> None:
        house = House()
        house.become_ready()
        house.die(house.one("worker"))
        house.die(house.one("worker"), failure=Report("failed", "the memory is not free yet", EX_CONFIG))
        house.pass_time(1)
        assert house.policy.fatal_error is None and house.one("worker").worker_epochs == [3]


class TestSilence:
    @pytest.mark.parametrize("role", ["worker", "scheduler", "frontend"])
    def test_who_says_nothing_is_ended(self, role: Role) -> None:
        house = House(num_front_ends=1)
        house.become_ready()
        frozen = house.one(role)
        house.pass_time(SILENT_S - 1, silent=(frozen,))
        assert frozen.alive
        house.pass_time(2, silent=(frozen,))
        assert not frozen.alive and house.one(role)

    def test_a_start_may_take_longer(self) -> None:
        house = House()
        slow = house.one("worker")
        house.pass_time(START_S - 1, silent=(slow,))
        assert slow.alive
        house.pass_time(2, silent=(slow,))
        assert not slow.alive

    def test_next_event_is_never_late(self) -> None:
        house = House()
        house.become_ready(progress=False)
        for _ in range(3):
            house.die(house.one("worker"))
            wait = house.policy.next_event(house.now)
            assert 0 <= wait <= SILENT_S
            house.pass_time(wait + 0.001)
            house.become_ready(progress=False)


class TestScheduler:
    def test_another_one_adopts_the_workers_and_front_ends_hear_of_it(self) -> None:
        house = House(num_ranks=2, num_front_ends=1)
        house.become_ready()
        workers = house.alive("worker")
        house.die(house.one("scheduler"))
        scheduler = house.one("scheduler")
        assert (scheduler.incarnation, scheduler.worker_epoch) == (2, 2) and house.lives == [2]
        assert [worker.worker_epochs for worker in workers] == [[1, 2], [1, 2]]
        assert house.one("frontend").told == [Command("scheduler", incarnation=1), Command("scheduler", incarnation=2)]
        for worker in workers:
            house.say(worker, "joined", worker_epoch=2)
        house.pass_time(ADOPTION_S + 1)
        assert house.alive("worker") == workers
        house.become_ready()
        assert house.policy.is_ready

    def test_a_worker_that_does_not_come_is_in_a_step_for_ever(self) -> None:
        house = House(num_ranks=2)
        house.become_ready()
        workers = house.alive("worker")
        house.die(house.one("scheduler"))
        house.say(workers[0], "joined", worker_epoch=2)
        house.pass_time(ADOPTION_S + 1)
        assert not any(worker.alive for worker in workers)
        assert [worker.worker_epochs for worker in house.alive("worker")] == [[3], [3]]
        assert house.one("scheduler").worker_epochs == [3]

    def test_both_die_at_once(self) -> None:
        house = House()
        house.become_ready()
        worker, scheduler = house.one("worker"), house.one("scheduler")
        house.die(worker)
        house.die(scheduler)
        assert house.one("worker").worker_epochs == [2, 3] and house.one("scheduler").worker_epoch == 3
        house.become_ready()
        house.die(house.one("scheduler"))
        house.die(house.one("worker"))
        assert house.one("worker").worker_epochs[-1] == house.policy.worker_epoch
        house.become_ready()
        assert house.policy.is_ready

    def test_one_that_never_lives_ends_the_engine(self) -> None:
        house = House()
        house.become_ready(progress=False)
        for _ in range(MAX_DEATHS):
            house.pass_time(BACKOFF_S[-1] + 0.1)
            house.die(house.one("scheduler"))
        assert isinstance(house.policy.fatal_error, EngineError)


class TestFrontEnds:
    def test_the_scheduler_hears_whose_requests_are_nobodys(self) -> None:
        house = House(num_front_ends=2)
        house.become_ready()
        gone, stays = house.alive("frontend")
        house.die(gone)
        assert house.one("scheduler").told == [Command("front_end_exited", pid=gone.pid)]
        assert stays.alive and len(house.alive("frontend")) == 2
        assert house.alive("frontend")[1].index == gone.index

    def test_while_it_drains_they_may_end_and_the_engine_is_kept_alive(self) -> None:
        house = House(num_front_ends=2)
        house.become_ready()
        house.policy.drain()
        assert all(front_end.told[-1] == Command("drain") for front_end in house.alive("frontend"))
        house.die(house.alive("frontend")[0])
        assert len(house.alive("frontend")) == 1
        house.die(house.one("worker"))
        assert house.one("worker").worker_epochs == [2]

    def test_once_it_stops_nothing_is_started(self) -> None:
        house = House(num_front_ends=1, standby=True)
        house.become_ready()
        house.policy.stop()
        for role in ("frontend", "scheduler", "worker"):
            house.die(house.one(role))  # type: ignore[arg-type]
        house.pass_time(100)
        assert not any(process.alive for process in house.started) and house.policy.fatal_error is None

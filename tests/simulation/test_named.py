"""Scenarios that random draws do not reach: the end of an engine, and requests that kill processes."""

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from sim_run import Outcome, play
from sim_scenario import Fault, Scenario, SimRequest
from sim_world import World
from tiers import thinned

from quire.launch.supervision.supervision_policy import SupervisionPolicy

REQUESTS = tuple(SimRequest(2.6 + i / 10, f"r{i}", i, (0, 8), (i, 6), 12) for i in range(5))


def relentless(world: World) -> None:
    """Let faults continue although no token was committed since the last one."""
    world.faults.most_in_a_row = 1000


def deaths_in_a_row(kind: str) -> Outcome:
    faults = (Fault(2.62, "die_now"), *(Fault(2.65 + i * 0.2, kind) for i in range(400)))
    return play(Scenario(47, REQUESTS, faults), relentless)


@pytest.mark.parametrize(
    "kind", thinned(["die_now", "die_at_start", "die_in_prefill", "fault", "from_worker flip"], keep=2)
)
def test_engine_ends_after_five_deaths_in_a_row_and_all_clients_get_an_error(kind: str) -> None:
    outcome = deaths_in_a_row(kind)
    assert not outcome.failure and outcome.num_given_up == 1


def test_without_the_limit_workers_restart_forever() -> None:
    with (
        mock.patch.object(SupervisionPolicy, "_count_death", lambda self, role, reason: True),
        mock.patch.object(SupervisionPolicy, "_count_fatal_request", lambda self, reason: None),
    ):
        outcome = deaths_in_a_row("die_now")
    assert outcome.failure or not outcome.num_given_up


@pytest.mark.parametrize(("at", "seed"), thinned(product([-1, 0, 3], [1, 2, 3, 4, 6, 7]), keep=3))
def test_only_the_request_that_kills_workers_fails(seed: int, at: int) -> None:
    killer = SimRequest(2.75, "killer", 1, (0, 8), (77, 3), 12, poison=at)
    outcome = play(Scenario(seed, (*REQUESTS[:2], killer, *REQUESTS[2:]), ()))
    assert not outcome.failure and not outcome.num_given_up
    assert outcome.faults["poison"] >= 3


@pytest.mark.parametrize(("apart", "num_killers"), thinned(product([0.0, 0.05, 4.0], [2, 4]), keep=2))
def test_several_killers_do_not_end_an_idle_engine(num_killers: int, apart: float) -> None:
    """No request gets a token between the deaths; each killer is identified, which explains its deaths."""
    killers = (
        SimRequest(2.75 + i * apart, f"killer {i}", i, (0, 8), (77 + i, 3), 12, poison=-1) for i in range(num_killers)
    )
    outcome = play(Scenario(1, tuple(killers), ()))
    assert not outcome.failure and not outcome.num_given_up
    assert outcome.faults["poison"] >= num_killers + 2


def test_five_killers_in_a_row_end_the_engine() -> None:
    """Five killers in a row indicate a defect of the engine itself."""
    killers = (SimRequest(2.75, f"killer {i}", i, (0, 8), (77 + i, 3), 12, poison=-1) for i in range(6))
    outcome = play(Scenario(1, tuple(killers), ()))
    assert not outcome.failure and outcome.num_given_up == 1


@pytest.mark.parametrize(("at", "seed"), thinned(product([0, 3], [1, 2, 3, 4, 6, 7]), keep=2))
def test_request_that_kills_schedulers_fails_after_three_deaths(seed: int, at: int) -> None:
    """Two killers on two front ends end at the same deaths, and the engine serves later requests."""
    killers = tuple(SimRequest(2.75, f"killer {i}", i, (0, 8), (77 + i, 3), 12, bug=at) for i in range(2))
    later = replace(REQUESTS[0], at=20.0, name="later")
    outcome = play(Scenario(seed, (*REQUESTS[:2], *killers, *REQUESTS[2:], later), ()))
    assert not outcome.failure and not outcome.num_given_up
    assert outcome.faults["bug"] >= 3


@pytest.mark.parametrize("seed", thinned(range(1, 9), keep=2))
def test_scheduler_and_workers_die_at_once(seed: int) -> None:
    faults = (Fault(2.9, "die_all"), Fault(2.9, "scheduler_dies"), Fault(5.0, "clock_jump"))
    outcome = play(Scenario(seed, REQUESTS, faults))
    assert not outcome.failure and outcome.faults["scheduler_dies"] == outcome.faults["die_all"] == 1

"""A slice of the simulation: fixed seeds, every kind of fault, and not one answer that is not as it would be alone."""

from dataclasses import replace

import pytest
from sim_run import Total, play, play_seeds
from sim_scenario import KINDS, Scenario, scenario_of, shape_of, without
from sim_world import World

SLICE = range(42)
AT_LEAST = 1000


def seldom_real(world: World) -> None:
    """A step with the real runner takes four times as long: here it is in one seed of nine."""
    world.shape = replace(world.shape, real_runner=world.shape.real_runner and world.scenario.seed % 3 == 0)


@pytest.fixture(scope="module")
def total() -> Total:
    return play_seeds(SLICE, seldom_real)


def test_a_thin_slice() -> None:
    thin = play_seeds(SLICE[:9], seldom_real)
    assert not thin.failures and thin.num_faults > 100


@pytest.mark.full
def test_nothing_that_must_not_be_is_seen(total: Total) -> None:
    assert not total.failures


@pytest.mark.full
def test_there_were_many_faults(total: Total) -> None:
    assert total.num_faults >= AT_LEAST
    assert total.num_requests > 1000 and total.num_tokens > 3000


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_happened(total: Total, kind: str) -> None:
    assert total.faults[kind] > 0


def test_some_have_the_real_runner() -> None:
    assert any(shape_of(seed).real_runner for seed in SLICE if seed % 3 == 0)


def test_the_same_seed_is_the_same_run() -> None:
    first, second = play(scenario_of(3)), play(scenario_of(3))
    assert first == second and first.num_tokens > 0


def test_a_scenario_can_be_pasted() -> None:
    scenario = without(without(scenario_of(3), "asks", range(4, 100)), "faults", range(4, 100))
    text = scenario.paste()
    assert len(scenario.asks) == len(scenario.faults) == 4 and text.startswith("Scenario(")
    assert all(f"{part!r}," in text for part in (*scenario.asks, *scenario.faults))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_400, 50))
def test_more_of_it(first: int) -> None:
    assert not play_seeds(range(first, first + 50)).failures


def test_an_undisturbed_run_loses_nobody() -> None:
    scenario = scenario_of(5)
    outcome = play(Scenario(5, tuple(ask for ask in scenario.asks if ask.poison is None), ()))
    assert not outcome.failure and not outcome.faults and outcome.num_tokens > 0

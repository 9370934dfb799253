"""The mutation table: the simulation fails without any one of the engine's guards."""

from functools import cache

import pytest
from mutations import MUTATIONS, Mutation
from sim_run import play
from sim_scenario import scenario_of
from sim_world import World
from tiers import thinned

MOST_SEEDS = 120


def without_replays(world: World) -> None:
    world.has_replays = False


@cache
def is_sound(seed: int) -> bool:
    """Whether the seed passes with all guards, so that a failure is caused by the mutation."""
    return not play(scenario_of(seed), without_replays).failure


@pytest.mark.parametrize("mutation", thinned(MUTATIONS, keep=3), ids=lambda mutation: mutation.name)
def test_simulation_fails_without_guard(mutation: Mutation) -> None:
    """Tries the known seed, then the first seeds, in case other scenarios are drawn by now."""
    for seed in (mutation.seed, *range(MOST_SEEDS)):
        with mutation.patch():
            noticed = bool(play(scenario_of(seed), without_replays).failure)
        if noticed and is_sound(seed):
            return
    raise AssertionError("no seed fails without this guard")

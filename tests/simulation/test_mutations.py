"""The mutation table: without any one of the engine's guards, the simulation fails."""

from functools import cache

import pytest
from mutations import MUTATIONS, Mutation
from sim_run import play
from sim_scenario import scenario_of
from tiers import thinned

MOST_SEEDS = 120


@cache
def is_sound(seed: int) -> bool:
    """With all guards nothing fails there: what fails is the mutation's doing."""
    return not play(scenario_of(seed)).failure


@pytest.mark.parametrize("mutation", thinned(MUTATIONS, keep=5), ids=lambda mutation: mutation.name)
def test_without_this_guard_it_fails(mutation: Mutation) -> None:
    """At the seed that is known to, or else at one of the first, should other things be drawn by now."""
    for seed in (mutation.seed, *range(MOST_SEEDS)):
        with mutation.patch():
            noticed = bool(play(scenario_of(seed)).failure)
        if noticed and is_sound(seed):
            return
    raise AssertionError("nobody notices")

"""A slice of the simulation: fixed seeds and every kind of fault, with every answer as in an undisturbed engine."""

from dataclasses import replace

import pytest
from sim_cells import CELLS, EVENTS
from sim_run import Total, play, play_seeds, sessions_of
from sim_scenario import KINDS, TABLE_SEEDS, scenario_of, shape_of, without
from sim_world import World

from quire.frontend.sessions.open_session import Piece

SLICE = range(42)
THIN = (1, 4, 8, 12, 13, 14, 21)
"""Small ones, with what only some seeds have: beams, adapters, pooling, programs, forks, disks, the real runner."""
AT_LEAST = 1000


def seldom_real(world: World) -> None:
    """Use the real runner in one seed of nine, since its steps take four times as long."""
    world.shape = replace(world.shape, real_runner=world.shape.real_runner and world.scenario.seed % 3 == 1)


@pytest.fixture(scope="module")
def total() -> Total:
    return play_seeds(SLICE, seldom_real)


def without_replays(world: World) -> None:
    seldom_real(world)
    world.has_replays = False


def test_thin_slice_has_no_failures() -> None:
    thin = play_seeds(THIN, seldom_real)
    assert not thin.failures and thin.num_faults > 100


@pytest.mark.full
def test_slice_has_no_failures(total: Total) -> None:
    assert not total.failures


@pytest.mark.full
def test_slice_has_many_faults(total: Total) -> None:
    assert total.num_faults >= AT_LEAST
    assert total.num_requests > 1000 and total.num_tokens > 3000
    assert total.num_forks > 50 and total.num_copies > 25 and total.num_orphans > 10


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_slice_has_every_kind_of_fault(total: Total, kind: str) -> None:
    assert total.faults[kind] > 0


@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(3, 40), marks=pytest.mark.full)], ids=str)
def test_pieces_of_sessions_get_the_answers_of_fresh_requests(seeds: range) -> None:
    played = play_seeds(seeds, without_replays, sessions_of)
    assert not played.failures and played.num_pieces > 3 * len(seeds)


def test_the_slice_finds_sessions_that_lose_their_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(piece: Piece, token_ids: list[int], finish_reason: str | None) -> None:
        whole_add(piece, token_ids[:-1], finish_reason)

    whole_add = Piece.add
    monkeypatch.setattr(Piece, "add", add)
    assert play_seeds(range(1, 2), without_replays, sessions_of).failures


def test_some_seeds_have_the_real_runner() -> None:
    assert any(shape_of(seed).real_runner for seed in SLICE if seed % 3 == 1)


def test_some_seeds_have_a_disk_alone_and_behind_host_memory() -> None:
    seeds = [seed for seed in SLICE if scenario_of(seed).disk]
    sizes = [shape_of(seed, disk=True).settings["cpu_offload_bytes"] for seed in seeds]
    assert 0 in sizes and any(sizes)


def test_same_seed_gives_same_run() -> None:
    first, second = play(scenario_of(12)), play(scenario_of(12))
    assert first == second and first.num_tokens > 0


def test_paste_has_all_requests_and_faults() -> None:
    scenario = without(without(scenario_of(3), "requests", range(4, 1000)), "faults", range(4, 1000))
    text = scenario.paste()
    assert len(scenario.requests) == len(scenario.faults) == 4 and text.startswith("Scenario(")
    assert all(f"{part!r}," in text for part in (*scenario.requests, *scenario.faults))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_400, 50))
def test_more_seeds(first: int) -> None:
    assert not play_seeds(range(first, first + 50)).failures


NUM_COMBINATIONS = len(CELLS) // len(EVENTS)


def seeds_of_table(numbers: range) -> list[int]:
    return [17 * number + TABLE_SEEDS[0] for number in numbers]


def test_seeds_take_all_combinations_of_caches_and_settings_in_turn() -> None:
    """Of kind of cache, prefix cache, chunks and drafts."""
    shapes = [shape_of(seed).settings for seed in seeds_of_table(range(NUM_COMBINATIONS))]
    names = ("enable_prefix_caching", "max_num_batched_tokens", "num_speculative_tokens")
    kinds = [(bool(s["layout"].states), *sorted({group.kind for group in s["layout"].groups})) for s in shapes]
    assert len({(kind, *(s[name] for name in names)) for kind, s in zip(kinds, shapes, strict=True)}) == len(shapes)


@pytest.mark.parametrize(
    "numbers, least",
    [
        pytest.param(range(6), 15, marks=pytest.mark.full),
        pytest.param(range(2 * NUM_COMBINATIONS), len(CELLS), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_each_combination_meets_preemptions_forks_and_lost_workers(numbers: range, least: int) -> None:
    played = play_seeds(seeds_of_table(numbers), without_replays)
    assert not played.failures and len(played.cells) >= least, sorted(CELLS - played.cells)


def test_run_without_faults_loses_no_request() -> None:
    scenario = scenario_of(14)
    requests = tuple(request for request in scenario.requests if request.poison is None)
    outcome = play(replace(scenario, requests=requests, faults=()), without_replays)
    assert not outcome.failure and not outcome.faults and outcome.num_tokens > 0

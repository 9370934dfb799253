"""Random events with LoRA adapters: every answer is right, steady decode changes nothing, and runs are replayed."""

import random
from typing import Any

import pytest
from fake_adapters import adapter_ref
from keyframed_runs import keyframe_of, tails
from lines_in_memory import numbered, record_log
from log_replay import replay
from scheduler_driver import Driver
from scheduler_load import NUM_ADAPTERS, Load, adapter_settings, random_settings
from scheduler_long_run import long_run
from tiers import thinned

from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.trace.lines import Keyframe, decode_line, encode_line

SEEDS = range(12)


def settings_of(seed: int, rng: random.Random) -> dict[str, Any]:
    return random_settings(rng, hybrid=seed % 3 == 0, drafts=seed % 4 > 0) | adapter_settings(rng)


@pytest.mark.parametrize("seed", thinned(SEEDS, keep=3))
def test_steady_decode_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    settings = settings_of(seed, rng)
    plain = Driver(steady_decode=False, **settings)
    plain.scheduler.planner.admission_obstacle = plain.scheduler.planner.admit  # type: ignore[method-assign]
    load = Load(rng, Driver(**settings), plain)
    while len(load.driver.diffs) < 100:
        load.random_event()
    load.drain()
    load.check_answers()
    assert load.drivers[0].answers == load.drivers[1].answers
    assert load.drivers[0].scheduler.statistics() == load.drivers[1].scheduler.statistics()


@pytest.mark.parametrize("seed", thinned(SEEDS, keep=2))
def test_replay_repeats_all_decisions(seed: int) -> None:
    rng = random.Random(seed)
    load = Load(rng, Driver(**settings_of(seed, rng)))
    load.fixed_budget = True
    while len(load.driver.diffs) < 150:
        load.random_event()
    load.drain()
    load.check_answers()
    assert load.driver.replay_lines() is None
    assert replay(load.driver.header, list(load.driver.log)) is None


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_replay_from_a_keyframe_repeats_all_decisions(seed: int, max_loras: int) -> None:
    rng = random.Random(seed)
    driver = Driver(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras + 2, num_blocks=60)

    def burst(name: str) -> None:
        for index in range(12):
            adapter = adapter_ref(f"{rng.randrange(NUM_ADAPTERS)}")
            driver.add(f"{name} {index}", [rng.randrange(9)] * 9, max_tokens=rng.randrange(1, 30), adapter=adapter)
            driver.step(rng.randrange(4))
        driver.run()

    burst("before")
    assert driver.scheduler.adapters.slots.known
    keyframe_of(driver)
    burst("after")
    (tail,) = tails(driver)
    assert replay(driver.header, tail, check=True) is None
    lines = [decode_line(encode_line(line)) for line in record_log(driver.header, tail)]
    assert isinstance(lines[1], Keyframe)
    refs = [table for table in lines[1].snapshot.tables if table.name.endswith("AdapterRef")]
    paths = {path for table in refs for path in table.columns[table.fields.index("path")].values}
    assert paths == {""}, "a trace has no folders"
    assert replay_lines(numbered(lines), check=True) is None


@pytest.mark.full
def test_random_events_reach_all_cases() -> None:
    totals = long_run(seed=1, steps=3000, adapters=True)
    assert totals["found"] == ""
    least = {"preemptions": 20, "epochs": 50, "adapter_loads": 100, "adapter_failures": 4, "hit_tokens": 100}
    assert {name: totals[name] for name in least if totals[name] < least[name]} == {}

"""Random events with LoRA adapters: every answer is right, steady decode changes nothing, and runs are replayed."""

import random
from typing import Any

import pytest
from fake_adapters import adapter_ref
from keyframed_runs import keyframe_of
from lines_in_memory import numbered, record_log
from log_replay import replay
from scheduler_driver import Driver
from scheduler_load import NUM_ADAPTERS, Load, adapter_settings, random_settings
from scheduler_long_run import long_run
from tiers import thinned

from quire.launch.replay.recorded.exact import replay_lines
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.scheduler_proc.trace.event_log import RecordKind
from quire.scheduler_proc.trace.keyframe import AdaptersState, decode_state, idle_state, restore
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
    state = keyframe_of(driver)
    assert state.adapters is not None and state.adapters.places
    burst("after")
    records = list(driver.log)
    tail = records[next(at for at, record in enumerate(records) if record.kind == RecordKind.KEYFRAME) :]
    assert replay(driver.header, tail, check=True) is None
    lines = [decode_line(encode_line(line)) for line in record_log(driver.header, tail)]
    keyframe = lines[1]
    assert isinstance(keyframe, Keyframe) and keyframe.state.adapters is not None
    assert not any(ref.path for _, ref, _, _ in keyframe.state.adapters.places), "a trace has no folders"
    assert replay_lines(numbered(lines), check=True) is None
    again = driver.header.make_scheduler()
    restore(again, decode_state(tail[0].frames[0]))
    again.check()
    assert idle_state(again) == state


PLACE = AdapterRef("a", bytes(32), "")
OTHER = AdapterRef("b", bytes([1]) * 32, "")


@pytest.mark.parametrize(
    "state",
    [
        AdaptersState(last_number=1, places=[(2, PLACE, 0, 0)]),
        AdaptersState(last_number=2, places=[(1, PLACE, 9, 0)]),
        AdaptersState(last_number=2, places=[(1, PLACE, 0, 0), (2, OTHER, 0, 0)]),
        AdaptersState(last_number=2, places=[(1, PLACE, 0, 0), (1, OTHER, 1, 0)]),
        AdaptersState(last_number=2, places=[(1, PLACE, 0, 0)], dropped=[1]),
        AdaptersState(last_number=9, places=[(i, AdapterRef("c", bytes([i]) * 32, ""), -1, 0) for i in range(1, 6)]),
    ],
)
def test_impossible_keyframe_is_refused(state: AdaptersState) -> None:
    driver = Driver(enable_lora=True, max_loras=2, max_cpu_loras=4)
    with pytest.raises(ValueError, match="adapter"):
        driver.scheduler.adapters.slots.restore(state.last_number, state.places, state.dropped)


@pytest.mark.full
def test_random_events_reach_all_cases() -> None:
    totals = long_run(seed=1, steps=3000, adapters=True)
    assert totals["found"] == ""
    least = {"preemptions": 20, "epochs": 50, "adapter_loads": 100, "adapter_failures": 4, "hit_tokens": 100}
    assert {name: totals[name] for name in least if totals[name] < least[name]} == {}

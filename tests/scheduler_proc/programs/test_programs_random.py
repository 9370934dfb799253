"""Random events with programs: every answer is right, steady decode changes nothing, and runs are replayed."""

import random
from typing import Any

import pytest
from keyframed_runs import keyframe_of, tails
from lines_in_memory import numbered, record_log
from log_replay import replay
from scheduler_driver import Driver
from scheduler_load import Load, program_settings, random_settings
from tiers import thinned

from quire.protocol.wire.front_end_messages import CallsTool
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.trace.lines import decode_line, encode_line

SEEDS = range(24)


def settings_of(seed: int, rng: random.Random) -> dict[str, Any]:
    return random_settings(rng, hybrid=seed % 3 == 0, drafts=seed % 4 > 2) | program_settings(rng)


@pytest.mark.parametrize("seed", thinned(SEEDS, keep=3))
def test_steady_decode_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    settings = settings_of(seed, rng)
    plain = Driver(steady_decode=False, **settings)
    plain.scheduler.planner.admission_obstacle = plain.scheduler.planner.admit  # type: ignore[method-assign]
    load = Load(rng, Driver(**settings), plain)
    while len(load.driver.diffs) < 120:
        load.random_event()
    load.drain()
    load.check_answers()
    assert load.drivers[0].answers == load.drivers[1].answers
    assert load.drivers[0].scheduler.statistics() == load.drivers[1].scheduler.statistics()


@pytest.mark.parametrize("num_tenants", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", thinned(SEEDS, keep=3))
def test_replay_repeats_all_decisions(seed: int, num_tenants: int) -> None:
    rng = random.Random(seed)
    load = Load(rng, Driver(**settings_of(seed, rng), num_tenants=num_tenants))
    load.fixed_budget, load.num_tenants = True, num_tenants
    while len(load.driver.diffs) < 150:
        load.random_event()
    load.drain()
    load.check_answers()
    assert load.driver.replay_lines() is None
    assert replay(load.driver.header, list(load.driver.log)) is None


@pytest.mark.parametrize("policy", ["program", "continuum"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_from_a_keyframe_repeats_all_decisions(seed: int, policy: str) -> None:
    """Jobs, programs that are found by their prefix, pauses and admitted programs continue behind a keyframe."""
    rng = random.Random(seed)
    driver = Driver(33, scheduling_policy=policy, async_scheduling=True)
    driver.worker.step_seconds = lambda tokens, drafts: 1.0 + tokens / 8
    contexts: dict[str, list[int]] = {}
    now = 0.0

    def burst(name: str) -> None:
        nonlocal now
        for index in range(20):
            now += rng.choice((0.05, 2.0, 30.0, 400.0))
            driver.consume(Clock(now))
            job = rng.choice("abcdef")
            context = contexts.setdefault(job, [])
            context += [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
            if len(context) > 80:
                context[:] = context[:9]
            hint = {"job_id": job} if job in "abc" else {}
            driver.add(f"{name} {index}", list(context), max_tokens=rng.randrange(1, 9), **hint)
            driver.step(rng.randrange(4))
            if rng.random() < 0.5:
                driver.consume(CallsTool(f"{name} {index}", rng.choice(("grep", "make"))))
        driver.run()

    burst("before")
    assert len(driver.scheduler.programs.known) >= 3
    keyframe_of(driver)
    burst("after")
    (tail,) = tails(driver)
    assert replay(driver.header, tail, check=True) is None
    lines = [decode_line(encode_line(line)) for line in record_log(driver.header, tail)]
    assert replay_lines(numbered(lines), check=True) is None

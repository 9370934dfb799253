"""A replay from a keyframe repeats all decisions of engines with adapters and with programs."""

import random

import pytest
from fake_adapters import adapter_ref
from keyframed_runs import keyframe_of, tails
from lines_in_memory import numbered, record_log
from log_replay import replay
from scheduler_driver import Driver
from tiers import thinned

from quire.protocol.wire.front_end_messages import CallsTool
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.trace.lines import Keyframe, decode_line, encode_line


def replay_tail(driver: Driver) -> Keyframe:
    """Replay the event log, and the trace made of it, from the only keyframe on, and return it."""
    (tail,) = tails(driver)
    assert replay(driver.header, tail, check=True) is None
    lines = [decode_line(encode_line(line)) for line in record_log(driver.header, tail)]
    assert replay_lines(numbered(lines), check=True) is None
    assert isinstance(lines[1], Keyframe)
    return lines[1]


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("seed", thinned(range(3), keep=1))
def test_adapters(seed: int, max_loras: int) -> None:
    rng = random.Random(seed)
    driver = Driver(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras + 2, num_blocks=60)

    def burst(name: str) -> None:
        for index in range(12):
            adapter = adapter_ref(f"{rng.randrange(7)}")
            driver.add(f"{name} {index}", [rng.randrange(9)] * 9, max_tokens=rng.randrange(1, 30), adapter=adapter)
            driver.step(rng.randrange(4))
        driver.run()

    burst("before")
    assert driver.scheduler.adapters.slots.known
    keyframe_of(driver)
    burst("after")
    refs = [table for table in replay_tail(driver).snapshot.tables if table.name.endswith("AdapterRef")]
    paths = {path for table in refs for path in table.columns[table.fields.index("path")].values}
    assert paths == {""}, "a trace has no folders"


@pytest.mark.parametrize("policy", ["program", "continuum"])
@pytest.mark.parametrize("seed", thinned(range(3), keep=1))
def test_programs(seed: int, policy: str) -> None:
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
    replay_tail(driver)

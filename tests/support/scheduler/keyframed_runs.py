"""Runs of a Scheduler whose event log has keyframes."""

import random
from pathlib import Path

from scheduler_driver import Driver

from quire.scheduler_proc.trace.dump import Dump, write_dump
from quire.scheduler_proc.trace.event_log import EventLog, Record, RecordKind


def keyframe_of(driver: Driver) -> None:
    """Record a keyframe in the event log."""
    driver.log.keyframe(0.0, driver.scheduler)


def tails(driver: Driver) -> list[list[Record]]:
    """Return the event log from each keyframe on."""
    records = list(driver.log)
    return [records[at:] for at, record in enumerate(records) if record.kind == RecordKind.KEYFRAME]


def long_lived(max_bytes: int, bursts: int = 40) -> Driver:
    """A run with a small event log. It becomes idle after each burst except the last, in which it stops."""
    rng = random.Random(5)
    driver = Driver(num_blocks=24, async_scheduling=True, max_num_seqs=4)
    driver.log = EventLog(max_bytes)
    driver.worker.step_seconds = lambda tokens, drafts: 0.25 + tokens / 64
    prefix = list(range(9))
    for burst in range(bursts):
        driver.run()
        if driver.log.is_keyframe_due(idle=True):
            keyframe_of(driver)
        for index in range(6):
            driver.add(f"{burst}-{index}", [*prefix[: rng.randrange(10)], rng.randrange(99)], max_tokens=9)
    driver.step(5)
    return driver


def dump_of(driver: Driver, folder: Path) -> Path:
    dump = Dump(driver.header, driver.log.readable(), driver.log.complete, 9.0, "it broke")
    path = write_dump(folder, 1, dump)
    assert path is not None
    return path

"""Random runs of a Scheduler that contain everything a trace can record, and their traces as bytes."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from lines_in_memory import record_log
from scheduler_driver import Driver, expected_tokens

from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.trace.lines import Line, encode_line

STEP_SECONDS = 0.001


def random_run(seed: int, events: int = 40, **settings: Any) -> Driver:
    """Run with several clients, small pools, priorities, drafts, grammars, aborts, failures, and new worker epochs with
    half the token budget. ``settings`` replace random ones; the time is an event if a policy needs it."""
    rng = random.Random(seed)
    driver = Driver(**_settings(rng) | settings)
    driver.worker.step_seconds = lambda tokens, drafts: 1.0 + 0.1 * tokens
    driver.worker.draft_quality = 0.6
    prefix = [rng.randrange(1000) for _ in range(9)]
    for index in range(events):
        if driver.config.uses_programs:
            driver.consume(Clock(index * 20.0))
        _arrive(driver, rng, f"r{index}", prefix)
        for _ in range(rng.randrange(2, 20)):
            driver.random_step(rng)
        _something(driver, rng)
    for client, request_id in list(driver.scheduler.table.requests):
        driver.release(request_id, client)
    driver.run()
    return driver


def _settings(rng: random.Random) -> dict[str, Any]:
    num_drafts = rng.choice((0, 0, 3))
    return {
        "num_blocks": rng.choice((9, 12, 20)),
        "max_model_len": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": rng.choice((16, 40)),
        "num_speculative_tokens": num_drafts,
        "adaptive": True,
        "async_scheduling": rng.random() < 0.8,
        "enable_prefix_caching": rng.random() < 0.9,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "eos": list(range(0, 1000, 40)),
    }


def _arrive(driver: Driver, rng: random.Random, name: str, prefix: list[int]) -> None:
    prompt = (prefix if rng.random() < 0.6 else []) + [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
    delivered = expected_tokens(prompt, rng.randrange(1, 5)) if rng.random() < 0.1 else None
    grammar = StructuredOutputs(regex="a*") if rng.random() < 0.15 else None
    if rng.random() < 0.1:
        driver.worker.bad_from[name] = rng.randrange(4)
    client = rng.randrange(3)
    driver.add(
        name,
        prompt if rng.random() < 0.95 else [],
        delivered,
        client=client,
        max_tokens=rng.randrange(1, 24),
        priority=rng.randrange(3),
        structured_outputs=grammar,
    )
    if grammar is not None and rng.random() < 0.6:
        driver.hold(name, client=client)


def _something(driver: Driver, rng: random.Random) -> None:
    """Do any possible event except an arrival, or none."""
    live = list(driver.scheduler.table.requests)
    draw = rng.random()
    if draw < 0.06:
        if rng.random() < 0.5 and driver.scheduler.halve_token_budget():
            driver.log.token_budget_halved(0.0)
        driver.begin_worker_epoch()
    elif draw < 0.1:
        driver.control(rng.choice(("reset_prefix_cache", "statistics", "pause")))
        driver.control("resume")
    elif draw < 0.14:
        driver.drop_client(rng.randrange(3))
    elif live:
        client, victim = rng.choice(live)
        if draw < 0.22:
            driver.abort(victim, client=client)
        elif draw < 0.28:
            driver.stop(victim, 1, client)
        elif draw < 0.32:
            driver.fail(victim, client)
        elif draw < 0.5:
            driver.release(victim, client)
        elif draw < 0.53:
            driver.refuse(victim, client)


def traced(driver: Driver) -> list[Line]:
    """Return the lines of the run, one millisecond apart: the driver has no clock."""
    lines: list[Line] = []
    for number, line in enumerate(record_log(driver.header, driver.log)):
        fields: dict[str, float] = {}
        if "now" in line.__struct_fields__:
            fields["now"] = 100.0 + number * STEP_SECONDS
        learns = driver.config.num_speculative_tokens or driver.scheduler.kv.tiers
        if "seconds" in line.__struct_fields__ and not learns:
            fields["seconds"] = STEP_SECONDS  # otherwise decisions depend on it
        lines.append(msgspec.structs.replace(line, **fields))
    return lines


def encoded(lines: Iterable[Line]) -> list[bytes]:
    return [encode_line(msgspec.structs.replace(line, crc=None)) for line in lines]


def write_trace(path: Path, lines: Iterable[Line]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in encoded(lines)))
    return path

"""Engines whose host memory has a prefix that their device does not have, with known costs of loads and prefills."""

from typing import Any

from scheduler_driver import Driver

from quire.scheduler_proc.costs.costs import Costs, CostState, Prefill
from quire.scheduler_proc.features.transfers import SPLIT_AT

PROMPT = list(range(1, 102))
FOUND, FRONT = 100, 48


def learned(per_page: float, per_token: float = 0.001) -> CostState:
    """Return costs that were learned from steps and loads with these durations. A page has 4 tokens."""
    costs = Costs()
    for count in (4, 8, 16, 16, 40, 64):
        costs.step_took(Prefill.between(0, count), 0, count * per_token)
        costs.load_took("host", count, count * per_page)
    return costs.state


def engine_with_prefix(per_page: float, **settings: Any) -> Driver:
    """Return an engine whose host memory has most of PROMPT, and its device no part of it."""
    settings = {"num_host_pages": 129, "max_num_batched_tokens": 16, "costs": learned(per_page)} | settings
    engine = Driver(40, **settings)
    engine.add("first", PROMPT, max_tokens=4)
    engine.run()
    for i in range(8):
        engine.add(f"other {i}", [200 + i] * 30, max_tokens=4)
        engine.run()
    return engine


def split(**settings: Any) -> Driver:
    """Return an engine with a request that computes the front of its prefix while the back is loaded."""
    engine = engine_with_prefix(4e-3, **settings)
    engine.add("again", PROMPT, max_tokens=4)
    engine.schedule()
    request = engine.request("again")
    assert SPLIT_AT.of(request) == FRONT and request in engine.scheduler.table.running.values()
    return engine


def compute_front(engine: Driver) -> None:
    """Run steps until the request has computed its front; the load does not run."""
    for _ in range(20):
        if engine.scheduler.decisions.preemptions["joins_load"]:
            return
        engine.schedule()
        engine.execute()
        for index in [at for at, move in enumerate(engine.worker.host.pending) if not move.is_load][:1]:
            engine.move(index)
        engine.deliver()
    raise AssertionError("the front was not computed")

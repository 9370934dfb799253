"""The simulator: fast-forward, single calls against a simple model, and rejections."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_workloads import AffineCost, random_calls, random_config
from scheduler_driver import make_config, make_layout

from quire.protocol.config import EngineConfig
from quire.replay.core.policies import Policies
from quire.replay.core.scheduler import ReplayScheduler
from quire.replay.costs.copies import NO_TIERS, CopyRates, Tiers
from quire.replay.costs.cost import ConstantCost
from quire.replay.report.summary import summary
from quire.replay.run.run_record import RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import ClosedLoop, Concurrency, OpenLoop, Source
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, ContentIds, block_names


def simulate(
    config: EngineConfig, num_blocks: int, source: Source, *, fast_forward: bool = True, **more: Any
) -> tuple[RunRecord, Simulator]:
    """``more``: fields of Setup."""
    setup = Setup(config, make_layout(config), num_blocks, **more)
    simulator = Simulator(setup, AffineCost(), source, RunRecord(), fast_forward=fast_forward)
    return simulator.run(), simulator


def comparable(record: RunRecord) -> dict[str, Any]:
    """Return a record's content without the duration of the simulation."""
    content: dict[str, Any] = msgspec.to_builtins(
        {name: getattr(record, name) for name in ("itl", "virtual_s", "preemptions_by_reason", "num_evicted_blocks")}
    )
    content["requests"] = [[getattr(run, name) for name in type(run).__slots__] for run in record.requests]
    content["tiers"] = record.tiers
    content["steps"] = {name: list(getattr(record.steps, name)) for name in type(record.steps).__slots__}
    return content


SOURCES = {"open": OpenLoop, "closed": ClosedLoop, "concurrency": lambda calls: Concurrency(calls, 3)}


@pytest.mark.full
@given(seed=st.integers(0, 2**32), pace=st.sampled_from(sorted(SOURCES)))
@settings(max_examples=40)
def test_fast_forward_equals_single_steps(seed: int, pace: str) -> None:
    rng = random.Random(seed)
    calls, config, num_blocks = random_calls(rng, rng.randrange(1, 14)), random_config(rng), rng.randrange(8, 60)
    tiers = NO_TIERS
    if rng.random() < 0.5:  # more calls and small blocks, so that some blocks are loaded
        calls, num_blocks = random_calls(rng, rng.randrange(1, 40)), rng.randrange(16, 40)
        config = random_config(rng, block_size=rng.choice((2, 4)), enable_prefix_caching=True)
        rates = CopyRates(rng.choice((1e3, 1e5)), host_seconds=rng.choice((1e-4, 0.3, 6.0)), disk_seconds=0.1)
        tiers = Tiers(rng.choice((0, 5, 60)), 1000, rates, rng.choice((0, 40)))
    if rng.random() < 0.4:  # the time matters: blocks are kept while tools run
        config = random_config(rng, scheduling_policy="continuum", enable_prefix_caching=True)
    stretches: list[int] = []

    with pytest.MonkeyPatch.context() as patch:
        forward = ReplayScheduler.fast_forward

        def checked(self: ReplayScheduler, count: int, now: float) -> None:
            assert 0 < count <= self.num_quiet_steps
            forward(self, count, now)
            self.check()
            stretches.append(count)

        patch.setattr(ReplayScheduler, "fast_forward", checked)
        fast, one = simulate(config, num_blocks, SOURCES[pace](calls), tiers=tiers)
        num_stretches = len(stretches)
        slow, other = simulate(config, num_blocks, SOURCES[pace](calls), tiers=tiers, fast_forward=False)
    assert len(stretches) == num_stretches
    assert comparable(fast) == comparable(slow)
    assert one.scheduler.statistics() == other.scheduler.statistics()
    one.scheduler.check()
    assert [run.request_id for run in fast.requests] == [run.request_id for run in slow.requests]


def test_a_closed_loop_learns_the_pauses_of_tools() -> None:
    config = make_config(block_size=16, max_model_len=1024, scheduling_policy="continuum", max_num_batched_tokens=1024)
    calls = []
    for job, tool, pause in (("a", "grep", 0.5), ("b", "build", 9.0)):
        for turn in range(12):
            content = ContentIds(range(40), 16, len(job))
            after = len(calls) - 1 if turn else None
            prompt = 64 + 32 * turn
            calls.append(Call(len(calls), f"{job}{turn}", 0.0, prompt, 4, content, job, after, pause, tool=tool))
    record, simulator = simulate(config, 9000, ClosedLoop(calls))
    seconds = summary(record)["pins"]["seconds"]
    assert 0.5 <= seconds["grep"] <= 0.8 and 9.0 <= seconds["build"] <= 13.0
    assert record.pins["ended"]["return"] >= 20 and not record.pins["failures"]
    simulator.scheduler.check()


def test_arrival_ends_a_fast_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches: list[int] = []
    forward = ReplayScheduler.fast_forward

    def counted(self: ReplayScheduler, count: int, now: float) -> None:
        stretches.append(count)
        forward(self, count, now)

    monkeypatch.setattr(ReplayScheduler, "fast_forward", counted)
    config = make_config(block_size=16, max_model_len=1024, async_scheduling=True)
    calls = [Call(0, "long", 0.0, 3, 600), Call(1, "late", 1.003, 3, 2)]
    source = OpenLoop(calls)
    record = Simulator(Setup(config, make_layout(config), 100), ConstantCost(10), source, RunRecord()).run()
    assert sum(stretches) > 400
    late = record.requests[1]
    assert late.arrival == 1.003
    assert late.scheduled == 1.003 or late.scheduled == pytest.approx(1.01)  # the pipeline has room
    assert late.end - late.arrival < 0.06
    assert len(record.steps) >= 600
    assert (sum(record.steps.prefill_tokens), sum(record.steps.decode_tokens)) == (6, 599 + 1)
    assert {h + c + f for h, c, f in zip(record.steps.held, record.steps.cached, record.steps.free, strict=True)} == {
        100
    }


# ---- one call at a time, computed without a scheduler


class SimpleEngine:
    """A model of one call at a time in a pool of blocks: its hits and the times of its steps."""

    def __init__(self, config: EngineConfig, num_blocks: int, *, uncached_first: bool) -> None:
        self.config = config
        self.uncached_first = uncached_first
        self.free: list[bytes | None] = [None] * num_blocks
        self.now = 0.0

    def run(self, call: Call) -> tuple[int, float, float]:
        """Return (cached tokens, time of the first token, time of the last)."""
        size, total = self.config.block_size, call.num_prompt_tokens + call.num_output_tokens
        raw = block_names(call, size)
        names = [raw[at : at + SHORT_HASH_BYTES] for at in range(0, len(raw), SHORT_HASH_BYTES)]
        hits = 0
        if self.config.enable_prefix_caching:
            while hits < (call.num_prompt_tokens - 1) // size and names[hits] in self.free:
                self.free.remove(names[hits])
                hits += 1
        needed = -(-(total - 1) // size)
        kept: list[bytes | None] = [*names[:hits]]
        for at in range(hits, needed):
            self.free.pop(0)
            full = self.config.enable_prefix_caching and (at + 1) * size <= total - 1
            kept.append(names[at] if full else None)
        first = self._steps(call, hits * size)
        loose = [name for name in kept if name is None and self.uncached_first]
        self.free = loose + self.free + [name for name in reversed(kept) if name is not None or not loose]
        return hits * size, first, self.now

    def _steps(self, call: Call, computed: int) -> float:
        chunk = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
        chunk = min(chunk, self.config.max_num_batched_tokens)
        while computed < call.num_prompt_tokens:
            count = min(chunk, call.num_prompt_tokens - computed)
            prefills, context = ([(count, computed)], 0) if count > 1 else ([], computed + 1)
            samples = int(computed + count == call.num_prompt_tokens)
            self.now += AffineCost().seconds(StepShape(prefills, int(count == 1), context, samples))
            computed += count
        first = self.now
        for context in range(computed + 1, computed + call.num_output_tokens):
            self.now += AffineCost().seconds(StepShape([], 1, context, 1))
        return first


@pytest.mark.full
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_single_request_takes_the_sum_of_its_steps(seed: int) -> None:
    rng = random.Random(seed)
    calls = random_calls(rng, rng.randrange(1, 16))
    config = random_config(rng, async_scheduling=rng.random() < 0.5, max_num_queued_reqs=0)
    num_blocks = -(-120 // config.block_size) + rng.randrange(30)
    policies = Policies(uncached_blocks_first=rng.random() < 0.7)
    record, _ = simulate(config, num_blocks, Concurrency(calls, 1), policies=policies)
    plain = SimpleEngine(config, num_blocks, uncached_first=policies.uncached_blocks_first)
    for call, run in zip(calls, record.requests, strict=True):
        cached, first, end = plain.run(call)
        assert (run.request_id, run.finish, run.num_output_tokens) == (
            call.request_id,
            "length",
            call.num_output_tokens,
        )
        assert run.num_cached_tokens == cached
        assert run.first_token == pytest.approx(first, abs=1e-9)
        assert run.end == pytest.approx(end, abs=1e-9)
    content = sum(count for _, count in record.itl)
    assert content == sum(call.num_output_tokens - 1 for call in calls)


# ---- rejections and gaps between tokens


def test_next_turn_arrives_after_rejected_one() -> None:
    config = make_config(max_model_len=64, async_scheduling=True)
    calls = [
        Call(0, "too long", 0.0, 60, 10),
        Call(1, "too many blocks", 0.0, 30, 30, after=0, pause=1.0),
        Call(2, "fits", 0.0, 5, 5, after=1, pause=1.0),
    ]
    record, _ = simulate(config, 10, ClosedLoop(calls))
    long, large, fits = record.requests
    assert (long.finish, large.finish, fits.finish) == ("rejected", "rejected", "length")
    assert "exceed max_model_len 64" in long.finish_detail
    assert "15 KV blocks; the pool has 10" in large.finish_detail
    assert (long.num_cached_tokens, large.scheduled) == (0, -1.0)
    assert (large.arrival, fits.arrival) == (1.0, 2.0)


def test_full_queue_rejects_only_the_excess() -> None:
    config = make_config(max_num_queued_reqs=1, max_num_seqs=1, max_num_batched_tokens=64)
    calls = [Call(i, f"{i}", 0.0, 4, 4) for i in range(4)]
    record, _ = simulate(config, 32, Concurrency(calls, 4))
    finishes = [run.finish for run in record.requests]
    assert sorted(finishes) == ["length", "rejected", "rejected", "rejected"]
    assert all("wait already" in run.finish_detail for run in record.requests if run.finish == "rejected")

"""Several simulated engines on one clock: one of them alone, fast-forward, calls and figures, engines in lockstep."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_workloads import AffineCost, random_calls, random_config
from scheduler_driver import make_config, make_layout
from tiers import examples

from quire.protocol.config import EngineConfig
from quire.replay.costs.expert_parallel import NOTHING, ExpertParallelCost
from quire.replay.report.summary import summary
from quire.replay.run.run_record import RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.fleet import FleetSimulator
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import ClosedLoop, Concurrency, OpenLoop
from quire.replay.workload.workload import Call, ContentIds
from quire.scheduler_proc.kv.events import KVEventRecorder

SOURCES = {"open": OpenLoop, "closed": ClosedLoop, "concurrency": lambda calls: Concurrency(calls, 5)}
ROUTING = ("cache", "least-load", "round-robin", "session", "vllm")


def run(
    calls: list[Call], config: EngineConfig, num_blocks: int, engines: int, pace: str = "open", **options: Any
) -> RunRecord:
    routing, cost = options.pop("routing", "cache"), options.pop("cost", AffineCost())
    setup = Setup(config, make_layout(config), num_blocks, num_engines=engines, routing=routing)
    record = RunRecord(block_size=config.block_size)
    return FleetSimulator(setup, cost, SOURCES[pace](calls), record, **options).run()


def ends(record: RunRecord) -> list[list[Any]]:
    return sorted([getattr(run, name) for name in type(run).__slots__] for run in record.requests)


@given(seed=st.integers(0, 2**32), pace=st.sampled_from(sorted(SOURCES)), routing=st.sampled_from(ROUTING))
@settings(max_examples=examples(15))
def test_one_engine_is_the_simulator(seed: int, pace: str, routing: str) -> None:
    rng = random.Random(seed)
    calls, config = random_calls(rng, rng.randrange(1, 12)), random_config(rng)
    setup = Setup(config, make_layout(config), 40)
    alone = Simulator(setup, AffineCost(), SOURCES[pace](calls), RunRecord()).run()
    fleet = run(calls, config, 40, 1, pace, routing=routing)
    assert ends(fleet) == ends(alone)
    assert (fleet.virtual_s, fleet.itl, len(fleet.steps)) == (alone.virtual_s, alone.itl, len(alone.steps))
    assert fleet.preemptions_by_reason == alone.preemptions_by_reason


@given(seed=st.integers(0, 2**32), pace=st.sampled_from(sorted(SOURCES)), routing=st.sampled_from(ROUTING))
@settings(max_examples=examples(25))
def test_each_call_ends_once_and_fast_forward_changes_nothing(seed: int, pace: str, routing: str) -> None:
    rng = random.Random(seed)
    calls, config, engines = random_calls(rng, rng.randrange(1, 14)), random_config(rng), rng.randrange(2, 5)
    record = run(calls, config, 40, engines, pace, routing=routing)
    assert sorted(each.request_id for each in record.requests) == sorted(call.request_id for call in calls)
    assert all(each.finish for each in record.requests)
    figures = record.extra["engines"]
    assert sum(each["requests"] for each in figures["each"]) == len(calls) == sum(figures["choices"].values())
    computed = sum(record.steps.prefill_tokens) + sum(record.steps.decode_tokens)
    assert sum(each["computed_tokens"] for each in figures["each"]) == computed
    assert ends(record) == ends(run(calls, config, 40, engines, pace, routing=routing, fast_forward=False))


def test_turns_of_a_conversation_go_where_their_prefix_is() -> None:
    contents = [ContentIds(list(range(100 * job, 100 * job + 8)), 4, 0) for job in range(4)]
    calls = [Call(n, f"{n}", 2.0 * (n // 4), 33, 2, contents[n % 4]) for n in range(16)]
    config = random_config(random.Random(1), block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    config = random_config(random.Random(1), block_size=4, enable_prefix_caching=True, max_num_batched_tokens=64)
    record = run(calls, config, 200, 4)
    assert record.extra["engines"]["choices"]["cached"] == 12
    assert sum(each.num_cached_tokens for each in record.requests) == 12 * 32
    found = summary(record)
    assert found["engines"]["busiest_over_mean"] == 1.0
    assert sum(each.num_cached_tokens for each in run(calls, config, 200, 4, routing="round-robin").requests) == 384


def balance(seed: int, per_engine: int, *, paces: int, ratio: float = 1.0001) -> tuple[float, list[int]]:
    """Run engines with hiccups and unrelated requests, and return the busiest over the mean, and the tokens of each.

    Args:
        paces: number of devices, whose engines take turns. Each is ``ratio`` times as slow as the one before.
    """
    rng = random.Random(seed)
    engines, source = rng.randrange(2, 9), rng.choice(("open", "concurrency"))
    gap, now, calls = 3 * rng.uniform(0.25, 0.6) / engines, 0.0, []
    for number in range(engines * per_engine):
        now += rng.expovariate(1 / gap)
        calls.append(Call(number, f"{number}", now, rng.randrange(16, 1000), rng.randrange(1, 60)))
    config = make_config(block_size=64, max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=2048)
    setup = Setup(
        config,
        make_layout(config),
        500,
        num_engines=engines,
        routing=rng.choice(("cache", "least-load")),
        engine_paces=[3 * ratio**device for device in range(paces)],
        hiccups_per_minute=rng.uniform(0.2, 2.0),
    )
    calls_of = OpenLoop(calls) if source == "open" else Concurrency(calls, 6 * engines)
    figures = FleetSimulator(setup, AffineCost(), calls_of, RunRecord(block_size=64)).run().extra["engines"]
    return figures["busiest_over_mean"], [each["computed_tokens"] for each in figures["each"]]


RUNS = [(43, 1), *(pytest.param(*run, marks=pytest.mark.full) for run in ((46, 2), (3, 8)))]
SLOW_RUNS = [pytest.param(seed, 1, marks=pytest.mark.slow) for seed in range(200)]


@pytest.mark.parametrize(("seed", "paces"), [*RUNS, *SLOW_RUNS])
def test_engines_with_hiccups_get_equal_work(seed: int, paces: int) -> None:
    """Also those on devices with other names that are nearly as fast: a hiccup does not make a device slower."""
    busiest, tokens = balance(seed, 70, paces=paces)
    print(f"seed {seed}: {busiest:.3f} {max(tokens) / min(tokens):.3f} {tokens}")
    assert busiest <= 1.3


def test_a_slower_device_gets_less_and_is_not_starved() -> None:
    fast, slow = balance(43, 60, paces=2, ratio=3.0)[1]
    assert 0.1 * fast < slow < 0.5 * fast


@pytest.mark.parametrize("routing", ROUTING)
def test_contents_are_recorded_only_for_a_choice_by_contents(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(KVEventRecorder, "stored", lambda self, keys, medium: recorded.append(medium))
    config = random_config(random.Random(1), block_size=4, enable_prefix_caching=True, max_num_batched_tokens=64)
    run([Call(0, "0", 0.0, 33, 2)], config, 40, 2, routing=routing)
    assert bool(recorded) == (routing == "cache"), "nothing takes them otherwise"


class _Joint(ExpertParallelCost):
    """One second for each step of all engines, and a tenth more per token of the largest."""

    def __init__(self) -> None:
        self.seen: list[list[StepShape]] = []

    def seconds(self, step: StepShape) -> float:
        return 1.0

    def seconds_together(self, steps: Any) -> float:
        self.seen.append(list(steps))
        return 1.0 + 0.1 * max(step.num_tokens for step in steps)


@pytest.mark.parametrize("like", ["quire", "vllm-0.19"])
def test_engines_that_share_experts_step_together(like: str) -> None:
    from quire.replay.core.policies import find_preset

    calls = [Call(0, "0", 0.0, 10, 5), Call(1, "1", 2.5, 4, 3), Call(2, "2", 30.0, 4, 1)]
    config, cost = random_config(random.Random(3), max_num_seqs=8, max_num_batched_tokens=64), _Joint()
    policies = find_preset(like).policies
    setup = Setup(config, make_layout(config), 100, policies=policies, num_engines=2, routing="round-robin")
    record = FleetSimulator(setup, cost, OpenLoop(calls), RunRecord()).run()
    steps = sorted(zip(record.steps.begin, record.steps.end, strict=True))
    joint = dict.fromkeys(steps)
    assert len(cost.seen) == len(joint) < len(steps), "some steps are of both engines"
    assert all(after[0] >= before[1] for before, after in zip(joint, list(joint)[1:], strict=False)), "none overlap"
    assert [end - begin for begin, end in joint] == pytest.approx(
        [1.0 + 0.1 * max(step.num_tokens for step in each) for each in cost.seen]
    )
    assert any(NOTHING in each for each in cost.seen) and not any(each == [NOTHING, NOTHING] for each in cost.seen)
    assert {each.finish for each in record.requests} == {"length"}

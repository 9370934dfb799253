"""Simulated demand for LoRA adapters: the clock of loads, and runs with more adapters than slots."""

from pathlib import Path

import pytest
from replay_workloads import AffineCost
from scheduler_driver import make_config, make_layout
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.wire.adapter_messages import LoadAdapter
from quire.replay.costs.side_clock import SideClock
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.synthetic import load
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.setup import Setup, make_setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Call, Workload

MANY = "synthetic:requests=200,arrivals=poisson:40,input=fixed:20,output=fixed:10,adapters=12,adapter_zipf=0.5"


def workload(spec: str) -> Workload:
    return load(Path(spec), LoadOptions(), lambda path: pytest.fail(f"{path} is read"))


def simulate(calls: list[Call], *, max_loras: int, fast_forward: bool = True) -> tuple[RunRecord, Simulator]:
    config = make_config(
        enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras + 2, max_num_seqs=64, max_num_batched_tokens=512
    )
    setup = Setup(config, make_layout(config), 2000, adapter_load_s=0.02)
    simulator = Simulator(setup, AffineCost(), OpenLoop(calls), RunRecord(), fast_forward=fast_forward)
    return simulator.run(), simulator


def test_loads_run_one_after_the_other_and_host_memory_is_faster() -> None:
    clock = SideClock(1.0)
    clock.send(LoadAdapter(1, b"", "", 0), 5.0)
    clock.send(LoadAdapter(2, b"", "", 1), 5.5)
    clock.send(LoadAdapter(1, b"", "", 0, dropped=[2]), 5.5)
    clock.send(LoadAdapter(2, b"", "", 1), 5.5)
    assert clock.take(5.9) is None
    ends = []
    while (end := clock.next_end) != float("inf"):
        answer = clock.take(end)
        assert answer is not None and not answer.problem
        ends.append((round(end, 3), answer.number, answer.was_cached))
    assert ends == [(6.0, 1, False), (7.0, 2, False), (7.1, 1, True), (8.1, 2, False)]


def test_every_request_ends_with_more_adapters_than_slots() -> None:
    calls = workload(MANY).calls
    record, simulator = simulate(calls, max_loras=2)
    assert [run.finish for run in record.requests] == ["length"] * len(calls)
    statistics = simulator.scheduler.statistics()
    assert statistics.num_adapters_loaded > 12 and statistics.num_adapters_evicted > 0
    simulator.scheduler.check()
    assert len(simulator.scheduler.adapters.slots.known) <= 4


@pytest.mark.parametrize("max_loras", thinned([2, 12], keep=1))
def test_fast_forward_changes_nothing(max_loras: int) -> None:
    calls = workload(MANY.replace("output=fixed:10", "output=fixed:60")).calls[:80]
    fast, slow = (simulate(calls, max_loras=max_loras, fast_forward=each)[0] for each in (True, False))
    times = [[(run.first_token, run.end) for run in record.requests] for record in (fast, slow)]
    assert times[0] == times[1]


def test_adapters_of_a_workload_enable_them_and_can_be_disabled() -> None:
    found = workload(MANY)
    assert len({call.adapter for call in found.calls}) == 12
    made = make_setup(found, {"adapter_load_s": "0.5", "max_loras": "3", "num_usable_blocks": "100"}, None)
    assert made.config.enable_lora and made.adapter_load_s == 0.5 and made.shown["adapter_load_s"] == 0.5
    without = make_setup(found, {"enable_lora": "false", "num_usable_blocks": "100"}, None)
    assert not without.config.enable_lora and "adapter_load_s" not in without.shown


def test_adapters_share_no_prefix() -> None:
    calls = workload(f"{MANY},prefix_groups=1,prefix_tokens=64").calls
    assert len({call.content.space for call in calls if call.content}) == 12


@pytest.mark.parametrize(
    ("key", "value", "text"), [("adapter_zipf", "11", "from 0 to 10"), ("adapters", "-1", "whole number")]
)
def test_wrong_demand_is_refused(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        workload(f"synthetic:requests=5,adapters=2,{key}={value}")


def test_wrong_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter_load_s must be at least 0"):
        make_setup(workload(MANY), {"adapter_load_s": "-1"}, None)

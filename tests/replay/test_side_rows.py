"""Pooled requests in simulations: the rows of a simulated worker, and traces with pooled requests as workloads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_workloads import AffineCost
from scheduler_driver import Driver, change, make_config, make_layout, make_request
from side_parts import parts_of
from traced_runs import traced, write_trace

from quire.frontend.engine.new_rows import NewRows
from quire.protocol.config import EngineConfig
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, StepOutputs
from quire.protocol.wire.side_rows import POOLED, ROUTED_EXPERTS, SideKind
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.report.figures import latency
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulated_runner import SimulatedRunner
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.scheduler_proc.scheduler import Scheduler

POOLING = PoolingConfig(tasks=["embed", "token_embed", "classify"], size=6, labels=["a", "b"])
MOE = MoeConfig(num_experts=8, num_experts_per_token=2, intermediate_size=8, layers=[0, 1], renormalise=True)


class Outputs:
    """The rows of each request, and how it ended."""

    def __init__(self) -> None:
        self.rows: dict[SideKind, dict[str, NewRows]] = {POOLED: {}, ROUTED_EXPERTS: {}}
        self.ended: dict[str, EndReason] = {}
        self._names: dict[int, str] = {}

    def of(self, kind: SideKind) -> dict[str, Any]:
        return {name: rows[0] for name, found in self.rows[kind].items() if (rows := found.take()) is not None}

    def take(self, message: StepOutputs) -> None:
        self._names |= {each.handle: each.request_id for each in message.introduced}
        for kind, found in self.rows.items():
            for handle, start, rows in parts_of(message, kind):
                found.setdefault(self._names[handle], NewRows()).add(start, rows)
        self.ended |= {self._names[each.handle]: EndReason(each.reason) for each in message.ended}


def run(config: EngineConfig, *requests: AddRequest) -> Outputs:
    """Run requests on the real Scheduler and the simulated runner, with as many steps in flight as there may be."""
    scheduler, runner, outputs = Scheduler(config, make_layout(config), 60), SimulatedRunner(config), Outputs()
    for request in requests:
        scheduler.consume(request)
    results = []
    while scheduler.table.requests or results:
        while (diff := scheduler.schedule()) is not None:
            results.append(runner.finish(runner.launch(diff), None, 0.01))
        scheduler.consume(results.pop(0))
        scheduler.check()
        for _, message in scheduler.take_messages():
            assert isinstance(message, StepOutputs)
            outputs.take(message)
    return outputs


@pytest.mark.parametrize("asynchronous", [False, True])
def test_simulated_worker_makes_rows_of_the_prompt(asynchronous: bool) -> None:
    config = make_config(pooling=POOLING, max_num_batched_tokens=16, async_scheduling=asynchronous)
    prompt = list(range(100, 140))
    requests = [make_request("chat", prompt, max_tokens=9)]
    for name, params in (
        ("a", PoolingParams()),
        ("b", PoolingParams("token_embed", 4)),
        ("c", PoolingParams("classify")),
    ):
        requests.append(make_request(name, prompt, pooling=params))
    requests.append(make_request("other", prompt[1:], pooling=PoolingParams()))
    outputs = run(config, *requests)
    assert outputs.ended == {"chat": EndReason.LENGTH} | dict.fromkeys(("a", "b", "c", "other"), EndReason.STOPPED)
    rows = outputs.of(POOLED)
    assert {name: each.shape for name, each in rows.items()} == {
        "a": (1, 6),
        "b": (40, 4),
        "c": (1, 2),
        "other": (1, 6),
    }
    assert not np.array_equal(rows["a"], rows["other"])
    again = run(config, requests[1]).of(POOLED)["a"]
    np.testing.assert_array_equal(again, rows["a"])


def test_simulated_worker_routes_all_tokens_but_the_last() -> None:
    config = make_config(max_num_batched_tokens=16, async_scheduling=True, enable_return_routed_experts=True)
    config = change(config, model=change(config.model, moe=MOE))
    prompt = list(range(40))
    asks = make_request("a", prompt, max_tokens=9, ignore_eos=True, return_routed_experts=True)
    outputs = run(config, asks, make_request("b", prompt, max_tokens=9))
    ((name, rows),) = outputs.of(ROUTED_EXPERTS).items()
    assert name == "a"
    assert rows is not None and rows.shape == (40 + 9 - 1, 2 * 2) and rows.min() >= 0 and rows.max() < 8


def test_trace_with_pooled_requests_is_simulated(tmp_path: Path) -> None:
    driver = Driver(pooling=POOLING, max_num_batched_tokens=16)
    for number in range(6):
        prompt = [*range(20), number]
        driver.add(f"e{number}", prompt, pooling=PoolingParams(("embed", "token_embed")[number % 2]))
        driver.add(f"c{number}", prompt, max_tokens=5)
        driver.step()
    driver.finish()
    workload = load(write_trace(tmp_path / "trace.jsonl", traced(driver)), LoadOptions())
    assert {call.request_id[0]: call.num_output_tokens for call in workload.calls} == {"e": 0, "c": 5}
    assert not any("empty" in note for note in workload.notes)
    record = RunRecord()
    setup = Setup(driver.config, make_layout(driver.config), 40)
    Simulator(setup, AffineCost(), OpenLoop(workload.calls), record).run()
    assert {(r.request_id[0], r.finish, r.num_output_tokens) for r in record.requests} == {
        ("e", "stop", 0),
        ("c", "length", 5),
    }
    for each in record.requests:
        found = latency(each)
        assert found.e2e is not None and found.e2e > 0 and (found.ttft is None) == (each.request_id[0] == "e")

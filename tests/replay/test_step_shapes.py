"""The step shapes that the Simulator gives a cost model, and the times at which it receives requests."""

import dataclasses
import random

import pytest
from scheduler_driver import make_config, make_layout

from quire.replay.core.policies import QUIRE, Policies
from quire.replay.run.run_record import RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Call


class ShapeRecorder:
    """A cost of one second per step that stores the shapes."""

    kv_bytes = 0

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def seconds(self, step: StepShape) -> float:
        self.shapes.append(dataclasses.replace(step, prefills=list(step.prefills)))
        return 1.0

    def describe(self) -> str:
        return "a second per step"


def run(
    calls: list[Call], cost: ShapeRecorder, *, policies: Policies = QUIRE, blocks: int = 400, **options: bool
) -> RunRecord:
    config = make_config(max_model_len=400, max_num_batched_tokens=64, max_num_seqs=8)
    setup = Setup(config, make_layout(config), blocks, policies=policies)
    return Simulator(setup, cost, OpenLoop(calls), RunRecord(), **options).run()


class TestLongest:
    def test_longest_decode_grows_and_ends_with_its_request(self) -> None:
        cost = ShapeRecorder()
        run([Call(0, "0", 0.0, 20, 4), Call(1, "1", 0.0, 10, 8)], cost, fast_forward=False)
        assert [shape.longest_decode for shape in cost.shapes] == [0, 21, 22, 23, 14, 15, 16, 17]

    @pytest.mark.parametrize("fast_forward", [True, False])
    @pytest.mark.parametrize("blocks", [60, 400])
    def test_longest_decode_is_between_mean_and_maximum(self, fast_forward: bool, blocks: int) -> None:
        """Includes requests that are preempted and resume."""
        rng = random.Random(3)
        calls = [Call(n, str(n), 2.0 * n, rng.randint(1, 90), rng.randint(1, 60)) for n in range(30)]
        cost = ShapeRecorder()
        record = run(calls, cost, blocks=blocks, fast_forward=fast_forward)
        assert bool(sum(r.num_preemptions for r in record.requests)) == (blocks == 60)
        computed = sum(record.steps.prefill_tokens) + sum(record.steps.decode_tokens)
        needed = sum(r.num_prompt_tokens - r.num_cached_tokens + r.num_output_tokens - 1 for r in record.requests)
        assert sum(r.num_recomputed_tokens for r in record.requests) == computed - needed
        for shape in cost.shapes:
            if shape.num_decodes:
                mean = shape.decode_context / shape.num_decodes
                assert mean <= shape.longest_decode <= min(150, shape.decode_context)

    def test_fast_forward_gives_same_shapes(self) -> None:
        calls = [Call(n, str(n), 7.0 * n, 30 - n, 40 + n) for n in range(6)]
        shapes = []
        for fast_forward in (True, False):
            cost = ShapeRecorder()
            run(calls, cost, fast_forward=fast_forward)
            shapes.append([(s.num_decodes, s.decode_context, s.longest_decode) for s in cost.shapes])
        assert shapes[0] == shapes[1]


class TestArrivals:
    calls = (Call(0, "0", 0.0, 20, 12), Call(1, "1", 2.25, 20, 3), Call(2, "2", 2.5, 20, 3), Call(3, "3", 30.5, 5, 2))

    @pytest.mark.parametrize("fast_forward", [True, False])
    def test_receives_requests_at_arrival(self, fast_forward: bool) -> None:
        record = run(list(self.calls), ShapeRecorder(), fast_forward=fast_forward)
        assert [r.arrival for r in record.requests] == [0.0, 2.25, 2.5, 30.5]

    @pytest.mark.parametrize("fast_forward", [True, False])
    def test_receives_requests_between_steps_only(self, fast_forward: bool) -> None:
        """Requests that arrive during a step are received after it, and their latencies start then."""
        policies = Policies(takes_between_steps=True)
        record = run(list(self.calls), ShapeRecorder(), policies=policies, fast_forward=fast_forward)
        assert [r.arrival for r in record.requests] == [0.0, 3.0, 3.0, 30.5]
        others = run(list(self.calls), ShapeRecorder(), fast_forward=fast_forward).requests
        assert [r.first_token for r in record.requests] == [r.first_token for r in others]
        assert [r.end for r in record.requests] == [r.end for r in others]

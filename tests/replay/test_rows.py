"""SimulatedRows against a simple model that recomputes every row in every step."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_workloads import AffineCost, random_calls, random_config
from scheduler_driver import make_layout
from tiers import examples

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.replay.costs.rows import SimulatedRows
from quire.replay.run.run_record import RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import ClosedLoop


@dataclass
class SimpleRow:
    known: int
    computed: int
    active: bool = True


class SimpleRows:
    """The rules of the protocol: an active row without an entry in the diff computes one token."""

    def __init__(self) -> None:
        self.rows: dict[int, SimpleRow] = {}

    def apply(self, diff: SchedulerOutput) -> tuple[StepShape, set[int]]:
        for handle in diff.removed:
            del self.rows[handle]
        for handle in diff.parked:
            self.rows[handle].active = False
        for new in diff.new_requests:
            self.rows[new.handle] = SimpleRow(new.num_tokens, new.num_computed_tokens)
        for handle in diff.unparked:
            self.rows[handle].active = True
        counts = dict(diff.counts)
        shape = StepShape([(count, self.rows[handle].computed) for handle, count in diff.counts], 0, 0, 0)
        sampling = set()
        for handle, row in self.rows.items():
            if not row.active:
                continue
            if handle not in counts:
                shape.num_decodes += 1
                shape.decode_context += row.computed + 1
            row.computed += counts.get(handle, 1)
            if row.computed == row.known:
                row.known += 1
                sampling.add(handle)
        shape.num_samples = len(sampling)
        return shape, sampling


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(25))
def test_shapes_and_sampling_rows_equal_full_recomputation(seed: int) -> None:
    rng = random.Random(seed)
    calls, config = random_calls(rng, rng.randrange(1, 14), span=1.0), random_config(rng)
    plain, steps = SimpleRows(), 0
    apply = SimulatedRows.apply

    def compared(self: SimulatedRows, diff: SchedulerOutput) -> StepShape:
        nonlocal steps
        expected, sampling = plain.apply(diff)
        shape = apply(self, diff)
        found = (shape.prefills, shape.num_decodes, shape.decode_context, shape.num_samples)
        assert found == (expected.prefills, expected.num_decodes, expected.decode_context, expected.num_samples)
        assert set(self.handles) == sampling
        steps += 1
        return shape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedRows, "apply", compared)
        setup = Setup(config, make_layout(config), rng.randrange(8, 60))
        record = Simulator(setup, AffineCost(), ClosedLoop(calls), RunRecord(), fast_forward=False).run()
    assert steps == len(record.steps)

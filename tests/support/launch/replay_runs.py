"""Runs for the reports: one of the real Scheduler with preemptions, and made-up ones of any size."""

from functools import cache
from typing import Literal

import msgspec
import numpy as np

from quire.bench.measure.shapes import SHAPES
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions
from quire.protocol.model.kv_layout import kv_layout
from quire.replay.costs.cost import ConstantCost
from quire.replay.run.run_record import Moment, RequestRun, RunRecord
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Call, ContentIds

BLOCK_SIZE, NUM_BLOCKS, BUDGET = 16, 120, 256


@cache
def simulated_run(num_blocks: int = NUM_BLOCKS, scheduling_policy: Literal["fcfs", "continuum"] = "fcfs") -> RunRecord:
    """Sixty calls of twelve conversations in a pool that is too small: some are preempted and one is rejected. Tests
    share it and must not change it."""
    rng = np.random.default_rng(7)
    calls = []
    for number in range(60):
        talk = number % 12
        content = ContentIds([talk * 100 + i for i in range(1 + number // 12 * 4)], BLOCK_SIZE)
        prompt = BLOCK_SIZE * len(content.ids) + int(rng.integers(4, 60))
        calls.append(
            Call(number, f"call {number}", number * 0.03, prompt, int(rng.integers(20, 120)), content, f"talk {talk}")
        )
    calls.append(Call(60, "too long", 1.9, 5000, 10))
    model = msgspec.structs.replace(SHAPES["llama-3.1-8b"], max_position=8192)
    options = EngineOptions(
        device="cuda",
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_batched_tokens=BUDGET,
        scheduling_policy=scheduling_policy,
    )
    record = RunRecord(
        title=f"Small pool of {num_blocks} blocks",
        source="made up",
        cost="constant: 10 ms per step",
        settings={"block_size": BLOCK_SIZE, "num_usable_blocks": num_blocks},
        block_size=BLOCK_SIZE,
        num_usable_blocks=num_blocks,
        max_num_batched_tokens=BUDGET,
    )
    setup = Setup(make_engine_config(options, model=model), kv_layout(model, BLOCK_SIZE, "bfloat16"), num_blocks)
    return Simulator(setup, ConstantCost(10), OpenLoop(calls), record).run()


def made_up_run(num_requests: int, num_steps: int, moments_each: int = 6) -> RunRecord:
    """Return a record of the given size with every kind of entry; its times are random."""
    rng = np.random.default_rng(num_requests)
    record = RunRecord("made up", block_size=16, num_usable_blocks=1000, max_num_batched_tokens=4096)
    for number, arrival in enumerate(np.sort(rng.uniform(0, num_steps * 0.02, num_requests)).tolist()):
        gaps = rng.exponential(1.0, 3 + moments_each).cumsum().tolist()
        moments = []
        for i, gap in enumerate(gaps[3:]):
            what, reason = (("preempt", "youngest"), ("resume", ""), ("wait", "kv_blocks"))[i % 3]
            moments.append(
                Moment(arrival + gaps[1] + gap, what, reason, f"request-{number // 2}" if i % 3 == 0 else "")
            )
        record.requests.append(
            RequestRun(
                f"request-{number}",
                arrival,
                int(rng.integers(1, 30000)),
                f"conversation-{number % 300}",
                scheduled=arrival + gaps[0],
                first_token=arrival + gaps[1],
                end=arrival + gaps[1] + gaps[-1] + 0.5,
                num_output_tokens=int(rng.integers(1, 2000)),
                num_preemptions=(moments_each + 2) // 3,
                finish="length",
                moments=moments,
            )
        )
    _add_steps(record, rng, num_steps)
    record.itl = [(float(i) / 100 + 5, int(count)) for i, count in enumerate(rng.integers(1, 5000, 20000))]
    record.virtual_s = num_steps * 0.02
    return record


def _add_steps(record: RunRecord, rng: np.random.Generator, num_steps: int) -> None:
    steps = record.steps
    begin = np.arange(num_steps) * 0.02
    steps.begin.extend(begin.tolist())
    steps.end.extend((begin + 0.019).tolist())
    held = rng.integers(0, 700, num_steps)
    cached = rng.integers(0, 300, num_steps)
    for column, values in (
        (steps.prefill_tokens, rng.integers(0, 3000, num_steps)),
        (steps.decode_tokens, rng.integers(0, 256, num_steps)),
        (steps.running, rng.integers(0, 256, num_steps)),
        (steps.waiting, rng.integers(0, 999, num_steps)),
        (steps.held, held),
        (steps.cached, cached),
        (steps.free, 1000 - held - cached),
    ):
        column.extend(values.tolist())

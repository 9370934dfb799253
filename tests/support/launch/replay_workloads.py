"""Small random workloads and settings for simulations, drawn from a seed."""

import random
from typing import Any

from scheduler_driver import make_config

from quire.protocol.config import EngineConfig
from quire.replay.run.step_shape import StepShape
from quire.replay.workload.workload import Call, ContentIds, Workload


class AffineCost:
    """A cost model that gives steps of different shapes different seconds, with little arithmetic."""

    kv_bytes = 0

    def seconds(self, step: StepShape) -> float:
        return 0.01 + 1e-4 * step.num_tokens + 1e-6 * step.decode_context + 1e-5 * step.num_samples

    def describe(self) -> str:
        return "affine"


def random_calls(rng: random.Random, count: int, *, span: float = 4.0, most_tokens: int = 60) -> list[Call]:
    """Return calls of which some share prefixes, some arrive at the same time, and some continue a conversation."""
    calls: list[Call] = []
    arrival = 0.0
    for number in range(count):
        arrival += rng.choice((0.0, rng.random() * 2 * span / count))
        ids = list(range(rng.randrange(3), rng.randrange(3, 12)))
        after = rng.choice([None, *range(number)]) if number else None
        calls.append(
            Call(
                number,
                f"call {number}",
                arrival,
                rng.randrange(1, most_tokens),
                rng.randrange(1, most_tokens),
                rng.choice((None, ContentIds(ids, 4, rng.randrange(2)))),
                conversation=f"{rng.randrange(3)}",
                after=after,
                pause=rng.random(),
                priority=rng.randrange(3),
            )
        )
    return calls


def random_config(rng: random.Random, **settings: Any) -> EngineConfig:
    """Return random settings that change the order in which requests run."""
    max_num_seqs = rng.choice((1, 3, 8))
    drawn = {
        "block_size": rng.choice((1, 4, 16)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice((max_num_seqs, 16, 64)),
        "max_model_len": 128,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.7,
        "max_prefill_share": rng.choice((0.5, 1.0)),
        "long_prefill_token_threshold": rng.choice((0, 7)),
        "max_num_queued_reqs": rng.choice((0, 0, 4)),
    }
    return make_config(**drawn | settings)


def workload(calls: list[Call], **fields: Any) -> Workload:
    return Workload("test", "nowhere", calls, **fields)

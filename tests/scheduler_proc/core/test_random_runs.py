"""Seeded random runs of the Scheduler against the fake worker: nasty loads, and every invariant after every step.

Whatever arrives, waits, shares, is aborted or preempted, every client gets what its prompt alone would give it, every
request ends once, and nothing is left behind. A seed that ever failed stays in ``KEPT``.
"""

import random
from dataclasses import dataclass

import pytest
from scheduler_driver import VOCAB_SIZE, Driver, change, expected_tokens
from tiers import thinned

from quire.protocol.wire.front_end_messages import EndReason

KEPT: list[int] = []
SEEDS = [*KEPT, *range(20)]
MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200)]
STEPS_PER_RUN = 130
EOS = list(range(0, VOCAB_SIZE, 40))


@dataclass
class Asked:
    """A request as its client sent it."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    output: list[int]
    gone: bool = False


def random_settings(rng: random.Random) -> dict[str, object]:
    """Tiny pools, odd chunk sizes, all switches."""
    max_num_seqs = rng.choice((1, 3, 8))
    num_drafts = rng.choice((0, 0, 1, 4))
    least = max_num_seqs * (1 + num_drafts)
    chunked = rng.random() < 0.8
    return {
        "num_blocks": rng.choice((6, 10, 14, 40)),
        "block_size": rng.choice((1, 2, 4, 8)),
        "max_model_len": 40,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(least, rng.choice((8, 13, 64)) if chunked else 40),
        "num_speculative_tokens": num_drafts,
        "adaptive": True,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice((0, 0, 3, 7)) if chunked else 0,
        "async_scheduling": rng.random() < 0.7,
        "eos": EOS,
    }


class Load:
    """Clients that send, change their minds and leave, at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        settings = random_settings(self.rng)
        self.driver = Driver(**settings)
        self.driver.worker.step_seconds = lambda tokens, drafts: 1.0 + 0.1 * tokens
        self.driver.worker.draft_quality = self.rng.choice((0.0, 0.5, 0.9))
        self.asked: dict[str, Asked] = {}
        self.client_of: dict[str, int] = {}
        self.prefixes = [[self.rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]

    def run(self, steps: int) -> None:
        while len(self.driver.diffs) < steps:
            self.one_event()
            for _ in range(self.rng.randrange(1, 8)):
                self.driver.random_step(self.rng)
        self.driver.scheduler.pause = ""
        self.driver.run(10_000)

    def one_event(self) -> None:
        draw = self.rng.random()
        alive = [r for _, r in self.driver.scheduler.table.requests]
        if draw < 0.45 and len(alive) < 14:
            self.arrive()
        elif draw < 0.52 and alive:
            victim = self.rng.choice(alive)
            self.asked[victim].gone = True
            self.driver.abort(victim, "nobody", client=self.client_of[victim])
        elif draw < 0.58 and alive:
            self.stop(self.rng.choice(alive))
        elif draw < 0.6:
            self.leave(self.rng.randrange(3))
        elif draw < 0.64:
            self.driver.control("pause")
            self.driver.random_step(self.rng)
            self.driver.control("resume")
        elif draw < 0.67:
            self.driver.control("reset_prefix_cache")
        elif draw < 0.71 and self.driver.config.enable_chunked_prefill:
            # A batch made smaller or larger again: the one way in which requests that decode get no share.
            budget = self.rng.choice((1, 2, 3, self.driver.config.max_num_batched_tokens))
            budget = min(budget, self.driver.config.max_num_batched_tokens)
            self.driver.scheduler.config = change(self.driver.config, max_num_batched_tokens=budget)

    def arrive(self) -> None:
        rng = self.rng
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 12))]
        prompt = (rng.choice(self.prefixes)[: rng.choice((0, 5, 8, 16, 24))] + own)[:38] or [1]
        asked = Asked(prompt, rng.randrange(1, 30), rng.random() < 0.6, [])
        if rng.random() < 0.1:
            asked.output = expected_tokens(prompt, rng.randrange(1, 4))
            asked.ignore_eos = True
        request_id = f"r{len(self.asked)}"
        client = rng.randrange(3)
        self.asked[request_id], self.client_of[request_id] = asked, client
        self.driver.add(
            request_id,
            prompt,
            asked.output,
            client=client,
            max_tokens=asked.max_tokens,
            ignore_eos=asked.ignore_eos,
            cache_salt=rng.choice(("", "", "salt")),
        )

    def stop(self, request_id: str) -> None:
        """As a front end does: the stop string was in what had come so far."""
        client = self.client_of[request_id]
        if client == 0 and self.driver.answers[request_id].tokens:
            self.asked[request_id].gone = True
            self.driver.stop(request_id, self.rng.randrange(1 + len(self.driver.answers[request_id].tokens)))

    def leave(self, client: int) -> None:
        for (owner, request_id), _ in list(self.driver.scheduler.table.requests.items()):
            if owner == client:
                self.asked[request_id].gone = True
        self.driver.drop_client(client)

    def check_answer(self, request_id: str, asked: Asked) -> None:
        """The stream is what the prompt alone gives, up to where this request had to end."""
        answer = self.driver.answers[request_id]
        if answer.rejected is not None:
            assert answer.rejected.code == "kv_pool_too_small" and not answer.tokens
            return
        pool = self.driver.scheduler.kv.max_tokens
        limit = min(asked.max_tokens, min(40, pool + 1) - len(asked.prompt)) - len(asked.output)
        want = expected_tokens([*asked.prompt, *asked.output], max(limit, 0))
        if not asked.ignore_eos:
            ends = [i for i, token in enumerate(want) if token in EOS]
            want = want[: ends[0] + 1] if ends else want
        assert answer.tokens == want[: len(answer.tokens)], f"{request_id}: another stream than alone"
        if not asked.gone:
            assert answer.tokens == want
            stopped = not asked.ignore_eos and want and want[-1] in EOS
            assert answer.reason == (EndReason.STOPPED if stopped else EndReason.LENGTH)
        else:
            assert answer.reason is not None


TOTALS = {"steps": 0, "parked": 0, "preemptions": 0, "hits": 0, "dropped": 0, "accepted": 0, "rejected": 0}


@pytest.mark.parametrize("seed", thinned([*SEEDS, *MORE_SEEDS], keep=3))
def test_every_client_gets_what_it_would_get_alone(seed: int) -> None:
    load = Load(seed)
    load.run(STEPS_PER_RUN)
    load.driver.check_drained()
    for request_id, asked in load.asked.items():
        load.check_answer(request_id, asked)
    statistics = load.driver.scheduler.statistics()
    assert statistics.num_steps == len(load.driver.diffs)
    TOTALS["steps"] += statistics.num_steps
    TOTALS["parked"] += sum(len(diff.parked) for diff in load.driver.diffs)
    TOTALS["preemptions"] += statistics.num_preemptions
    TOTALS["hits"] += statistics.prefix_cache_hit_tokens
    TOTALS["dropped"] += statistics.dropped_tokens
    TOTALS["accepted"] += statistics.num_accepted_tokens
    TOTALS["rejected"] += statistics.num_draft_tokens - statistics.num_accepted_tokens


@pytest.mark.full
def test_the_runs_reached_what_they_are_for() -> None:
    """Runs that never preempt, share or drop would prove nothing. (Skipped when only some seeds were run.)"""
    if TOTALS["steps"] < len(SEEDS) * STEPS_PER_RUN:
        pytest.skip("not all seeds ran")
    assert TOTALS["steps"] >= 2500
    assert TOTALS["preemptions"] > 30 and TOTALS["hits"] > 400 and TOTALS["dropped"] > 40
    assert TOTALS["parked"] >= 4 and TOTALS["accepted"] > 80 and TOTALS["rejected"] > 80

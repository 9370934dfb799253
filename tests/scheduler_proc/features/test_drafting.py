"""The number of drafts, in a model of an engine with known costs and acceptance."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.model.model_config import ModelConfig
from quire.scheduler_proc.features.drafts.draft_state import PROBE_INTERVAL, Acceptance, DraftState
from quire.scheduler_proc.features.drafts.drafting import (
    MAX_PROBE_INTERVAL,
    DraftController,
    DraftPolicy,
    MostDrafts,
    StepTimes,
    make_draft_policy,
)


@dataclass
class Engine:
    """A batch of requests that decode for ever. ``chances[i]``: probability that a draft of request i is accepted.

    A step takes ``fixed + per_token * tokens`` seconds, and ``drafted`` seconds more if it has drafts.
    """

    chances: list[float]
    fixed: float = 10.0
    per_token: float = 0.01
    drafted: float = 0.0
    most: int = 5
    find_rate: float = 1.0
    slow: Callable[[int], float] = lambda step: 1.0
    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    numbers: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(5)
        self.states = [DraftState() for _ in self.chances]
        self.policy = DraftController(self.most)

    def run(self, steps: int) -> list[list[int]]:
        """Run ``steps`` steps and return the requested numbers of drafts, by step and request."""
        for _ in range(steps):
            self.run_one()
        return self.numbers[-steps:]

    def run_one(self) -> None:
        self.step += 1
        numbers = list(self.policy.choose(self.states, len(self.states), self.step))
        self.numbers.append(numbers)
        computed, outcomes = len(self.states), []
        for state, chance, number in zip(self.states, self.chances, numbers, strict=True):
            if not number:
                continue
            self.policy.drafts_sent(state, self.step)
            verified = number if self.rng.random() < self.find_rate else 0
            accepted = 0
            while accepted < verified and self.rng.random() < chance:
                accepted += 1
            computed += verified
            self.num_tokens += accepted
            outcomes.append((state, verified, accepted))
        seconds = (self.fixed + self.per_token * computed + self.drafted * any(numbers)) * self.slow(self.step)
        self.policy.record_step_time(seconds, computed, any(numbers))
        for outcome in outcomes:
            self.policy.verified(*outcome)
        self.seconds += seconds
        self.num_tokens += len(self.states)


def mean(numbers: list[list[int]]) -> float:
    return sum(map(sum, numbers)) / sum(map(len, numbers))


def test_high_acceptance_uses_the_maximum_number() -> None:
    numbers = Engine([0.95]).run(200)[100:]
    assert sum(n == [5] for n in numbers) >= 90, "all steps but the few measuring steps"


@pytest.mark.parametrize("before", [0, 100])
def test_no_acceptance_stops_drafts_within_32_steps(before: int) -> None:
    """For a new request, and for one whose drafts were always accepted before."""
    engine = Engine([1.0])
    engine.run(before)
    engine.chances[0] = 0.0
    assert sum(map(sum, engine.run(32))) > 0
    assert engine.run(16) == [[0]] * 16


@pytest.mark.full
def test_resting_request_probes_at_increasing_intervals() -> None:
    engine = Engine([0.0])
    engine.run(32)
    numbers = engine.run(8000)
    probes = [at for at, n in enumerate(numbers) if n != [0]]
    gaps = [b - a for a, b in pairwise(probes)]
    assert all(numbers[at] == [1] for at in probes) and len(probes) >= 6
    assert gaps[0] >= PROBE_INTERVAL and gaps == sorted(gaps) and gaps[-1] == MAX_PROBE_INTERVAL


def test_rising_acceptance_resumes_drafts() -> None:
    engine = Engine([0.0])
    engine.run(200)
    engine.chances[0] = 0.95
    assert mean(engine.run(600)[-100:]) > 4


def test_resting_requests_probe_in_the_same_steps() -> None:
    """The first draft of a step costs the most: the step waits for the previous sample."""
    engine = Engine([0.0] * 16)
    engine.run(40)
    for request in range(16):  # as if they had started at different times
        engine.states[request].rest(40 + 11 * request)
    steps = [step for step, numbers in enumerate(engine.run(2000), 41) if any(numbers)]
    assert all(step % PROBE_INTERVAL == 0 for step in steps)


def test_step_without_drafts_is_not_a_rejection() -> None:
    policy, state = DraftController(3), DraftState()
    for step in range(1, 9):
        assert list(policy.choose([state], 1, step)) == [3]
        policy.drafts_sent(state, step)
        policy.verified(state, 0, 0)
    before = state.acceptance.chance if state.acceptance else 0.0
    assert before == pytest.approx(0.7)


def test_request_without_drafts_rests_and_probes_at_the_shortest_interval() -> None:
    engine = Engine([0.9], find_rate=0.0)
    engine.run(150)
    numbers = engine.run(1000)
    probes = [at for at, n in enumerate(numbers) if n != [0]]
    assert {b - a for a, b in pairwise(probes)} == {PROBE_INTERVAL}


@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_no_drafts_where_a_token_costs_as_much_as_a_step(chance: float) -> None:
    """A large batch whose step time is proportional to its tokens: computing two tokens to gain one is a loss."""
    engine = Engine([chance] * 32, fixed=1.0, per_token=1.0)
    assert mean(engine.run(400)[200:]) < 0.1


def test_fixed_cost_of_drafting_counts() -> None:
    cheap = Engine([0.4], fixed=10.0, drafted=0.5)
    assert mean(cheap.run(400)[200:]) > 1
    dear = Engine([0.4], fixed=10.0, drafted=20.0)
    assert mean(dear.run(600)[300:]) < 0.2


@pytest.mark.parametrize("per_token", [0.01, 0.5, 1.5, 5.0])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
def test_close_to_the_speed_of_the_best_fixed_number(per_token: float, chance: float) -> None:
    """Within 10 %, which measuring and probing cost."""

    def speed(number: int) -> float:
        expected = sum(chance**j for j in range(number + 1))
        return expected / (10.0 + per_token * (1 + number))

    engine = Engine([chance], per_token=per_token)
    engine.run(300)
    seconds, num_tokens = engine.seconds, engine.num_tokens
    engine.run(3000)
    reached = (engine.num_tokens - num_tokens) / (engine.seconds - seconds)
    assert reached > 0.9 * max(speed(number) for number in range(6))


def test_number_of_drafts_is_per_request() -> None:
    engine = Engine([0.95, 0.0, 0.5])
    numbers = engine.run(300)[100:]
    easy, none, half = (sum(n[i] for n in numbers) / len(numbers) for i in range(3))
    assert easy > 4.5 and none < 0.1 and 1.0 < half < 4.5


def test_new_request_starts_with_the_acceptance_of_others() -> None:
    engine = Engine([0.0] * 4)
    engine.run(300)
    engine.states[0] = DraftState()
    assert engine.run(1)[0][0] <= 2
    optimist = Engine([0.95] * 4)
    optimist.run(300)
    optimist.states[0] = DraftState()
    assert optimist.run(1)[0][0] == 5


def test_acceptance_alone_decides_without_step_times() -> None:
    engine = Engine([0.95, 0.0], fixed=0.0, per_token=0.0)
    easy, none = engine.run(200)[-20]
    assert (easy, none) == (5, 0)


def test_same_events_give_the_same_numbers() -> None:
    assert Engine([0.5, 0.9]).run(500) == Engine([0.5, 0.9]).run(500)


def test_acceptance_follows_the_newest_trials() -> None:
    acceptance = Acceptance(0.5, 4.0, 10.0)
    for _ in range(40):
        acceptance.observe(3, 3)
    assert acceptance.chance > 0.99
    for _ in range(22):
        acceptance.observe(3, 0)
    assert acceptance.chance < 0.15
    acceptance.observe(3, 1)  # two trials: one accepted, one rejected
    assert 0.05 < acceptance.chance < 0.3


def test_one_slow_step_hardly_changes_the_fit() -> None:
    times = StepTimes()
    rng = random.Random(1)
    for _ in range(300):
        num_tokens = rng.randrange(1, 60)
        times.observe(3.0 + 0.05 * num_tokens, num_tokens, drafted=False)
        times.observe(3.5 + 0.05 * num_tokens, num_tokens, drafted=True)
    assert times.per_token == pytest.approx(0.05, rel=0.02)
    times.observe(1000.0, 20, drafted=False)
    assert times.predict(20, drafted=False) == pytest.approx(4.0, rel=0.05)
    assert times.predict(20, drafted=True) == pytest.approx(4.5, rel=0.05)


def test_estimate_that_is_too_high_is_corrected_quickly() -> None:
    times = StepTimes()
    times.observe(500.0, 1, drafted=False)  # a step with a compilation
    for _ in range(12):
        times.observe(1.0, 1, drafted=False)
    assert times.predict(1, drafted=False) < 1.6


def test_fit_follows_changed_step_times() -> None:
    times = StepTimes()
    for seconds in (1.0, 3.0):
        for index in range(1500):
            times.observe(seconds * (1 + 0.1 * (index % 5)), 1 + index % 5, drafted=False)
    assert times.predict(1, drafted=False) == pytest.approx(3.0, rel=0.05)
    assert times.per_token == pytest.approx(0.3, rel=0.1)


def test_ignores_steps_without_a_duration() -> None:
    times = StepTimes()
    times.observe(0.0, 5, drafted=False)
    assert times.predict(5, drafted=False) == 1.0


MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
)


@pytest.mark.parametrize(
    ("most", "adaptive", "kind"), [(0, True, DraftPolicy), (3, False, MostDrafts), (3, True, DraftController)]
)
def test_configuration_selects_the_policy(most: int, adaptive: bool, kind: type) -> None:
    speculative = SpeculativeConfig(method="ngram", adaptive=adaptive) if most else None
    config = EngineConfig(
        model=MODEL, model_path="", max_model_len=64, num_speculative_tokens=most, speculative=speculative
    )
    policy = make_draft_policy(config)
    assert type(policy) is kind
    assert list(policy.choose([DraftState(), DraftState()], 2, 1)) == [most, most]


def test_non_adaptive_policy_always_uses_the_maximum() -> None:
    policy, state = MostDrafts(4), DraftState()
    for step in range(1, 200):
        assert list(policy.choose([state], 1, step)) == [4] and policy.next_draft_step(state) <= step
        policy.drafts_sent(state, step)
        policy.verified(state, 4, 0)

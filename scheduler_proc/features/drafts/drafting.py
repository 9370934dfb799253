"""Draft policies: choose how many drafts each request may have in the next step.

The input is recorded step times and acceptance only, so that a replay makes the same choices.
"""

from collections.abc import Iterable, Sequence

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.scheduler_proc.features.drafts import draft_state
from quire.scheduler_proc.features.drafts.draft_state import Acceptance, DraftState
from quire.scheduler_proc.requests.steady_decode import NEVER

MAX_PROBE_INTERVAL = 1024
LOOK_INTERVAL = 32
"""Interval, in steps, of measuring steps: in turn, one without drafts and one with half of them. Without this variation
the cost of drafts could not be measured."""
MIN_CHANCE = 1 / 16
"""Least acceptance of a useful draft: below it, drafts waste energy even where they cost no time."""
MIN_GAIN = 1.005
"""Least speedup by drafts. They keep requests out of steady decode, which costs time that step times do not include."""
_REMEMBERED_TRIALS = 30.0
_SHARED_TRIALS = 1000.0
_REMEMBERED_STEPS = 256.0


class DraftPolicy:
    """Chooses numbers of drafts from the results of earlier drafts. This one chooses none."""

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        """Return the number of drafts for each of ``states`` in ``step``.

        Called for every step. The choice does not depend on whether resting requests are among ``states``.

        Args:
            num_decoding: requests that decode in the step, including those in steady decode.
        """
        return [0] * len(states)

    def next_draft_step(self, state: DraftState) -> int:
        """Return the step in which the request may have drafts again; a past step if it may have some now."""
        return NEVER

    def drafts_sent(self, state: DraftState, step: int) -> None:
        """Record that ``step`` was sent with drafts for the request."""

    def verified(self, state: DraftState, verified: int, accepted: int) -> None:
        """Record a result: ``verified`` drafts existed, ``accepted`` of them were accepted."""

    def record_step_time(self, seconds: float, num_tokens: int, drafted: bool) -> None:
        """Record the duration of a step with ``num_tokens``.

        Not called for steps with a prefill: their attention and sizes differ, and one of them would outweigh all
        steps that show the cost of a draft.

        Args:
            seconds: 0 if it was not measured.
            drafted: at least one request could have drafts in the step.
        """


class MostDrafts(DraftPolicy):
    """Policy that always requests the maximum number of drafts."""

    def __init__(self, most: int) -> None:
        self._most = most

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        return [self._most] * len(states)

    def next_draft_step(self, state: DraftState) -> int:
        return 0


class DraftController(DraftPolicy):
    """Policy that maximizes tokens per second, with a cost model of steps that is fitted while they run.

    A draft is accepted with the request's probability p if all drafts before it were, so draft j gains p^j tokens. The
    batch generates E tokens in T seconds; one more draft raises E / T exactly while p^j > (seconds per token) * E / T.
    This threshold is carried from step to step (Dinkelbach's iteration). Then the policy checks whether the batch as a
    whole gains, including the fixed cost of a step with drafts; if it does not, all requests rest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times = StepTimes()
        self._shared = Acceptance(0.7, 8.0, _SHARED_TRIALS)
        self._threshold = MIN_CHANCE
        self._drafting = False

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        if not self._drafting:  # no drafts in the previous step: start from the speed of a batch without drafts
            self._set_threshold(float(num_decoding), 0.0, num_decoding)
        numbers = [int(step >= state.probe_step) if state.resting else self._number(state) for state in states]
        gain, drafts = self._expected(states, numbers)
        self._drafting = drafts > 0 and self._pays(gain, drafts, num_decoding)
        for index, state in enumerate(states):
            if not state.resting and not (self._drafting and numbers[index]):
                state.rest(step)
                numbers[index] = 0
        if self._drafting:
            self._set_threshold(num_decoding + gain, drafts, num_decoding)
        # Steps of other sizes are forced now and then. If all steps had the number of drafts that seems best, nothing
        # would show what another number costs.
        if step % LOOK_INTERVAL == LOOK_INTERVAL // 2:
            return [number // 2 for number in numbers] if step // LOOK_INTERVAL % 2 else [0] * len(numbers)
        return numbers

    def next_draft_step(self, state: DraftState) -> int:
        return state.probe_step if state.resting else 0

    def drafts_sent(self, state: DraftState, step: int) -> None:
        if state.resting:
            state.rest(step)

    def verified(self, state: DraftState, verified: int, accepted: int) -> None:
        acceptance = self._acceptance(state)
        acceptance.observe(verified, accepted)
        self._shared.observe(verified, accepted)
        if not state.resting or not verified:
            return
        if self._number(state):
            state.resting, state.interval = False, draft_state.PROBE_INTERVAL
        elif not accepted:
            state.interval = min(2 * state.interval, MAX_PROBE_INTERVAL)

    def record_step_time(self, seconds: float, num_tokens: int, drafted: bool) -> None:
        self._times.observe(seconds, num_tokens, drafted)

    def _acceptance(self, state: DraftState) -> Acceptance:
        if state.acceptance is None:
            shared = self._shared
            state.acceptance = Acceptance(shared.chance, 3.0, _REMEMBERED_TRIALS, max(shared.find_rate, 0.25))
        return state.acceptance

    def _number(self, state: DraftState) -> int:
        """Return how many drafts are worth their cost for the request.

        The first draft uses the optimistic estimate, because a resting request learns almost nothing more.
        """
        acceptance = self._acceptance(state)
        if acceptance.optimistic_chance <= self._threshold:
            return 0
        chance, number = acceptance.chance, 1
        likely = chance * chance
        while number < self._most and likely > self._threshold:
            likely *= chance
            number += 1
        return number

    def _expected(self, states: Sequence[DraftState], numbers: Sequence[int]) -> tuple[float, float]:
        """Return the expected (tokens gained, drafts computed) of all requests that do not rest."""
        gain = drafts = 0.0
        for state, number in zip(states, numbers, strict=True):
            if number and not state.resting:
                acceptance = self._acceptance(state)
                likely, own = 1.0, 0.0
                for _ in range(number):
                    likely *= acceptance.chance
                    own += likely
                gain += acceptance.find_rate * own
                drafts += acceptance.find_rate * number
        return gain, drafts

    def _pays(self, gain: float, drafts: float, num_decoding: int) -> bool:
        plain = self._times.predict(num_decoding, drafted=False)
        drafted = self._times.predict(num_decoding + drafts, drafted=True)
        return (num_decoding + gain) * plain > MIN_GAIN * num_decoding * drafted

    def _set_threshold(self, num_tokens: float, drafts: float, num_decoding: int) -> None:
        """Update the threshold. ``num_tokens``: expected output of a step with ``drafts`` drafts."""
        seconds = self._times.predict(num_decoding + drafts, drafted=drafts > 0)
        self._threshold = max(MIN_CHANCE, self._times.per_token * num_tokens / seconds)


class StepTimes:
    """Cost model of a step: a + b * tokens seconds, with a separate a for steps with drafts. Old steps lose weight.

    A slow step (a compilation, a page fault) counts as at most twice the expected time. An estimate that is much too
    high is forgotten quickly, because no step is fast by accident.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = _LinearFit(), _LinearFit()

    def observe(self, seconds: float, num_tokens: int, drafted: bool) -> None:
        if seconds <= 0.0:
            return
        kept = 1.0 - 1.0 / _REMEMBERED_STEPS
        if self._plain.weight or self._drafted.weight:
            expected = self.predict(num_tokens, drafted)
            if seconds < 0.5 * expected:
                kept = 0.5
            seconds = min(seconds, 2.0 * expected)
        self._plain.forget(kept)
        self._drafted.forget(kept)
        (self._drafted if drafted else self._plain).add(float(num_tokens), seconds)

    @property
    def per_token(self) -> float:
        """The slope b in seconds; 0 while all steps had about the same number of tokens."""
        spread = self._plain.spread + self._drafted.spread
        if spread < 0.01 * (self._plain.weight + self._drafted.weight) or spread == 0.0:
            return 0.0
        return max(0.0, (self._plain.shared + self._drafted.shared) / spread)

    def predict(self, num_tokens: float, drafted: bool) -> float:
        """Return the expected seconds of a step: positive, and 1 before the first observation."""
        plain, with_drafts, slope = self._plain, self._drafted, self.per_token
        if not plain.weight and not with_drafts.weight:
            return 1.0
        fixed = (plain if plain.weight else with_drafts).fixed(slope)
        if drafted and with_drafts.weight:
            trust = with_drafts.weight / (with_drafts.weight + 4.0)
            fixed += trust * max(0.0, with_drafts.fixed(slope) - fixed)
        return max(fixed + slope * num_tokens, 1e-9)


class _LinearFit:
    """Decaying sums of a least-squares line. ``spread``: sum of squares of x; ``shared``: sum of products with y."""

    __slots__ = ("mean_x", "mean_y", "shared", "spread", "weight")

    def __init__(self) -> None:
        self.weight = self.mean_x = self.mean_y = self.spread = self.shared = 0.0

    def forget(self, kept: float) -> None:
        self.weight *= kept
        self.spread *= kept
        self.shared *= kept

    def add(self, x: float, y: float) -> None:
        self.weight += 1.0
        off = x - self.mean_x
        self.mean_x += off / self.weight
        self.mean_y += (y - self.mean_y) / self.weight
        self.spread += off * (x - self.mean_x)
        self.shared += off * (y - self.mean_y)

    def fixed(self, slope: float) -> float:
        """Return the intercept of the line with this slope through the mean."""
        return self.mean_y - slope * self.mean_x


def make_draft_policy(config: EngineConfig) -> DraftPolicy:
    """Return the draft policy of the configuration."""
    most = config.num_speculative_tokens
    if not most:
        return DraftPolicy()
    if config.speculative is not None and config.speculative.adaptive:
        return DraftController(most)
    return MostDrafts(most)


def check_drafts_fit(config: EngineConfig) -> None:
    """Raise ConfigError unless a step has room for one token and all drafts of each request."""
    verified = 1 + config.num_speculative_tokens
    if config.max_num_batched_tokens < config.max_num_seqs * verified:
        raise ConfigError(
            f"max_num_batched_tokens must be at least max_num_seqs * (1 + num_speculative_tokens) = "
            f"{config.max_num_seqs * verified} (got {config.max_num_batched_tokens})"
        )

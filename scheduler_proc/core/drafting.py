"""How many drafts each request may have in the next step: from recorded timings and acceptance, and nothing else."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.scheduler_proc.requests import draft_state
from quire.scheduler_proc.requests.draft_state import Acceptance, DraftState

NEVER = 1 << 62
"""A step that does not come."""
MAX_PROBE_INTERVAL = 1024
LOOK_INTERVAL = 32
"""Once in so many steps no request has drafts, or all have half, by turns: else nothing shows what they cost."""
MIN_CHANCE = 1 / 16
"""A draft that is right less often is not worth its energy, however little time it takes."""
MIN_GAIN = 1.005
"""Drafts keep a request out of steady decode, which no step time shows."""
_REMEMBERED_TRIALS = 30.0
_SHARED_TRIALS = 1000.0
_REMEMBERED_STEPS = 256.0


class DraftPolicy(Protocol):
    """Decides the numbers, by what came of those before."""

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        """The number of drafts for each of ``states`` in ``step``.

        Asked for every step; what is decided does not depend on whether resting requests are among ``states``.

        Args:
            num_decoding: requests that decode in the step, those in steady decode included.
        """
        ...

    def next_draft_step(self, state: DraftState) -> int:
        """The step in which this request may have drafts again; one that is past where it has some now."""
        ...

    def drafts_sent(self, state: DraftState, step: int) -> None:
        """The request has drafts in ``step``, which is sent."""
        ...

    def verified(self, state: DraftState, verified: int, accepted: int) -> None:
        """What came of it: so many drafts there were, so many of them were right."""
        ...

    def record_step_time(self, seconds: float, num_tokens: int, drafted: bool) -> None:
        """A step's time (0 where it was not measured) for ``num_tokens``; ``drafted``: a request might have drafts.

        Not called for steps with a prefill in them: their attention and sizes are of another kind, and one of them
        would outweigh all that shows the cost of a draft.
        """
        ...


class NoDrafts:
    """Without a proposer."""

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        return [0] * len(states)

    def next_draft_step(self, state: DraftState) -> int:
        return NEVER

    def drafts_sent(self, state: DraftState, step: int) -> None:
        pass

    def verified(self, state: DraftState, verified: int, accepted: int) -> None:
        pass

    def record_step_time(self, seconds: float, num_tokens: int, drafted: bool) -> None:
        pass


class MostDrafts(NoDrafts):
    """Always as many as may be."""

    def __init__(self, most: int) -> None:
        self._most = most

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        return [self._most] * len(states)

    def next_draft_step(self, state: DraftState) -> int:
        return 0


class DraftController:
    """As many as make the most tokens per second, by a model of steps that is fitted as they run.

    A draft is right with the request's chance p if all before it were, so the j-th brings p^j tokens. The batch makes
    E tokens in T seconds; one more draft raises E / T exactly while p^j is above (seconds per token) * E / T. That
    threshold is carried from step to step (Dinkelbach's iteration). Whether the batch as a whole gains, the fixed costs
    of a step with drafts included, is asked afterwards; where it does not, all requests rest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times = StepTimes()
        self._shared = Acceptance(0.7, 8.0, _SHARED_TRIALS)
        self._threshold = MIN_CHANCE
        self._drafting = False

    def choose(self, states: Sequence[DraftState], num_decoding: int, step: int) -> Iterable[int]:
        if not self._drafting:  # none in the step before: begin from what a batch without any is worth
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
            state.acceptance = Acceptance(shared.chance, 3.0, _REMEMBERED_TRIALS, max(shared.finds, 0.25))
        return state.acceptance

    def _number(self, state: DraftState) -> int:
        """How many of its drafts are each worth their time; the first one as long as that is not ruled out.

        For a request that rests learns hardly anything any more.
        """
        acceptance = self._acceptance(state)
        if acceptance.hope <= self._threshold:
            return 0
        chance, number = acceptance.chance, 1
        likely = chance * chance
        while number < self._most and likely > self._threshold:
            likely *= chance
            number += 1
        return number

    def _expected(self, states: Sequence[DraftState], numbers: Sequence[int]) -> tuple[float, float]:
        """(tokens gained, drafts computed) by requests that do not rest, where their proposer finds something."""
        gain = drafts = 0.0
        for state, number in zip(states, numbers, strict=True):
            if number and not state.resting:
                acceptance = self._acceptance(state)
                likely, own = 1.0, 0.0
                for _ in range(number):
                    likely *= acceptance.chance
                    own += likely
                gain += acceptance.finds * own
                drafts += acceptance.finds * number
        return gain, drafts

    def _pays(self, gain: float, drafts: float, num_decoding: int) -> bool:
        plain = self._times.predict(num_decoding, drafted=False)
        drafted = self._times.predict(num_decoding + drafts, drafted=True)
        return (num_decoding + gain) * plain > MIN_GAIN * num_decoding * drafted

    def _set_threshold(self, num_tokens: float, drafts: float, num_decoding: int) -> None:
        """``num_tokens``: what a step with so many drafts brings."""
        seconds = self._times.predict(num_decoding + drafts, drafted=drafts > 0)
        self._threshold = max(MIN_CHANCE, self._times.per_token * num_tokens / seconds)


class StepTimes:
    """Seconds of a step as a + b * tokens, with an a of their own for steps with drafts; what is old is forgotten.

    One slow step (a compilation, a page fault) counts as twice what was expected at most, while a guess that has
    become much too high is forgotten fast: a step cannot be quick by mistake.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = _Line(), _Line()

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
        """b; 0 while all steps had about the same number of tokens."""
        spread = self._plain.spread + self._drafted.spread
        if spread < 0.01 * (self._plain.weight + self._drafted.weight) or spread == 0.0:
            return 0.0
        return max(0.0, (self._plain.shared + self._drafted.shared) / spread)

    def predict(self, num_tokens: float, drafted: bool) -> float:
        """Seconds, above 0; 1 while nothing is known."""
        plain, with_drafts, slope = self._plain, self._drafted, self.per_token
        if not plain.weight and not with_drafts.weight:
            return 1.0
        fixed = (plain if plain.weight else with_drafts).fixed(slope)
        if drafted and with_drafts.weight:
            trust = with_drafts.weight / (with_drafts.weight + 4.0)
            fixed += trust * max(0.0, with_drafts.fixed(slope) - fixed)
        return max(fixed + slope * num_tokens, 1e-9)


class _Line:
    """Decaying sums of a straight line's fit. ``spread``: of x around its mean; ``shared``: of x with y."""

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
        """Where the line through the mean begins."""
        return self.mean_y - slope * self.mean_x


def make_draft_policy(config: EngineConfig) -> DraftPolicy:
    """The policy that the configuration asks for."""
    most = config.num_speculative_tokens
    if not most:
        return NoDrafts()
    if config.speculative is not None and config.speculative.adaptive:
        return DraftController(most)
    return MostDrafts(most)


def check_drafts_fit(config: EngineConfig) -> None:
    """Raise ConfigError unless a step has room for each request and its drafts."""
    verified = 1 + config.num_speculative_tokens
    if config.max_num_batched_tokens < config.max_num_seqs * verified:
        raise ConfigError(
            f"max_num_batched_tokens must be at least max_num_seqs * (1 + num_speculative_tokens), which is "
            f"{config.max_num_seqs * verified}; it is {config.max_num_batched_tokens}"
        )

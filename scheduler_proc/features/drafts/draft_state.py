"""Per-request state of the draft policy: estimated acceptance, and when to try drafts again."""

from dataclasses import dataclass

PROBE_INTERVAL = 64
"""Fewest steps between two probes of a resting request. All requests probe in multiples of it, because the first draft
of a step costs the most: the step can only start when the previous sample is known."""
MAX_REJECTED_IN_A_ROW = 24
"""Steps in a row whose first draft was rejected, after which a request rests regardless of its earlier acceptance."""
_FIND_RATE_STEP = 1 / 16


class Acceptance:
    """Estimated probability that a draft token is accepted, as a mean over trials in which older trials count less.

    A trial is one draft token that a step verified. A step does not verify draft tokens after the first rejected one.

    Attributes:
        accepted, trials: number of accepted draft tokens and of trials; both decay, and their ratio is the estimate.
        find_rate: estimated share of steps in which the proposer finds a draft.
        rejected_in_a_row: steps in a row whose first draft token was rejected.
    """

    __slots__ = ("_decay", "accepted", "find_rate", "rejected_in_a_row", "trials")

    def __init__(self, chance: float, trials: float, remembered: float, find_rate: float = 1.0) -> None:
        """
        Args:
            chance: initial estimate of the probability that a draft token is accepted.
            trials: weight of the initial estimate: it counts like this many trials.
            remembered: number of trials after which the weight of a trial has fallen to 1/e.
            find_rate: initial estimate of the share of steps in which the proposer finds a draft.
        """
        self.accepted = chance * trials
        self.trials = trials
        self.find_rate = find_rate
        self.rejected_in_a_row = 0
        self._decay = 1.0 - 1.0 / remembered

    @property
    def chance(self) -> float:
        return self.accepted / self.trials

    @property
    def optimistic_chance(self) -> float:
        """An optimistic estimate of the chance, which few trials cannot rule out."""
        return 0.0 if self.rejected_in_a_row >= MAX_REJECTED_IN_A_ROW else (self.accepted + 2.0) / (self.trials + 2.0)

    def observe(self, verified: int, accepted: int) -> None:
        self.find_rate += _FIND_RATE_STEP * ((verified > 0) - self.find_rate)
        if verified:
            self.rejected_in_a_row = 0 if accepted else self.rejected_in_a_row + 1
        tried = min(accepted + 1, verified)
        for index in range(tried):
            self.accepted = self.accepted * self._decay + (index < accepted)
            self.trials = self.trials * self._decay + 1.0


@dataclass(slots=True, eq=False)
class DraftState:
    """State of the draft policy for one request.

    Attributes:
        acceptance: None until the policy first needs it.
        resting: the request gets no drafts except one probe, in ``probe_step`` or as soon after it as possible.
        interval: steps between two probes; doubled after each rejected probe.
    """

    acceptance: Acceptance | None = None
    resting: bool = False
    probe_step: int = 0
    interval: int = PROBE_INTERVAL

    def rest(self, step: int) -> None:
        """Stop drafts after ``step`` and set the next probe."""
        self.resting = True
        self.probe_step = -(-(step + self.interval) // PROBE_INTERVAL) * PROBE_INTERVAL

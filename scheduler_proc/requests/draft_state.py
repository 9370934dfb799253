"""What one request's drafts have taught: acceptance, and when to try again."""

PROBE_INTERVAL = 64
"""Steps between two single drafts of a request for which they did not pay; all probe in multiples of it, for the first
draft of a step costs the most: the step can only begin when the sample before is there."""
MAX_WRONG_IN_A_ROW = 24
"""First drafts of steps after which a request rests, whatever was right before: its text has changed."""
_FINDS_STEP = 1 / 16


class Acceptance:
    """How often a draft was right of late: a decaying mean over trials.

    A step tries drafts up to the first wrong one; those behind it say nothing.
    """

    __slots__ = ("_decay", "finds", "right", "trials", "wrong_in_a_row")

    def __init__(self, chance: float, trials: float, remembered: float, finds: float = 1.0) -> None:
        """
        Args:
            chance: believed at first, as if so many ``trials`` had shown it.
            remembered: trials after which one counts for little.
            finds: how often there is a draft at all.
        """
        self.right = chance * trials
        self.trials = trials
        self.finds = finds
        self.wrong_in_a_row = 0
        self._decay = 1.0 - 1.0 / remembered

    @property
    def chance(self) -> float:
        return self.right / self.trials

    @property
    def hope(self) -> float:
        """What the chance may well be, for all that the trials show."""
        return 0.0 if self.wrong_in_a_row >= MAX_WRONG_IN_A_ROW else (self.right + 2.0) / (self.trials + 2.0)

    def observe(self, verified: int, accepted: int) -> None:
        self.finds += _FINDS_STEP * ((verified > 0) - self.finds)
        if verified:
            self.wrong_in_a_row = 0 if accepted else self.wrong_in_a_row + 1
        tried = min(accepted + 1, verified)
        for index in range(tried):
            self.right = self.right * self._decay + (index < accepted)
            self.trials = self.trials * self._decay + 1.0


class DraftState:
    """What a request's drafts have taught.

    Attributes:
        acceptance: None before it was first asked for.
        resting: it gets none but one in ``probe_step``, or as soon after it as it can.
        interval: steps from one probe to the next; twice as long after each that was rejected.
    """

    __slots__ = ("acceptance", "interval", "probe_step", "resting")

    def __init__(self) -> None:
        self.acceptance: Acceptance | None = None
        self.resting = False
        self.probe_step = 0
        self.interval = PROBE_INTERVAL

    def rest(self, step: int) -> None:
        """No drafts after ``step`` for a while."""
        self.resting = True
        self.probe_step = -(-(step + self.interval) // PROBE_INTERVAL) * PROBE_INTERVAL

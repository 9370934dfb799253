"""What a token of a prompt takes on an engine, from its counters."""

from quire.protocol.wire.front_end_messages import Statistics

MIN_STEP_TOKENS = 128.0
"""Mean tokens per step from which the time of the steps is that of prompts: smaller steps decode."""
SMOOTHING = 0.3
"""Share of a new measurement in the mean."""


class Pace:
    """Mean seconds per token of steps that mostly compute prompts, from one Statistics to the next."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        """0 until such steps have been seen."""
        self._before = (0.0, 0.0, 0)

    def update(self, statistics: Statistics) -> None:
        tokens, worker = statistics.step_tokens, statistics.step_worker
        if tokens is None or worker is None:
            return
        now = (worker.total, tokens.total, statistics.num_steps)
        seconds, num_tokens, num_steps = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        if num_steps <= 0 or seconds <= 0 or num_tokens < MIN_STEP_TOKENS * num_steps:
            return
        found = seconds / num_tokens
        known = self.seconds_per_token
        self.seconds_per_token = found if not known else known + SMOOTHING * (found - known)

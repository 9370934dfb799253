"""How fast engines compute, each beside all of them: over the same seconds, and for steps of like size."""

from collections.abc import Sequence
from operator import mul

from quire.protocol.wire.front_end_messages import Statistics

AGED = 0.966
"""What a second leaves of the weight of earlier ones: half after 20 s."""
PRIOR_S = 5.0
"""Seconds of steps at the mean pace that each engine counts as having computed: without requests it returns to the
mean, within a minute or two."""
NUM_SIZES = 20
"""Sizes of steps that are compared with each other only: powers of two of tokens per step. Large steps take less time
per token on any device, so that without sizes an engine with more requests would seem to be faster, and get more."""


class Pace:
    """Seconds and tokens of an engine's steps by their size, the older the less."""

    def __init__(self) -> None:
        self.seconds = [0.0] * NUM_SIZES
        self.tokens = [0.0] * NUM_SIZES
        self._before: tuple[float, float, int] | None = None

    def update(self, statistics: Statistics) -> None:
        """Count the steps since the last statistics, a second ago. The first ones only begin: they may be hours old."""
        if statistics.step_tokens is None or statistics.step_worker is None:
            return
        now = statistics.step_worker.total, statistics.step_tokens.total, statistics.num_steps
        if self._before is not None:
            self.add(1.0, *(new - old for new, old in zip(now, self._before, strict=True)))
        self._before = now

    def add(self, window_s: float, seconds: float, num_tokens: float, num_steps: float) -> None:
        """Count the steps of the last ``window_s`` seconds; none if counters began at 0 again."""
        aged = AGED**window_s
        self.seconds = [aged * each for each in self.seconds]
        self.tokens = [aged * each for each in self.tokens]
        if seconds > 0 and num_tokens > 0 and num_steps > 0:
            size = min(int(num_tokens / num_steps).bit_length(), NUM_SIZES - 1)
            self.seconds[size] += min(seconds, window_s)  # a hiccup is longer, and the device not slower
            self.tokens[size] += num_tokens


def compare(paces: Sequence[Pace]) -> list[float]:
    """Return the time of each engine's steps over that which all engines together need for steps of the same sizes."""
    means = []
    for size in range(NUM_SIZES):
        tokens = sum(pace.tokens[size] for pace in paces)
        means.append(sum(pace.seconds[size] for pace in paces) / tokens if tokens else 0.0)
    return [(PRIOR_S + sum(pace.seconds)) / (PRIOR_S + sum(map(mul, means, pace.tokens))) for pace in paces]

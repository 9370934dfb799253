"""A linear cost that is fitted while it is observed."""

from collections.abc import Sequence

MEMORY = 64.0
"""Observations of full strength after which an old one has lost most of its weight."""
MIN_SECONDS, MAX_SECONDS = 1e-7, 3600.0
"""Other durations are faults of a clock or a worker, and are ignored."""
_MANY_OFF = 3
"""Observations in a row far from the expected, after which the cost counts as changed."""
_FIRM = 8.0
"""Weight below which one such observation suffices: an old cost, or the first one after a change, may be wrong."""
_PENALTY = 0.5
_SWEEPS = 4


class Fit:
    """Seconds as a weighted sum of features: decayed least squares of the relative error, with no negative weight.

    The first feature is preferred: what the observations do not tell apart is attributed to it, because the others
    have a small penalty. An observation more than 2 times off counts as 2 times off, unless several in a row are or
    little is known: then the older ones are forgotten. The sums are plain floats in a fixed order, so that every
    machine computes the same.

    Attributes:
        weight: strength of what is remembered, at most about ``MEMORY``; 0 while nothing is known.
    """

    def __init__(self, num_features: int) -> None:
        self.weight = 0.0
        self._num_off = 0
        self._coefficients = [0.0] * num_features
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._targets = [0.0] * num_features

    def predict(self, features: Sequence[float]) -> float:
        """Return the expected seconds, at least 0; 0 while nothing is known."""
        return sum(a * x for a, x in zip(self._coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float, strength: float = 1.0) -> None:
        """Learn from a duration. ``strength``: up to 1; a weaker observation counts less and replaces less."""
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # also for NaN
            return
        expected, kept = self.predict(features), 1.0 - strength / MEMORY
        if expected <= 0.0:
            expected = seconds
        elif expected / 2.0 <= seconds <= expected * 2.0:
            self._num_off = 0
        else:
            self._num_off += 1
            if self.is_firm and self._num_off < _MANY_OFF:
                seconds = min(max(seconds, expected / 2.0), expected * 2.0)
            else:
                kept = min(1.0, expected / seconds) ** 2 / (1.0 + self.weight)
                expected = seconds
        weight = strength / (expected * expected)
        self.weight = kept * self.weight + strength
        for row, x, products in zip(range(len(features)), features, self._products, strict=True):
            self._targets[row] = kept * self._targets[row] + weight * x * seconds
            for column, other in enumerate(features):
                products[column] = kept * products[column] + weight * x * other
        self._solve()

    @property
    def state(self) -> list[float]:
        """Everything that affects later predictions: the argument of ``restore``."""
        sums = [value for row in self._products for value in row]
        return [self.weight, float(self._num_off), *self._coefficients, *self._targets, *sums]

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a state. Raises ValueError if it is not one of such a fit."""
        size = len(self._coefficients)
        if len(state) != 2 + size * (2 + size) or not all(0.0 <= value < float("inf") for value in state):
            raise ValueError(f"invalid learned cost: {len(state)} numbers for {size} features")
        self.weight, self._num_off = state[0], int(state[1])
        self._coefficients, self._targets = list(state[2 : 2 + size]), list(state[2 + size : 2 + 2 * size])
        sums = state[2 + 2 * size :]
        self._products = [list(sums[row * size : (row + 1) * size]) for row in range(size)]

    @property
    def is_firm(self) -> bool:
        """Whether enough is known that one observation cannot replace it."""
        return self.weight >= _FIRM

    def age(self, weight: float) -> None:
        """Let what is known count as ``weight`` at most; predictions stay the same until the next observation."""
        if self.weight > weight:
            factor, self.weight = weight / self.weight, weight
            self._targets = [factor * value for value in self._targets]
            self._products = [[factor * value for value in row] for row in self._products]

    def _solve(self) -> None:
        """Improve the coefficients one after the other, each to its best value for the others (coordinate descent)."""
        found, more = self._coefficients, 1.0 + _PENALTY / self.weight
        for _ in range(_SWEEPS):
            for row, products in enumerate(self._products):
                if (own := products[row]) > 0.0:
                    rest = self._targets[row] - sum(a * x for a, x in zip(found, products, strict=True))
                    found[row] = max(0.0, (rest + own * found[row]) / (own * (more if row else 1.0)))

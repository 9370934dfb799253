"""The learned costs of an engine: steps with prefills, and loads from each tier."""

from collections.abc import Mapping

import msgspec

from quire.scheduler_proc.costs.fit import Fit

FULL_TOKENS, FULL_PAGES = 256, 16
"""Sizes from which an observation has full strength: smaller ones say little about long prompts."""
PROBE_INTERVAL = 32
"""Requests in a row that compute, after which a few pages are loaded nevertheless: the tier may have become faster.
While few loads of a tier were observed, also after 1, 2, 4, 8 and 16."""
AGED_WEIGHT = 2.0
"""Strength of what an earlier engine has learned: another load or device may have made it wrong."""


class CostState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine has learned, for a trace or the next start; empty lists where nothing is known.

    Attributes:
        loads: by tier.
        num_avoided: see ``Costs``.
    """

    prefill: list[float] = []
    loads: dict[str, list[float]] = {}
    num_avoided: int = 0


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """Positions to compute. ``work``: the sum over them of the number of positions before, for attention."""

    tokens: int = 0
    work: float = 0.0

    @classmethod
    def between(cls, start: int, end: int) -> "Prefill":
        return cls(end - start, (end - start) * (start + end) / 2.0)

    def __add__(self, other: "Prefill") -> "Prefill":
        return Prefill(self.tokens + other.tokens, self.work + other.work)


class Costs:
    """Learns what steps with prefills and loads take, from durations that the workers measure.

    A step takes ``a + b * tokens + c * work + d * rows`` seconds, where ``rows`` is the number of other positions in
    it; a load takes ``a + b * pages`` for each tier.

    Attributes:
        num_avoided: requests in a row that did not load although they could.
    """

    def __init__(self, state: CostState | None = None) -> None:
        """Raises ValueError if ``state`` is invalid."""
        self._prefill = Fit(4)
        self._loads: dict[str, Fit] = {}
        self.num_avoided = 0
        if state is not None:
            self.restore(state)

    @property
    def state(self) -> CostState:
        loads = {tier: fit.state for tier, fit in self._loads.items()}
        return CostState(self._prefill.state if self._prefill.weight else [], loads, self.num_avoided)

    def restore(self, state: CostState) -> None:
        """Continue from a state. Raises ValueError if it is invalid."""
        self.num_avoided = state.num_avoided
        if state.prefill:
            self._prefill.restore(state.prefill)
        for tier, numbers in state.loads.items():
            self._loads[tier] = Fit(2)
            self._loads[tier].restore(numbers)

    def age(self) -> None:
        """Begin a new engine with these costs: they decide, until the first observations confirm or replace them."""
        for fit in (self._prefill, *self._loads.values()):
            # Kept, and not dropped: the first requests after a restart would load blindly, from a tier that was known
            # to be slow.
            fit.age(AGED_WEIGHT)
        self.num_avoided = 0

    def step_took(self, prefill: Prefill, rows: int, seconds: float) -> None:
        """Learn from a step with a prefill. ``rows``: its positions of other kinds."""
        # Steps of decodes only are not observed: they would fit the constant part well and say nothing about a long
        # prompt.
        self._prefill.observe(_features(prefill, 1, rows), seconds, min(1.0, prefill.tokens / FULL_TOKENS))

    def load_took(self, tier: str, num_pages: int, seconds: float) -> None:
        """Learn from a load of pages of one tier."""
        fit = self._loads.setdefault(tier, Fit(2))
        fit.observe((float(num_pages), 1.0), seconds, min(1.0, num_pages / FULL_PAGES))

    def avoids_load(self) -> bool:
        """Count a request that computes. Returns whether to load FULL_PAGES of its pages beside it, to learn."""
        self.num_avoided += 1
        # Probes get rarer by doubling: a tier that is truly slow costs few probes, and one whose first load was unlucky
        # is tried again soon.
        if self.num_avoided & (self.num_avoided - 1) == 0 and not all(fit.is_firm for fit in self._loads.values()):
            return True
        return self.num_avoided % PROBE_INTERVAL == 0

    def knows(self, tiers: Mapping[str, int]) -> bool:
        """Whether both prefills and loads from these tiers were observed."""
        return self._prefill.weight > 0.0 and all(
            tier in self._loads and self._loads[tier].weight > 0.0 for tier, num_pages in tiers.items() if num_pages
        )

    def prefill_seconds(self, prefill: Prefill, step_tokens: int, rows: int) -> float:
        """Return the time of all steps of a prefill.

        Args:
            step_tokens: most tokens of prefills in one step.
            rows: other positions in each of these steps.
        """
        steps = -(-prefill.tokens // step_tokens)
        return self._prefill.predict(_features(prefill, steps, rows * steps))

    def load_seconds(self, pages: Mapping[str, int]) -> float:
        """Return the time of a load, without that of loads before it. ``pages``: number by tier."""
        return sum(self._loads[tier].predict((float(count), 1.0)) for tier, count in pages.items() if count)


def _features(prefill: Prefill, steps: int, rows: int) -> tuple[float, float, float, float]:
    return float(prefill.tokens), float(steps), prefill.work, float(rows)

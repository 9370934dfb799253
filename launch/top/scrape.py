"""One scrape of a server's ``/metrics``: values by name, and differences between two scrapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from quire.protocol.errors import EngineError


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of a server at one time.

    Attributes:
        time: seconds on the reader's clock.
        values: value by name without its prefix, summed over all labels. Buckets of histograms are not included.
        by_reason: values of the label ``reason`` by name.
        by_engine: values by name of each engine of a server with several, by its number; summed over other labels.
        buckets: cumulative counts by upper bound, by the histogram's name and the engine; "" without one.
        labels: of the last sample of each name.
    """

    time: float
    values: dict[str, float] = field(default_factory=dict)
    by_reason: dict[str, dict[str, float]] = field(default_factory=dict)
    by_engine: dict[str, dict[str, float]] = field(default_factory=dict)
    buckets: dict[tuple[str, str], dict[float, float]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, time: float) -> "Scrape":
        """Parse the Prometheus text format; names without a prefix and a colon are left out.

        Raises:
            EngineError: the text has another format.
        """
        scrape = cls(time)
        try:
            for name, labels, value in _samples(text):
                scrape._add(name, labels, value)
        except (ValueError, KeyError, IndexError) as error:
            raise EngineError(f"/metrics is not in the Prometheus text format: {str(error)[:100]}") from None
        return scrape

    def _add(self, name: str, labels: dict[str, str], value: float) -> None:
        if name.endswith("_bucket"):
            counts = self.buckets.setdefault((name.removesuffix("_bucket"), labels.get("engine", "")), {})
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0.0) + value
            return
        self.values[name] = self.values.get(name, 0.0) + value
        self.labels[name] = labels
        if "engine" in labels:
            of_engine = self.by_engine.setdefault(labels["engine"], {})
            of_engine[name] = of_engine.get(name, 0.0) + value
        if "reason" in labels:
            reasons = self.by_reason.setdefault(name, {})
            reasons[labels["reason"]] = reasons.get(labels["reason"], 0.0) + value

    def since(self, earlier: "Scrape", name: str) -> float | None:
        """Return how much a counter grew, or None if it is missing. A counter that fell began at 0 in between.

        With several engines it is the growth of those that both scrapes have: one may not have answered in time.
        """
        now = self.values.get(name)
        if now is None:
            return None
        of_engines = {engine: values[name] for engine, values in self.by_engine.items() if name in values}
        if not of_engines:
            return growth(now, earlier.values.get(name, 0.0))
        return sum(
            growth(value, earlier.by_engine.get(engine, {}).get(name, 0.0))
            for engine, value in of_engines.items()
            if self._compares(earlier, engine)
        )

    def _compares(self, earlier: "Scrape", engine: str) -> bool:
        """Return whether the growth of an engine's counters is known: the earlier scrape has it, or is empty."""
        return not engine or engine in earlier.by_engine or not earlier.values

    def distribution(self, earlier: "Scrape", name: str) -> "Distribution | None":
        """Return the values that a histogram counted since the earlier scrape; None if it counted none."""
        count, total = self.since(earlier, f"{name}_count"), self.since(earlier, f"{name}_sum")
        if not count or total is None:
            return None
        grown: dict[float, float] = {}
        for (histogram, engine), counts in self.buckets.items():
            if histogram == name and self._compares(earlier, engine):
                before = earlier.buckets.get((histogram, engine), {})
                for bound, value in counts.items():
                    grown[bound] = grown.get(bound, 0.0) + growth(value, before.get(bound, 0.0))
        return Distribution(count, total / count, sorted(grown.items()))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of a histogram: their number, their mean, and cumulative counts by upper bound."""

    count: float
    mean: float
    counts: list[tuple[float, float]]

    def quantile(self, share: float) -> float | None:
        """Return the quantile, interpolated within its bucket, and never above what a value has reached."""
        found, rest = None, self.mean * self.count
        wanted = share * self.count
        for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *self.counts]):
            if found is None and up_to >= wanted:
                found = low if up_to == below else low + (high - low) * (wanted - below) / (up_to - below)
            if found is not None and up_to >= self.count:
                # A value has reached this much, even if all values of the buckets below are at their upper bounds.
                return min(found, max(low, rest / (up_to - below)))
            rest -= high * (up_to - below)
        return None


def growth(now: float, before: float) -> float:
    """Return how much a counter grew. One that fell began at 0 in between."""
    return now - before if now >= before else now


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _, colon, name = sample.name.partition(":")
            if colon:
                yield name, dict(sample.labels), sample.value

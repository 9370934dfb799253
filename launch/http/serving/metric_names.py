"""Names and labels of metrics, and the families that are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.protocol.wire.front_end_messages import Histogram


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Prefix of all names, and labels of all samples."""

    prefix: str
    labels: Mapping[str, str]

    def gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def by_label(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(f"{self.prefix}:{name}", text, labels=[*self.labels, label])
        for key, value in values.items():
            family.add_metric([*self.labels.values(), key], value)
        return family

    def histogram(self, name: str, text: str, values: Histogram) -> HistogramMetricFamily:
        """Return the histogram with cumulative counts."""
        family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=list(self.labels))
        edges = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(values.counts), strict=True))
        family.add_metric(list(self.labels.values()), buckets=buckets, sum_value=values.total)
        return family

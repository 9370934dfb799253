"""Metrics of a server with several engines: their states, and what the router chose."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.frontend.http.serving.engine_metrics import MetricNames
from quire.protocol.process.restarts import Restarts
from quire.protocol.process.router_figures import RouterFigures
from quire.protocol.routing import EnginePlace, PlaceState

# Counted by the fleet, so that they survive the processes: name, HELP text, field of Restarts.
RESTARTS = (
    ("num_engine_restarts", "Number of restarts of engines.", "engine"),
    ("num_router_restarts", "Number of restarts of the router.", "router"),
)
# Metrics of the router with the label engine: kind, name, HELP text, field of RouterFigures.
BY_ENGINE = (
    (
        GaugeMetricFamily,
        "router_indexed_blocks",
        "Number of an engine's blocks in the router's index.",
        "indexed_blocks",
    ),
    (CounterMetricFamily, "router_event_gaps", "Number of times that events of an engine were missing.", "gaps"),
    (
        CounterMetricFamily,
        "router_damaged_events",
        "Number of times that an engine's blocks left the index because of a damaged event.",
        "damaged",
    ),
)


@dataclass(eq=False)
class FleetCollector(Collector):
    """Yields nothing for one engine alone.

    Attributes:
        places: the engines; empty for one engine alone.
        router: the router's figures, if it has published any.
    """

    names: MetricNames
    places: list[EnginePlace] = field(default_factory=list)
    router: RouterFigures | None = None
    restarts: Restarts = field(default_factory=Restarts)

    def collect(self) -> Iterator[Metric]:
        if not self.places:
            return
        names = self.names
        states = Counter[str](place.state for place in self.places)
        by_state = {state: states[state] for state in get_args(PlaceState)}
        yield names.by_label(GaugeMetricFamily, "num_engines", "Number of engines, by state.", "state", by_state)
        for name, text, field_name in RESTARTS:
            yield names.counter(name, text, getattr(self.restarts, field_name))
        if self.router is not None:
            yield from self._of_router(self.router)

    def _of_router(self, figures: RouterFigures) -> Iterator[Metric]:
        names, text = self.names, "Number of requests that the router sent to an engine, by the reason of its choice."
        labels = [*names.labels, "engine", "policy", "reason"]
        choices = CounterMetricFamily(f"{names.prefix}:router_choices", text, labels=labels)
        for engine, reason, number in figures.choices:
            choices.add_metric([*names.labels.values(), str(engine), figures.policy, reason], number)
        yield choices
        for kind, name, text, field_name in BY_ENGINE:
            values = {str(engine): value for engine, value in sorted(getattr(figures, field_name).items())}
            yield names.by_label(kind, name, text, "engine", values)
        text = "Number of questions to the router while no engine accepted requests."
        yield names.counter("router_unplaced", text, figures.num_unplaced)
        yield names.gauge("router_index_bytes", "Memory of the router's index in bytes.", figures.index_bytes)
        text = "Whether the router knows what an engine has cached."
        known = {str(p.engine): float(p.engine not in figures.not_indexed) for p in self.places}
        yield names.by_label(GaugeMetricFamily, "router_indexed", text, "engine", known)
        yield names.counter("router_cpu_seconds", "CPU time of the router in seconds.", figures.cpu_seconds)

    def describe(self) -> list[Metric]:
        return []

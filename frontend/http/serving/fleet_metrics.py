"""Metrics of a server with several engines: their states, and what the router chose."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.frontend.http.serving.engine_metrics import MetricNames
from quire.protocol.process.restarts import Restarts
from quire.protocol.process.router_figures import RouterFigures
from quire.protocol.routing import EnginePlace, PlaceState

# Counted by the fleet, so that they survive the processes; the paths are those of Restarts.
RESTARTS = """
counter num_engine_restarts = engine: Number of restarts of engines.
counter num_router_restarts = router: Number of restarts of the router.
"""
# Metrics of the router; the paths are those of RouterFigures.
ROUTER = """
gauge router_indexed_blocks = indexed_blocks by engine: Number of an engine's blocks in the router's index.
gauge router_index_bytes = index_bytes: Memory of the router's index in bytes.
counter router_event_gaps = gaps by engine: Number of times that events of an engine were missing.
counter router_damaged_events = damaged by engine: Number of times that an engine's blocks left the index because of a \
damaged event.
counter router_unplaced = num_unplaced: Number of questions to the router while no engine accepted requests.
counter router_cpu_seconds = cpu_seconds: CPU time of the router in seconds.
"""


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
        yield names.metric("gauge", "num_engines", "Number of engines, by state.", by_state, "state")
        yield from names.table(RESTARTS, self.restarts)
        if self.router is not None:
            yield from self._of_router(self.router)

    def _of_router(self, figures: RouterFigures) -> Iterator[Metric]:
        names, text = self.names, "Number of requests that the router sent to an engine, by the reason of its choice."
        labels = [*names.labels, "engine", "policy", "reason"]
        choices = CounterMetricFamily(f"{names.prefix}:router_choices", text, labels=labels)
        for engine, reason, number in figures.choices:
            choices.add_metric([*names.labels.values(), str(engine), figures.policy, reason], number)
        yield choices
        yield from names.table(ROUTER, figures)
        text = "Whether the router knows what an engine has cached."
        known = {p.engine: float(p.engine not in figures.not_indexed) for p in self.places}
        yield names.metric("gauge", "router_indexed", text, known, "engine")

    def describe(self) -> list[Metric]:
        return []

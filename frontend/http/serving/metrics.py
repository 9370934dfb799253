"""Prometheus metrics, with vLLM's names after the prefix.

The front end times its own requests. The scheduler's statistics are requested at each scrape, so that they cost
nothing in between. One scrape has the sums over all front ends, whichever of them answers.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.engine.client import EngineClient
from quire.frontend.http.schema.errors import STATUS_OF_CODE
from quire.frontend.http.serving.engine_metrics import EngineCollector, MetricNames, ProcessCollector
from quire.frontend.http.serving.fleet_metrics import FleetCollector
from quire.frontend.http.serving.shared_values import SharedCounter, SharedGauge, SharedHistogram, SharedValues
from quire.protocol.errors import EngineError
from quire.protocol.process.restarts import read_pids, read_restarts
from quire.protocol.process.router_figures import read_router_figures
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason, Histogram

STATISTICS_TIMEOUT_S = 2.0
LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5, 5.0)
TOKEN_BUCKETS = tuple(float(2**i) for i in range(21))
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)
OTHER = "other"
"""Label of a reason that no label is reserved for."""

# Counters of the front ends: name, HELP text, label, values of the label.
COUNTERS = (
    (
        "request_success",
        "Number of ended sequences, by finish reason.",
        "finished_reason",
        (*(reason.finish_reason for reason in EndReason), OTHER),
    ),
    (
        "admission_rejections",
        "Number of valid requests refused before generation, by error code.",
        "reason",
        (*STATUS_OF_CODE, OTHER),
    ),
    ("slow_readers", "Number of streams aborted because the client read too slowly.", "", ("",)),
)
# Gauges of the front ends: name, HELP text.
GAUGES = (
    ("num_sessions", "Number of open sessions."),
    ("num_sessions_idle", "Number of open sessions without a piece in flight."),
    ("session_token_bytes", "Bytes of the tokens of all open sessions."),
)
# Histograms of the front ends: name, HELP text, bounds of the buckets.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token.", LATENCY_BUCKETS),
    ("inter_token_latency_seconds", "Time between tokens: one mean per delta sent.", TOKEN_LATENCY_BUCKETS),
    ("e2e_request_latency_seconds", "Time from a request's arrival to its last token.", LATENCY_BUCKETS),
    ("request_queue_time_seconds", "Time from a request's arrival to its first admission.", LATENCY_BUCKETS),
    ("request_prefill_time_seconds", "Time from a request's first admission to its first token.", LATENCY_BUCKETS),
    ("request_decode_time_seconds", "Time from a request's first token to its last token.", LATENCY_BUCKETS),
    ("request_inference_time_seconds", "Time from a request's first admission to its last token.", LATENCY_BUCKETS),
    (
        "request_time_per_output_token_seconds",
        "Mean time per output token after the first, per sequence.",
        TOKEN_LATENCY_BUCKETS,
    ),
    ("request_prompt_tokens", "Prompt tokens per sequence.", TOKEN_BUCKETS),
    ("request_generation_tokens", "Output tokens per sequence.", TOKEN_BUCKETS),
    ("request_prefill_kv_computed_tokens", "Prompt tokens per sequence that needed a prefill.", TOKEN_BUCKETS),
    ("request_params_n", "Parameter n per request.", N_BUCKETS),
    ("request_params_max_tokens", "Parameter max_tokens per request that has it.", TOKEN_BUCKETS),
)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """What the metrics of one front end are named, and where they are shared.

    Attributes:
        prefix: begins every name, before a colon.
        directory: folder of the shared values and of the supervisor's counts; None: they are not shared.
        index: number of this front end.
        cache_config: labels of ``cache_config_info``.
        max_loras: most adapters of a step.
    """

    prefix: str = "quire"
    directory: Path | None = None
    index: int = 0
    cache_config: Mapping[str, str] = field(default_factory=dict)
    max_loras: int = 0


class Metrics:
    """The metrics of one front end, and the text of a scrape."""

    def __init__(
        self,
        model_name: str,
        options: MetricsOptions | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now``: the clock of ``OutputDelta.admitted``, which all processes share."""
        self.now = now
        options = options or MetricsOptions()
        names = MetricNames(options.prefix, {"model_name": model_name})
        num_counters = sum(len(labels) for *_, labels in COUNTERS)
        num_values = num_counters + len(GAUGES) + sum(len(bounds) + 2 for *_, bounds in HISTOGRAMS)
        values = SharedValues(num_values, options.directory, options.index)
        slots = iter(range(num_counters))
        counters = {
            name: {label: SharedCounter(values, next(slots)) for label in labels} for name, *_, labels in COUNTERS
        }
        self._success, self._rejections = counters["request_success"], counters["admission_rejections"]
        self._slow_readers = counters["slow_readers"][""]
        self._gauges = [SharedGauge(values, num_counters + i) for i in range(len(GAUGES))]
        self.histograms: dict[str, SharedHistogram] = {}
        at = num_counters + len(GAUGES)
        for name, _, bounds in HISTOGRAMS:
            self.histograms[name] = SharedHistogram(values, at, bounds)
            at += len(bounds) + 2
        self._directory = options.directory
        self._engine = EngineCollector(names, options.cache_config, options.max_loras)
        self._registry = CollectorRegistry()
        self._registry.register(self._engine)
        self._fleet = FleetCollector(names)
        self._registry.register(self._fleet)
        self._processes = ProcessCollector(names.labels, {"frontend": [os.getpid()]})
        self._registry.register(self._processes)
        self._registry.register(_FrontEndCollector(names, values))
        self._scrape: asyncio.Task[bytes] | None = None

    def began(self, params: SamplingParams) -> None:
        """Count a request that is submitted to the engine."""
        self.observe("request_params_n", params.n)
        if params.max_tokens is not None:
            self.observe("request_params_max_tokens", params.max_tokens)

    def observe(self, name: str, value: float) -> None:
        """``name``: of HISTOGRAMS."""
        self.histograms[name].observe(value)

    def ended(self, reason: str) -> None:
        self._success.get(reason, self._success[OTHER]).inc()

    def rejected(self, reason: str) -> None:
        """``reason``: the code of an InvalidRequest. Codes are a fixed set: clients cannot add labels."""
        self._rejections.get(reason, self._rejections[OTHER]).inc()

    def cut_slow_reader(self) -> None:
        self._slow_readers.inc()

    def set_sessions(self, num_open: int, num_idle: int, num_bytes: int) -> None:
        """``num_bytes``: of the tokens of all open sessions."""
        for gauge, value in zip(self._gauges, (num_open, num_idle, num_bytes), strict=True):
            gauge.set(value)

    async def render(self, engine: EngineClient) -> bytes:
        """Return the text of a scrape, without the scheduler's metrics if it does not respond in time.

        Concurrent scrapes share one request to the scheduler: any client may scrape, at any rate.
        """
        if self._scrape is None:
            self._scrape = asyncio.ensure_future(self._render(engine))
            self._scrape.add_done_callback(self._forget_scrape)
        return await asyncio.shield(self._scrape)

    async def _render(self, engine: EngineClient) -> bytes:
        try:
            self._engine.statistics = await asyncio.wait_for(engine.statistics_by_engine(), STATISTICS_TIMEOUT_S)
        except (EngineError, TimeoutError):
            self._engine.statistics = {}
        self._engine.has_several = bool(engine.places)
        self._fleet.places = engine.places
        if engine.places:
            self._engine.forget_others({place.engine for place in engine.places})
        if self._directory is not None:
            self._engine.restarts = self._fleet.restarts = read_restarts(self._directory)
            self._fleet.router = read_router_figures(self._directory) if engine.places else None
            self._processes.pids = read_pids(self._directory) or self._processes.pids
        return generate_latest(self._registry)

    def _forget_scrape(self, scrape: asyncio.Task[bytes]) -> None:
        self._scrape = None


class SequenceClock:
    """Latency measurement of one sequence. At most one observation per delta.

    Attributes:
        admitted, first_token, last_token: when these were, in seconds of the metrics' clock; 0 before.
        num_tokens, num_cached_tokens: output tokens so far, and prompt tokens found in the prefix cache.
        num_shared: output tokens that a fork began with, which count as prompt tokens.
    """

    __slots__ = (
        "_arrival", "_metrics", "_num_prompt_tokens", "admitted", "first_token", "last_token", "num_cached_tokens",
        "num_shared", "num_tokens",
    )  # fmt: skip

    def __init__(self, metrics: Metrics, arrival: float, num_prompt_tokens: int, num_shared: int = 0) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens + num_shared
        self.num_shared = num_shared
        self.admitted = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.num_tokens = self.num_cached_tokens = 0

    def record(self, delta: OutputDelta) -> None:
        now = self._metrics.now()
        num_tokens = delta.num_output_tokens - self.num_shared
        new = num_tokens - self.num_tokens
        self.num_cached_tokens = delta.num_cached_tokens
        if new > 0 and not self.num_tokens:
            self.first_token = now
            self.admitted = min(max(delta.admitted, self._arrival), now)
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
        elif new > 0:
            self._metrics.histograms["inter_token_latency_seconds"].observe((now - self.last_token) / new)
        if new > 0:
            self.last_token = now
            self.num_tokens = num_tokens
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Count the finish reason. Latencies are recorded only for sequences that finished by themselves."""
        metrics = self._metrics
        metrics.ended(reason)
        if reason not in ("stop", "length", "repetition"):
            return
        metrics.observe("e2e_request_latency_seconds", metrics.now() - self._arrival)
        metrics.observe("request_prompt_tokens", self._num_prompt_tokens)
        metrics.observe("request_generation_tokens", self.num_tokens)
        metrics.observe("request_prefill_kv_computed_tokens", max(self._num_prompt_tokens - self.num_cached_tokens, 0))
        if self.num_tokens:
            metrics.observe("request_queue_time_seconds", self.admitted - self._arrival)
            metrics.observe("request_prefill_time_seconds", self.first_token - self.admitted)
            metrics.observe("request_decode_time_seconds", self.last_token - self.first_token)
            metrics.observe("request_inference_time_seconds", self.last_token - self.admitted)
        if self.num_tokens > 1:
            metrics.observe(
                "request_time_per_output_token_seconds", (self.last_token - self.first_token) / (self.num_tokens - 1)
            )


class _FrontEndCollector(Collector):
    """The sums over all front ends."""

    def __init__(self, names: MetricNames, values: SharedValues) -> None:
        self._names = names
        self._values = values

    def collect(self) -> Iterator[Metric]:
        names, totals = self._names, iter(self._values.totals())
        for name, text, label, labels in COUNTERS:
            found = {each: next(totals) for each in labels}
            yield names.metric("counter", name, text, found if label else found[""], label)
        for name, text in GAUGES:
            yield names.metric("gauge", name, text, next(totals))
        for name, text, bounds in HISTOGRAMS:
            counts = [int(next(totals)) for _ in range(len(bounds) + 1)]
            yield names.metric("histogram", name, text, Histogram(list(bounds), counts, next(totals)))

    def describe(self) -> list[Metric]:
        return []

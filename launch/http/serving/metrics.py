"""Prometheus metrics: vLLM's names with the prefix ``quire:``.

The front end times its own requests. The scheduler's statistics are requested at each scrape, so that they cost
nothing in between.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.launch.frontend.answers import OutputDelta
from quire.launch.frontend.engine_client import EngineClient
from quire.protocol.errors import EngineError
from quire.protocol.wire.front_end_messages import Histogram as Seconds
from quire.protocol.wire.front_end_messages import Statistics

STATISTICS_TIMEOUT_S = 2.0
LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5, 5.0)
TOKEN_BUCKETS = tuple(float(2**i) for i in range(21))

# Metrics of the scheduler: name, HELP text, field of Statistics.
GAUGES = (
    ("num_requests_running", "Number of requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Number of requests in the waiting queue.", "num_waiting"),
    ("num_free_blocks", "Number of KV blocks that can be allocated: free, or cached and unused.", "num_free_blocks"),
    ("num_usable_blocks", "Number of KV blocks without the null block.", "num_usable_blocks"),
    ("num_cached_blocks", "Number of KV blocks whose content is in the prefix cache.", "num_cached_blocks"),
)
COUNTERS = (
    ("prompt_tokens", "Number of prompt tokens of all requests.", "prompt_tokens"),
    ("generation_tokens", "Number of generated tokens.", "generation_tokens"),
    ("prefix_cache_queries", "Number of tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Number of tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    ("num_evicted_blocks", "Number of cached blocks evicted.", "num_evicted_blocks"),
    ("num_preemptions", "Number of preemptions.", "num_preemptions"),
    ("num_requests_refused", "Number of sequences that the scheduler refused.", "num_requests_refused"),
    ("spec_decode_num_draft_tokens", "Number of draft tokens proposed.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Number of draft tokens accepted.", "num_accepted_tokens"),
    ("num_worker_restarts", "Number of restarts of the worker group.", "num_worker_restarts"),
    ("num_slow_steps", "Number of steps slower than 5 times the usual time and 0.5 s.", "num_slow_steps"),
    ("num_trace_lines_lost", "Number of trace lines dropped because the disk was too slow.", "num_trace_lines_lost"),
)
HISTOGRAMS = (
    ("kv_block_lifetime_seconds", "Time from a KV block's allocation to its eviction.", "kv_block_lifetime"),
    (
        "kv_block_idle_before_evict_seconds",
        "Time from the last use of a KV block's content to its eviction.",
        "kv_block_idle_before_evict",
    ),
    ("kv_block_reuse_gap_seconds", "Time between two hits of the same cached content.", "kv_block_reuse_gap"),
)


class Metrics:
    """The metrics registry of one front end."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._model_name = model_name
        self._scrape: asyncio.Task[bytes] | None = None
        self._success = Counter(
            "quire:request_success",
            "Number of ended sequences, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._rejections = Counter(
            "quire:admission_rejections",
            "Number of valid requests refused before generation, by error code.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._slow_readers = Counter(
            "quire:slow_readers",
            "Number of streams aborted because the client read too slowly.",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between tokens: one mean per delta sent.", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its last token.", LATENCY_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, per sequence.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per sequence.", TOKEN_BUCKETS)
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens per sequence.", TOKEN_BUCKETS
        )

    def ended(self, reason: str) -> None:
        self._success.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """``reason``: the code of an InvalidRequest. Codes are a fixed set: clients cannot add labels."""
        self._rejections.labels(self._model_name, reason).inc()

    def cut_slow_reader(self) -> None:
        self._slow_readers.inc()

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
            self._engine.statistics = await asyncio.wait_for(engine.statistics(), STATISTICS_TIMEOUT_S)
        except (EngineError, TimeoutError):
            self._engine.statistics = None
        return generate_latest(self._registry)

    def _forget_scrape(self, scrape: asyncio.Task[bytes]) -> None:
        self._scrape = None

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"quire:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model_name)


class SequenceClock:
    """Latency measurement of one sequence. At most one observation per delta, as each costs microseconds."""

    def __init__(self, metrics: Metrics, arrival: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._first = 0.0
        self._last = 0.0
        self._num_tokens = 0

    def record(self, delta: OutputDelta) -> None:
        now = self._metrics.now()
        new = delta.num_output_tokens - self._num_tokens
        if new > 0 and not self._num_tokens:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        elif new > 0:
            self._metrics.inter_token_latency.observe((now - self._last) / new)
        if new > 0:
            self._last = now
            self._num_tokens = delta.num_output_tokens
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Count the finish reason. Latencies are recorded only for sequences that finished by themselves."""
        metrics = self._metrics
        metrics.ended(reason)
        if reason not in ("stop", "length", "repetition"):
            return
        metrics.e2e_latency.observe(metrics.now() - self._arrival)
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """The scheduler's statistics at the current scrape."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.statistics: Statistics | None = None

    def collect(self) -> Iterator[Metric]:
        current = self.statistics
        if current is None:
            return
        usable = current.num_usable_blocks
        usage = 1.0 - current.num_free_blocks / usable if usable else 0.0
        for name, text, field in GAUGES:
            yield self._gauge(name, text, getattr(current, field))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use (0 to 1).", usage)
        for name, text, field in COUNTERS:
            yield self._counter(name, text, getattr(current, field))
        yield self._by_reason(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Number of waiting requests, by wait reason.",
            current.waiting_by_reason,
        )
        yield self._by_reason(
            CounterMetricFamily,
            "num_preemptions_by_reason",
            "Number of preemptions, by reason.",
            current.preemptions_by_reason,
        )
        for name, text, field in HISTOGRAMS:
            yield from self._histogram(name, text, getattr(current, field))

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"quire:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"quire:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_reason(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, int],
    ) -> Metric:
        family = kind(f"quire:{name}", text, labels=[*self._labels, "reason"])
        for reason, value in values.items():
            family.add_metric([*self._labels.values(), reason], value)
        return family

    def _histogram(self, name: str, text: str, values: Seconds | None) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram with cumulative counts, or nothing if the scheduler does not sample blocks."""
        if values is None:
            return
        family = HistogramMetricFamily(f"quire:{name}", text, labels=list(self._labels))
        edges = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(values.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=values.total)
        yield family

    def describe(self) -> list[Metric]:
        return []

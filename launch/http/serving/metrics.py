"""What a Prometheus server may read: vLLM's names under our prefix.

Requests are timed here, in the front end that answers them. What the engine counts is asked of it when a client
scrapes, so that a metric costs nothing in between.
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

# Of the scheduler's figures: our name, what it says, the field of Statistics.
GAUGES = (
    ("num_requests_running", "Requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Requests waiting for their turn.", "num_waiting"),
    ("num_free_blocks", "KV blocks that are free or only cached.", "num_free_blocks"),
    ("num_usable_blocks", "KV blocks in all.", "num_usable_blocks"),
    ("num_cached_blocks", "KV blocks whose content the prefix cache can find.", "num_cached_blocks"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens of all requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    ("num_evicted_blocks", "Cached contents forgotten because their block was needed.", "num_evicted_blocks"),
    ("num_preemptions", "Requests sent back to wait for want of blocks.", "num_preemptions"),
    ("num_requests_refused", "Sequences that the scheduler did not accept.", "num_requests_refused"),
    ("spec_decode_num_draft_tokens", "Tokens that were drafted.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that the model agreed with.", "num_accepted_tokens"),
    ("num_worker_restarts", "Groups of workers that were lost and replaced.", "num_worker_restarts"),
    ("num_slow_steps", "Steps that took five times the usual, and half a second at least.", "num_slow_steps"),
    ("num_trace_lines_lost", "Lines of the trace that the disk was too slow for.", "num_trace_lines_lost"),
)
HISTOGRAMS = (
    ("kv_block_lifetime_seconds", "From a KV block's allocation to the loss of its content.", "kv_block_lifetime"),
    ("kv_block_idle_before_evict_seconds", "From a content's last use to its loss.", "kv_block_idle_before_evict"),
    ("kv_block_reuse_gap_seconds", "Between two hits of the same content.", "kv_block_reuse_gap"),
)


class Metrics:
    """The registry of one front end, and the hands that write to it."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._model_name = model_name
        self._scrape: asyncio.Task[bytes] | None = None
        self._success = Counter(
            "quire:request_success",
            "Answers ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._rejections = Counter(
            "quire:admission_rejections",
            "Requests that were well-formed and yet not taken, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._slow_readers = Counter(
            "quire:slow_readers",
            "Streams given up because their client did not read them.",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens; one entry per delivery.", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of an answer, first token excepted.", TOKEN_LATENCY_BUCKETS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)

    def ended(self, reason: str) -> None:
        self._success.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """``reason``: the code of an InvalidRequest; they are few, and no client can write one."""
        self._rejections.labels(self._model_name, reason).inc()

    def cut_slow_reader(self) -> None:
        self._slow_readers.inc()

    async def render(self, engine: EngineClient) -> bytes:
        """The text that a scrape gets; without the engine's own figures when it does not answer.

        Scrapes that come while one is under way get what that one gets: any client may ask, and the engine has more
        to do than to answer.
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


class AnswerClock:
    """Times one answer. At most one observation per delivery, since each costs microseconds."""

    def __init__(self, metrics: Metrics, arrival: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._first = 0.0
        self._last = 0.0
        self._num_tokens = 0

    def saw(self, piece: OutputDelta) -> None:
        now = self._metrics.now()
        new = piece.num_output_tokens - self._num_tokens
        if new > 0 and not self._num_tokens:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        elif new > 0:
            self._metrics.inter_token_latency.observe((now - self._last) / new)
        if new > 0:
            self._last = now
            self._num_tokens = piece.num_output_tokens
        if piece.finish_reason is not None:
            self.end(piece.finish_reason)

    def end(self, reason: str) -> None:
        """The answer is over; aborted ones count, but not in latencies."""
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
    """The scheduler's figures, as of the scrape under way."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.statistics: Statistics | None = None

    def collect(self) -> Iterator[Metric]:
        seen = self.statistics
        if seen is None:
            return
        usable = seen.num_usable_blocks
        usage = 1.0 - seen.num_free_blocks / usable if usable else 0.0
        for name, text, field in GAUGES:
            yield self._gauge(name, text, getattr(seen, field))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", usage)
        for name, text, field in COUNTERS:
            yield self._counter(name, text, getattr(seen, field))
        yield self._by_reason(
            GaugeMetricFamily, "num_requests_waiting_by_reason", "Waiting, by what for.", seen.waiting_by_reason
        )
        yield self._by_reason(
            CounterMetricFamily, "num_preemptions_by_reason", "Preemptions, by why.", seen.preemptions_by_reason
        )
        for name, text, field in HISTOGRAMS:
            yield from self._histogram(name, text, getattr(seen, field))

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

    def _histogram(self, name: str, text: str, seen: Seconds | None) -> Iterator[HistogramMetricFamily]:
        """Nothing when the scheduler does not sample blocks. Prometheus wants counts that add up from the left."""
        if seen is None:
            return
        family = HistogramMetricFamily(f"quire:{name}", text, labels=list(self._labels))
        edges = [*(str(float(bound)) for bound in seen.bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(seen.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=seen.total)
        yield family

    def describe(self) -> list[Metric]:
        return []

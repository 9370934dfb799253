"""Metrics that are read at each scrape: the scheduler's statistics, restarts, the cache's settings, the processes."""

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.protocol.process.restarts import Restarts
from quire.protocol.wire.front_end_messages import Histogram, ProgramCounts, Statistics

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
    ("prompt_tokens_cached", "Number of prompt tokens that needed no prefill.", "prefix_cache_hit_tokens"),
    ("generation_tokens", "Number of generated tokens.", "generation_tokens"),
    ("prefix_cache_queries", "Number of tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Number of tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    ("num_evicted_blocks", "Number of cached blocks evicted.", "num_evicted_blocks"),
    ("num_preemptions", "Number of preemptions.", "num_preemptions"),
    ("num_requests_refused", "Number of sequences that the scheduler refused.", "num_requests_refused"),
    ("spec_decode_num_drafts", "Number of rounds of draft tokens.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Number of draft tokens proposed.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Number of draft tokens accepted.", "num_accepted_tokens"),
    (
        "spec_decode_num_invalid_draft_tokens",
        "Number of draft tokens that a grammar forbids, and those after them.",
        "num_invalid_draft_tokens",
    ),
    ("num_slow_steps", "Number of steps slower than 5 times the usual time and 0.5 s.", "num_slow_steps"),
    ("num_trace_lines_lost", "Number of trace lines dropped because the disk was too slow.", "num_trace_lines_lost"),
)
HISTOGRAMS = (
    ("iteration_tokens_total", "Number of tokens per step, prefill and decode together.", "step_tokens"),
    ("step_schedule_time_seconds", "Time to decide a step and send it to the workers.", "step_schedule"),
    (
        "step_worker_time_seconds",
        "Time from the sending of a step, or from the previous result if later, to its result.",
        "step_worker",
    ),
    ("step_update_time_seconds", "Time to apply the result of a step.", "step_update"),
    ("step_reply_time_seconds", "Time to send new tokens to the front ends.", "step_reply"),
    ("kv_block_lifetime_seconds", "Time from a KV block's allocation to its eviction.", "kv_block_lifetime"),
    (
        "kv_block_idle_before_evict_seconds",
        "Time from the last use of a KV block's content to its eviction.",
        "kv_block_idle_before_evict",
    ),
    ("kv_block_reuse_gap_seconds", "Time between two hits of the same cached content.", "kv_block_reuse_gap"),
)
# Metrics of a tier, with its name as the label ``tier``: kind, name, HELP text, field of TierState.
TIERS = (
    (GaugeMetricFamily, "tier_num_pages", "Number of pages of a tier.", "num_pages"),
    (GaugeMetricFamily, "tier_num_cached_blocks", "Number of pages with the content of a block.", "num_cached"),
    (GaugeMetricFamily, "tier_stopped", "Whether a tier's last stores failed, so that none begin.", "is_stopped"),
    (CounterMetricFamily, "tier_num_evicted_blocks", "Number of contents evicted from a tier.", "num_evicted"),
    (CounterMetricFamily, "tier_num_loaded_blocks", "Number of KV blocks loaded from a tier.", "num_loaded"),
    (CounterMetricFamily, "tier_num_stored_blocks", "Number of KV blocks stored to a tier.", "num_stored"),
    (
        CounterMetricFamily,
        "tier_num_failed_blocks",
        "Number of KV blocks that a copy lost or found damaged.",
        "num_failed",
    ),
    (
        CounterMetricFamily,
        "tier_num_late_loads",
        "Number of loads that were too late and computed instead.",
        "num_late",
    ),
    (
        CounterMetricFamily,
        "tier_num_unsaved_blocks",
        "Number of contents evicted before they were stored.",
        "num_unsaved",
    ),
    (CounterMetricFamily, "tier_load_seconds", "Time that loads took on the workers.", "load_seconds"),
    (CounterMetricFamily, "tier_store_seconds", "Time that stores took on the workers.", "store_seconds"),
)
# Counters of LoRA adapters: name, HELP text, field of Statistics.
ADAPTERS = (
    ("num_adapter_loads", "Number of adapters loaded to the device.", "num_adapters_loaded"),
    ("num_adapter_load_failures", "Number of loads of adapters that failed.", "num_adapters_failed"),
    ("num_adapter_evictions", "Number of adapters that left the device for others.", "num_adapters_evicted"),
    ("adapter_load_seconds", "Time that loads of adapters took on the workers.", "adapter_load_seconds"),
)
# Gauges of blocks that are kept between the turns of programs: name, HELP text, field of Statistics.
PINS = (
    ("num_pins", "Number of programs whose KV blocks are kept between two turns.", "num_pins"),
    (
        "num_pinned_blocks",
        "Number of free KV blocks that are kept for the next turn of a program.",
        "num_pinned_blocks",
    ),
)
# Counted by the supervisor, so that they survive the processes: name, HELP text, field of Restarts.
RESTARTS = (
    ("num_worker_restarts", "Number of restarts of the worker group.", "worker"),
    ("num_scheduler_restarts", "Number of restarts of the scheduler.", "scheduler"),
    ("num_front_end_restarts", "Number of restarts of front ends.", "frontend"),
)

# Metrics of processes, with the names of Prometheus's own clients: name, HELP text.
PROCESSES = (
    ("process_resident_memory_bytes", "Resident memory in bytes."),
    ("process_cpu_seconds", "User and system CPU time in seconds."),
    ("process_open_fds", "Number of open file descriptors."),
    ("process_start_time_seconds", "Start of the newest process in seconds since the epoch."),
)


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


@dataclass(eq=False)
class EngineCollector(Collector):
    """The metrics of the engine, or of several engines, at the current scrape.

    Attributes:
        cache_config: settings of the KV cache, as the labels of ``cache_config_info``.
        max_loras: most adapters of a step.
        statistics: those of each scheduler that answered; the metrics of others are left out.
        has_several: the server has several engines; each metric of a scheduler then has the label ``engine``.
    """

    names: MetricNames
    cache_config: Mapping[str, str] = field(default_factory=dict)
    max_loras: int = 0
    statistics: dict[int, Statistics] = field(default_factory=dict)
    restarts: Restarts = field(default_factory=Restarts)
    has_several: bool = False
    _pools: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of blocks and block size of each engine."""

    def collect(self) -> Iterator[Metric]:
        names = self.names
        for name, text, field_name in RESTARTS:
            yield names.counter(name, text, getattr(self.restarts, field_name))
        found: dict[str, Metric] = {}
        for engine, statistics in sorted(self.statistics.items()):
            for family in self._of_engine(engine, statistics):
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()
        if self.cache_config and self._pools:
            yield self._cache_config_info()

    def _of_engine(self, engine: int, statistics: Statistics) -> Iterator[Metric]:
        old_blocks, old_size = self._pools.get(engine, (0, 0))
        if statistics.num_usable_blocks or old_blocks:
            self._pools[engine] = (statistics.num_usable_blocks or old_blocks, statistics.block_size or old_size)
        names = self.names
        if self.has_several:
            names = MetricNames(names.prefix, {**names.labels, "engine": str(engine)})
        yield from self._of_scheduler(names, statistics)

    def forget_others(self, engines: Container[int]) -> None:
        """Forget the cache settings of engines that the server does not have any more."""
        self._pools = {engine: pool for engine, pool in self._pools.items() if engine in engines}

    def _cache_config_info(self) -> Metric:
        fixed = {**self.names.labels, **self.cache_config}
        text = "Settings of the KV cache, as labels; the value is 1."
        labels = [*fixed, "block_size", "num_gpu_blocks", "engine"]
        family = GaugeMetricFamily(f"{self.names.prefix}:cache_config_info", text, labels=labels)
        for engine, (num_blocks, block_size) in sorted(self._pools.items()):
            family.add_metric([*fixed.values(), str(block_size), str(num_blocks), str(engine)], 1.0)
        return family

    def _of_scheduler(self, names: MetricNames, current: Statistics) -> Iterator[Metric]:
        usable = current.num_usable_blocks
        usage = 1.0 - current.num_free_blocks / usable if usable else 0.0
        for name, text, field_name in GAUGES:
            yield names.gauge(name, text, getattr(current, field_name))
        yield names.gauge("kv_cache_usage_perc", "Share of the KV blocks in use (0 to 1).", usage)
        for name, text, field_name in COUNTERS:
            yield names.counter(name, text, getattr(current, field_name))
        yield names.by_label(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Number of waiting requests, by wait reason.",
            "reason",
            current.waiting_by_reason,
        )
        yield names.by_label(
            CounterMetricFamily,
            "num_preemptions_by_reason",
            "Number of preemptions, by reason.",
            "reason",
            current.preemptions_by_reason,
        )
        if by_position := current.num_accepted_tokens_per_pos:
            name, text = "spec_decode_num_accepted_tokens_per_pos", "Number of draft tokens accepted, by position."
            yield names.by_label(CounterMetricFamily, name, text, "position", by_position)
        for kind, name, text, field_name in TIERS if current.tiers else ():
            by_tier = {tier.name: getattr(tier, field_name) for tier in current.tiers}
            yield names.by_label(kind, name, text, "tier", by_tier)
        if current.tiers:
            text = "Number of requests that loaded what tiers had of their prefix, computed it, or split it."
            yield names.by_label(CounterMetricFamily, "num_load_choices", text, "choice", current.load_choices)
        if current.evictions_by_policy:
            text = "Number of cached blocks evicted, by last use (lru), or although they were pinned."
            by_policy = current.evictions_by_policy
            yield names.by_label(CounterMetricFamily, "num_evicted_blocks_by_policy", text, "policy", by_policy)
        if current.pins_ended:
            yield from _pin_metrics(names, current)
        if current.adapters_by_place:
            yield from _adapter_metrics(names, current, self.max_loras)
        if current.programs is not None:
            yield from _program_metrics(names, current.programs)
        for name, text, field_name in HISTOGRAMS:
            values = getattr(current, field_name)
            if values is not None:
                yield names.histogram(name, text, values)

    def describe(self) -> list[Metric]:
        return []


def _program_metrics(names: MetricNames, programs: ProgramCounts) -> Iterator[Metric]:
    text = "Number of programs (agents and conversations) that are remembered."
    yield names.gauge("num_programs", text, programs.num_known)
    text = "Number of requests, by how their program was found."
    yield names.by_label(CounterMetricFamily, "num_turns", text, "found_by", programs.turns)
    text = "Prompt tokens of turns that are not the first of their program."
    yield names.counter("later_turn_prompt_tokens", text, programs.num_later_prompt_tokens)
    text = "Prompt tokens of these turns that the prefix cache had."
    yield names.counter("later_turn_hit_tokens", text, programs.num_later_hit_tokens)
    if programs.num_released:
        yield names.gauge("num_programs_admitted", "Number of programs that are admitted.", programs.num_admitted)
        text = "Number of programs with requests that are not admitted."
        yield names.gauge("num_programs_waiting", text, programs.num_waiting)
        text = "Number of programs that are not admitted any more, by reason."
        yield names.by_label(CounterMetricFamily, "num_programs_released", text, "reason", programs.num_released)


def _pin_metrics(names: MetricNames, current: Statistics) -> Iterator[Metric]:
    for name, text, field_name in PINS:
        yield names.gauge(name, text, getattr(current, field_name))
    text = "Number of pins that have ended, by reason."
    yield names.by_label(CounterMetricFamily, "num_pins_ended", text, "reason", current.pins_ended)
    text = "Seconds for which the blocks of a program were kept last, by the tool that runs."
    yield names.by_label(GaugeMetricFamily, "pin_seconds", text, "tool", current.pin_seconds)
    text = "Number of times that it could not be chosen for how long blocks are kept."
    yield names.counter("num_pin_failures", text, current.num_pin_failures)


def _adapter_metrics(names: MetricNames, current: Statistics, max_loras: int) -> Iterator[Metric]:
    """Yield the metrics of adapters. The label ``adapter`` has the names with the most requests only."""
    by_place = current.adapters_by_place
    yield names.by_label(GaugeMetricFamily, "num_adapters", "Number of adapters, by place.", "place", by_place)
    for name, text, field_name in ADAPTERS:
        yield names.counter(name, text, getattr(current, field_name))
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for each in current.adapters:  # one name may stand for an old and a new content
        running[each.name] += each.num_running
        waiting[each.name] += each.num_waiting
    for kind, counts in (("running", running), ("waiting", waiting)):
        text = f"Number of {kind} requests, by adapter."
        yield names.by_label(GaugeMetricFamily, f"num_requests_{kind}_by_adapter", text, "adapter", counts)
    labels = {
        "max_lora": str(max_loras),
        "running_lora_adapters": ",".join(name for name, count in running.items() if count),
        "waiting_lora_adapters": ",".join(name for name, count in waiting.items() if count),
    }
    text = "Adapters with requests, as labels; the value is the time."
    yield MetricNames(names.prefix, {**names.labels, **labels}).gauge("lora_requests_info", text, time.time())


@dataclass(eq=False)
class ProcessCollector(Collector):
    """Memory, CPU time and descriptors of the engine's processes, with the label ``process`` for their role.

    The names have no prefix, so that dashboards made for any process fit.

    Attributes:
        pids: ids by role.
    """

    labels: Mapping[str, str]
    pids: Mapping[str, list[int]] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        found = {role: figures for role, pids in self.pids.items() if (figures := [*_figures(pids)])}
        for at, (name, text) in enumerate(PROCESSES):
            kind = CounterMetricFamily if name == "process_cpu_seconds" else GaugeMetricFamily
            combined = max if name == "process_start_time_seconds" else sum
            family = kind(name, text, labels=[*self.labels, "process"])
            for role, figures in found.items():
                family.add_metric([*self.labels.values(), role], combined([each[at] for each in figures]))
            yield family

    def describe(self) -> list[Metric]:
        return []


def _figures(pids: Iterable[int]) -> Iterator[tuple[float, ...]]:
    """Yield the values of ``PROCESSES`` for each process that still exists."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                values = (process.memory_info().rss, times.user + times.system, process.num_fds())
                yield (*values, process.create_time())
        except psutil.Error:
            continue

"""Metrics that are read at each scrape: the scheduler's statistics, restarts, the cache's settings, the processes."""

import re
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.protocol.process.restarts import Restarts
from quire.protocol.wire.front_end_messages import Histogram, Statistics

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
KINDS: Mapping[str, Kind] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
ROW = re.compile(r"(\w+) (\w+)(?: = ([\w.]+))?(?: by (\w+))?: (.+)")
"""A metric in a table: kind, name, the path of its value if that differs, the label if the value is a map by that label
and the HELP text. The rows below a path in brackets are left out if nothing is at that path. See ``value_at``."""

# Metrics of the scheduler. The paths are those of Statistics.
SCHEDULER = """
gauge num_requests_running = num_running: Number of requests in the running batch.
gauge num_requests_waiting = num_waiting: Number of requests in the waiting queue.
gauge num_free_blocks: Number of KV blocks that can be allocated: free, or cached and unused.
gauge num_usable_blocks: Number of KV blocks without the null block.
gauge num_cached_blocks: Number of KV blocks whose content is in the prefix cache.
gauge num_requests_waiting_by_reason = waiting_by_reason by reason: Number of waiting requests, by wait reason.
counter prompt_tokens: Number of prompt tokens of all requests.
counter prompt_tokens_cached = prefix_cache_hit_tokens: Number of prompt tokens that needed no prefill.
counter generation_tokens: Number of generated tokens.
counter prefix_cache_queries: Number of tokens looked up in the prefix cache.
counter prefix_cache_hits = prefix_cache_hit_tokens: Number of tokens found in the prefix cache.
counter num_evicted_blocks: Number of cached blocks evicted.
counter num_preemptions: Number of preemptions.
counter num_requests_refused: Number of sequences that the scheduler refused.
counter spec_decode_num_drafts = num_drafts: Number of rounds of draft tokens.
counter spec_decode_num_draft_tokens = num_draft_tokens: Number of draft tokens proposed.
counter spec_decode_num_accepted_tokens = num_accepted_tokens: Number of draft tokens accepted.
counter spec_decode_num_invalid_draft_tokens = num_invalid_draft_tokens: Number of draft tokens that a grammar \
forbids, and those after them.
counter num_slow_steps: Number of steps slower than 5 times the usual time and 0.5 s.
counter num_trace_lines_lost: Number of trace lines dropped because the disk was too slow.
counter num_preemptions_by_reason = preemptions_by_reason by reason: Number of preemptions, by reason.
histogram iteration_tokens_total = step_tokens: Number of tokens per step, prefill and decode together.
histogram step_schedule_time_seconds = step_schedule: Time to decide a step and send it to the workers.
histogram step_worker_time_seconds = step_worker: Time from the sending of a step, or from the previous result if \
later, to its result.
histogram step_update_time_seconds = step_update: Time to apply the result of a step.
histogram step_reply_time_seconds = step_reply: Time to send new tokens to the front ends.
histogram kv_block_lifetime_seconds = kv_block_lifetime: Time from a KV block's allocation to its eviction.
histogram kv_block_idle_before_evict_seconds = kv_block_idle_before_evict: Time from the last use of a KV block's \
content to its eviction.
histogram kv_block_reuse_gap_seconds = kv_block_reuse_gap: Time between two hits of the same cached content.

[num_accepted_tokens_per_pos]
counter spec_decode_num_accepted_tokens_per_pos = num_accepted_tokens_per_pos by position: Number of draft tokens \
accepted, by position.

[tiers]
gauge tier_num_pages = tiers.num_pages by tier: Number of pages of a tier.
gauge tier_num_cached_blocks = tiers.num_cached by tier: Number of pages with the content of a block.
gauge tier_stopped = tiers.is_stopped by tier: Whether a tier's last stores failed, so that none begin.
counter tier_num_evicted_blocks = tiers.num_evicted by tier: Number of contents evicted from a tier.
counter tier_num_loaded_blocks = tiers.num_loaded by tier: Number of KV blocks loaded from a tier.
counter tier_num_stored_blocks = tiers.num_stored by tier: Number of KV blocks stored to a tier.
counter tier_num_failed_blocks = tiers.num_failed by tier: Number of KV blocks that a copy lost or found damaged.
counter tier_num_late_loads = tiers.num_late by tier: Number of loads that were too late and computed instead.
counter tier_num_unsaved_blocks = tiers.num_unsaved by tier: Number of contents evicted before they were stored.
counter tier_load_seconds = tiers.load_seconds by tier: Time that loads took on the workers.
counter tier_store_seconds = tiers.store_seconds by tier: Time that stores took on the workers.
counter num_load_choices = load_choices by choice: Number of requests that loaded what tiers had of their prefix, \
computed it, or split it.

[evictions_by_policy]
counter num_evicted_blocks_by_policy = evictions_by_policy by policy: Number of cached blocks evicted, by last use \
(lru), or although they were pinned.

[pins_ended]
gauge num_pins: Number of programs whose KV blocks are kept between two turns.
gauge num_pinned_blocks: Number of free KV blocks that are kept for the next turn of a program.
gauge pin_seconds by tool: Seconds for which the blocks of a program were kept last, by the tool that runs.
counter num_pins_ended = pins_ended by reason: Number of pins that have ended, by reason.
counter num_pin_failures: Number of times that it could not be chosen for how long blocks are kept.

[adapters_by_place]
gauge num_adapters = adapters_by_place by place: Number of adapters, by place.
counter num_adapter_loads = num_adapters_loaded: Number of adapters loaded to the device.
counter num_adapter_load_failures = num_adapters_failed: Number of loads of adapters that failed.
counter num_adapter_evictions = num_adapters_evicted: Number of adapters that left the device for others.
counter adapter_load_seconds: Time that loads of adapters took on the workers.

[encoder_cache_tokens]
gauge encoder_cache_size_tokens = encoder_cache_tokens: Rows of images for which the encoder cache has room.
gauge encoder_cache_used_tokens = num_encoder_cache_tokens: Rows of images in the encoder cache.
counter num_encoder_runs: Number of images that workers were asked to encode.
counter num_encoder_failures: Number of images that could not be encoded.
counter num_encoder_hits: Number of images of requests whose rows were in the encoder cache.
counter num_encoder_evictions: Number of images whose rows left the encoder cache for others.
counter encoder_seconds: Time that encoding images took on the workers.

[programs]
gauge num_programs = programs.num_known: Number of programs (agents and conversations) that are remembered.
counter num_turns = programs.turns by found_by: Number of requests, by how their program was found.
counter later_turn_prompt_tokens = programs.num_later_prompt_tokens: Prompt tokens of turns that are not the first of \
their program.
counter later_turn_hit_tokens = programs.num_later_hit_tokens: Prompt tokens of these turns that the prefix cache had.

[programs.num_released]
gauge num_programs_admitted = programs.num_admitted: Number of programs that are admitted.
gauge num_programs_waiting = programs.num_waiting: Number of programs with requests that are not admitted.
counter num_programs_released = programs.num_released by reason: Number of programs that are not admitted any more, by \
reason.
"""
# Counted by the supervisor, so that they survive the processes; the paths are those of Restarts.
RESTARTS = """
counter num_worker_restarts = worker: Number of restarts of the worker group.
counter num_scheduler_restarts = scheduler: Number of restarts of the scheduler.
counter num_front_end_restarts = frontend: Number of restarts of front ends.
"""

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

    def metric(self, kind: str, name: str, text: str, value: Any, label: str = "") -> Metric:
        """Return a metric. ``value``: a number or a Histogram; for a ``label``, a map from its values to numbers."""
        family: Any = KINDS[kind](
            f"{self.prefix}:{name}", text, labels=[*self.labels, label] if label else [*self.labels]
        )
        own = list(self.labels.values())
        if label:
            for key, each in value.items():
                family.add_metric([*own, str(key)], each)
        elif isinstance(value, Histogram):
            edges = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
            buckets = list(zip(edges, accumulate(value.counts), strict=True))
            family.add_metric(own, buckets=buckets, sum_value=value.total)
        else:
            family.add_metric(own, value)
        found: Metric = family
        return found

    def table(self, table: str, source: Any) -> Iterator[Metric]:
        """Yield the metrics of a table whose values in ``source`` are not None."""
        for part in table.split("["):
            needed, _, rows = part.rpartition("]\n")
            if not needed or value_at(source, needed):
                for kind, name, path, label, text in ROW.findall(rows):
                    if (value := value_at(source, path or name)) is not None:
                        yield self.metric(kind, name, text, value, label)


def value_at(source: Any, path: str) -> Any:
    """Return the value at a path of fields; for that of a list, a map from the name of each entry. None: not there."""
    for name in path.split("."):
        if isinstance(source, list):
            source = {each.name: getattr(each, name) for each in source}
        elif source is not None:
            source = getattr(source, name)
    return source


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
        yield from names.table(RESTARTS, self.restarts)
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
        yield names.metric("gauge", "kv_cache_usage_perc", "Share of the KV blocks in use (0 to 1).", usage)
        yield from names.table(SCHEDULER, current)
        if current.adapters_by_place:
            yield from _adapter_metrics(names, current, self.max_loras)

    def describe(self) -> list[Metric]:
        return []


def _adapter_metrics(names: MetricNames, current: Statistics, max_loras: int) -> Iterator[Metric]:
    """Yield the metrics of adapters with requests. The label ``adapter`` has the names with the most of these only."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for each in current.adapters:  # one name may stand for an old and a new content
        running[each.name] += each.num_running
        waiting[each.name] += each.num_waiting
    for kind, counts in (("running", running), ("waiting", waiting)):
        text = f"Number of {kind} requests, by adapter."
        yield names.metric("gauge", f"num_requests_{kind}_by_adapter", text, counts, "adapter")
    labels = {
        "max_lora": str(max_loras),
        "running_lora_adapters": ",".join(name for name, count in running.items() if count),
        "waiting_lora_adapters": ",".join(name for name, count in waiting.items() if count),
    }
    text = "Adapters with requests, as labels; the value is the time."
    yield MetricNames(names.prefix, {**names.labels, **labels}).metric("gauge", "lora_requests_info", text, time.time())


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

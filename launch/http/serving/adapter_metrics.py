"""Metrics of LoRA adapters, from the scheduler's statistics at a scrape."""

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from quire.launch.http.serving.metric_names import MetricNames
from quire.protocol.wire.front_end_messages import Statistics

COUNTERS = (
    ("num_adapter_loads", "Number of adapters loaded to the device.", "num_adapters_loaded"),
    ("num_adapter_load_failures", "Number of loads of adapters that failed.", "num_adapters_failed"),
    ("num_adapter_evictions", "Number of adapters that left the device for others.", "num_adapters_evicted"),
    ("adapter_load_seconds", "Time that loads of adapters took on the workers.", "adapter_load_seconds"),
)


def adapter_metrics(names: MetricNames, current: Statistics, max_loras: int) -> Iterator[Metric]:
    """Yield the metrics of adapters. The label ``adapter`` has the names with the most requests only."""
    by_place = current.adapters_by_place
    yield names.by_label(GaugeMetricFamily, "num_adapters", "Number of adapters, by place.", "place", by_place)
    for name, text, field_name in COUNTERS:
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

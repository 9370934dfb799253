"""The metrics of a server whose statistics have every metric: a scrape, and the labels by name."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from front_end import EndlessEngine
from prometheus_client.parser import text_string_to_metric_families

from quire.frontend.http.serving.metrics import Metrics, MetricsOptions
from quire.protocol.process.router_figures import RouterFigures, write_router_figures
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import (
    AdapterCounts,
    Histogram,
    RequestState,
    Statistics,
    TenantState,
    TierState,
)


class FullEngine(EndlessEngine):
    """An engine whose statistics have every metric."""

    async def statistics(self) -> Statistics:
        times = Histogram([1.0], [1, 0], 0.5)
        return Statistics(
            1,
            num_usable_blocks=8,
            waiting_by_reason={"kv_blocks": 1},
            preemptions_by_reason={"kv_blocks": 1},
            kv_block_lifetime=times,
            kv_block_idle_before_evict=times,
            kv_block_reuse_gap=times,
            step_tokens=times,
            step_schedule=times,
            step_worker=times,
            step_update=times,
            step_reply=times,
            load_choices={"split": 1},
            tiers=[TierState("host", 8, 4)],
            adapters=[
                AdapterCounts("sql", "active", 2, 1),
                AdapterCounts("sql", "host", 1, 0),
                AdapterCounts("chat", "absent", 0, 4),
            ],
            adapters_by_place={"active": 1, "host": 1, "absent": 1},
            num_adapters_loaded=5,
            encoder_cache_tokens=64,
            num_encoder_runs=3,
            encoder_seconds=0.25,
            adapter_load_seconds=0.5,
            evictions_by_policy={"lru": 3, "pinned": 4},
            num_pins=2,
            num_pinned_blocks=9,
            pins_ended={"return": 3},
            pin_seconds={"none": 2.0},
            tenants=[TenantState(3, 0, 1, 0)],
            requests=[RequestState("r-0", 3, "waiting", "kv_blocks", 0.0, 7, 0, 0, 0)],
        )


def exported_labels(prefix: str) -> dict[str, set[str]]:
    """Return the labels of every exported sample, of one engine and of two with their router, by its name."""
    labels: dict[str, set[str]] = {}
    with TemporaryDirectory() as name:
        directory = Path(name)
        figures = RouterFigures(choices=[(0, "load", 1)], indexed_blocks={0: 1}, gaps={0: 1}, damaged={0: 1})
        write_router_figures(directory, figures)
        for places in ([], [EnginePlace(0), EnginePlace(1)]):
            options = MetricsOptions(prefix=prefix, directory=directory, cache_config={"cache_dtype": "bfloat16"})
            page = asyncio.run(Metrics("tiny", options).render(FullEngine(places=places))).decode()
            for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
                labels.setdefault(sample.name, set()).update(sample.labels)
    return labels

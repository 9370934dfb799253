"""The order of evictions that a configuration asks for."""

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.eviction.value import ValueEviction
from quire.scheduler_proc.kv.releases import Ranking, RecentUse


def make_eviction(
    config: EngineConfig, layout: KVLayout, num_blocks: int
) -> tuple[ValueEviction | None, Ranking | None]:
    """Return the eviction by value, if configured, and the ranking of the pool.

    The ranking is None if the pool needs neither classes nor pins. ``num_blocks`` includes the null block.
    """
    if config.eviction_policy == "value" and config.enable_prefix_caching and layout.groups:
        unit = layout.block_size
        blocks_per_unit = sum(unit / group.block_size for group in layout.groups)
        value = ValueEviction(unit, max(int((num_blocks - 1) / blocks_per_unit), 1))
        return value, value
    return None, RecentUse() if config.scheduling_policy in ("program", "continuum") else None

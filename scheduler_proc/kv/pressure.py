"""Pressure: whether too many blocks are used for another admission, with hysteresis."""

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.kv.block_pool import BlockPool


class Pressure:
    """Stops admission from ``kv_pressure_high`` used blocks on, until ``kv_pressure_low``."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._is_high = False

    def is_high(self, config: EngineConfig) -> bool:
        pool = self._pool
        used = pool.num_usable_blocks - pool.num_free_blocks
        if used < config.kv_pressure_low * pool.num_usable_blocks:
            self._is_high = False
        elif used >= config.kv_pressure_high * pool.num_usable_blocks:
            self._is_high = config.kv_pressure_low < 1
        return self._is_high

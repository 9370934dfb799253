"""Makes the mover of a loaded model's KV blocks."""

from collections.abc import Callable

from quire.kernels.cpu.native.library import load_native
from quire.protocol.config import EngineConfig
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.transfers.gpu import GpuBlocks
from quire.worker_proc.transfers.mover import BlockMover
from quire.worker_proc.transfers.pages import block_groups
from quire.worker_proc.transfers.staged import StagedMover
from quire.worker_proc.transfers.state_parts import StateParts

Mover = BlockMover | StagedMover


def make_mover(runner: ModelRunner, group: TensorParallel, config: EngineConfig, wake: Callable[[], None]) -> Mover:
    """Return the mover of a worker. ``wake``: as in ``BlockMover``."""
    meaning = [runner.forward.backend.name, group.rank, group.size, runner.forward.model.kv_meaning()]
    pool = (runner.kv_layout, runner.kv_caches, runner.num_blocks, meaning)
    native, check_tags = load_native(), config.kv_page_check == "all"
    parts = StateParts(runner.kv_layout, runner.states, meaning) if runner.kv_layout.states else None
    if config.device == "cpu":
        groups = block_groups(*pool) + ([] if parts is None else parts.groups())
        return BlockMover(native, groups, runner.num_blocks, wake, check_tags=check_tags, parts=parts)
    blocks, with_disk = GpuBlocks(*pool, parts), bool(config.ssd_cache_bytes)
    return StagedMover(native, blocks, wake, check_tags=check_tags, with_disk=with_disk, parts=parts)

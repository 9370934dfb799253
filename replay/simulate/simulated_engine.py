"""Configuration of an engine with a simulated worker (``quire serve --simulate``)."""

from pathlib import Path

import msgspec

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions
from quire.launch.supervision.supervisor import WorkerModule
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.replay.costs.parse import parse_cost
from quire.replay.simulate.worker_process import plan_pool


def simulated_engine(options: EngineOptions, cost: str, folder: Path) -> tuple[EngineConfig, WorkerModule]:
    """Return the engine's configuration and the worker to start.

    Defaults are those of a GPU. The configuration has one rank, because one process simulates all ranks; the cost model
    knows their number.

    Args:
        cost: as in ``quire replay --cost``.
        folder: checkpoint folder; its weights may be missing.

    Raises:
        ConfigError: an invalid cost, or a setting that a simulation does not support.
    """
    if options.ssd_cache_dir or options.ssd_cache_bytes:
        raise ConfigError("--simulate cannot be combined with --ssd-cache-dir: a simulated worker writes no pages")
    given = {"speculative-config": options.speculative_config, "logits-processors": options.logits_processors}
    for name, value in given.items():
        if value:
            raise ConfigError(f"--simulate cannot be combined with --{name}: there are no logits")
    device = "cuda" if options.device == "auto" else options.device
    options = msgspec.structs.replace(options, device=device, load_format="dummy")
    config = make_engine_config(options, folder=folder, simulated=True)
    ranks = config.tensor_parallel_size
    model = parse_cost(cost, tensor_parallel_size=ranks, model=config.model)
    layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
    plan_pool(config, layout, model, ranks)  # raises before any process starts if nothing fits
    arguments = ("--cost", cost, "--ranks", str(ranks))
    worker = WorkerModule("quire.replay.simulate.worker_process", arguments)
    return msgspec.structs.replace(config, tensor_parallel_size=1), worker

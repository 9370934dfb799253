"""Settings of an engine whose worker is simulated: those of the machine that it pretends to be."""

from pathlib import Path

import msgspec

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions
from quire.launch.replay.costs.parse import parse_cost
from quire.launch.replay.simulate.worker_process import plan_pool
from quire.launch.supervision.supervisor import WorkerProgram
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout


def simulated_engine(options: EngineOptions, cost: str, folder: Path) -> tuple[EngineConfig, WorkerProgram]:
    """What the scheduler runs by, and what to start as its worker.

    Defaults are a GPU's. The scheduler is told of one rank, as one process answers for all; the cost model knows how
    many there are.

    Args:
        cost: as of ``quire replay --cost``.
        folder: of a checkpoint; its weights need not be there.

    Raises:
        ConfigError: a cost that cannot be had, or a setting that no simulation follows.
    """
    given = {"speculative-config": options.speculative_config, "logits-processors": options.logits_processors}
    for name, value in given.items():
        if value:
            raise ConfigError(f"--simulate cannot be combined with --{name}: there are no logits")
    device = "cuda" if options.device == "auto" else options.device
    config = make_engine_config(msgspec.structs.replace(options, device=device, load_format="dummy"), folder=folder)
    ranks = config.tensor_parallel_size
    model = parse_cost(cost, tensor_parallel_size=ranks, model=config.model)
    layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
    plan_pool(config, layout, model, ranks)  # what does not fit is said before anything starts
    arguments = ("--cost", cost, "--ranks", str(ranks))
    program = WorkerProgram("quire.launch.replay.simulate.worker_process", arguments)
    return msgspec.structs.replace(config, tensor_parallel_size=1), program

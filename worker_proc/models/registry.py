"""Map from an architecture name in ``config.json`` to the class that runs it. Another class is one line here."""

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.models.sites import AdapterSites
from quire.worker_proc.parallel.group import TensorParallel

MODELS: dict[str, type[Decoder]] = dict.fromkeys(SUPPORTED_ARCHITECTURES, Decoder)


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_position: int | None = None,
    *,
    ops: Ops | None = None,
    parallel: TensorParallel | None = None,
    activation_dtype: torch.dtype | None = None,
    adapters: AdapterSites | None = None,
    routes: Routes | None = None,
) -> Decoder:
    """Build the model of a checkpoint with allocated, uninitialised weights. Arguments are those of ``Decoder``.

    Raises:
        ConfigError: the architecture is not supported, or its shape cannot be divided among the ranks.
    """
    if config.architecture not in MODELS:
        raise ConfigError(f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[config.architecture](
        config,
        dtype,
        device,
        max_position,
        ops=ops,
        parallel=parallel,
        activation_dtype=activation_dtype,
        adapters=adapters,
        routes=routes,
    )

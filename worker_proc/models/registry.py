"""The class that runs each architecture of ``config.json``."""

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.encoder_config import ENCODERS
from quire.protocol.model.families import FAMILIES
from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.encoders.encoder import Encoder
from quire.worker_proc.models.model import Model
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.models.sites import AdapterSites
from quire.worker_proc.parallel.group import TensorParallel


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
) -> Model:
    """Build the model of a checkpoint with allocated, uninitialised weights. Arguments are those of ``Decoder``.

    Raises:
        ConfigError: the architecture is not supported, or its shape cannot be divided among the ranks. An encoder is
            neither divided nor quantised.
    """
    if config.architecture in ENCODERS:
        if parallel is not None and parallel.size > 1:
            raise ConfigError(f"--tensor-parallel-size must be 1 for an encoder (got {parallel.size})")
        if config.weight_format is not None:
            raise ConfigError("--quantization is not supported for an encoder: omit it")
        return Encoder(config, dtype, device, max_position, ops=ops, activation_dtype=activation_dtype)
    if config.architecture not in FAMILIES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"architecture {config.architecture!r} is not supported; supported: {supported}")
    return Decoder(
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

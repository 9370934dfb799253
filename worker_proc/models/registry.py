"""The class that runs each architecture of ``config.json``."""

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model.encoder_config import ENCODERS
from quire.protocol.model.families import FAMILIES
from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from quire.worker_proc.models.additions import Additions
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.encoders.encoder import Encoder
from quire.worker_proc.models.model import Model
from quire.worker_proc.models.ops import Ops, TorchOps
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.models.weights import Build
from quire.worker_proc.parallel.group import SingleRank, TensorParallel


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_position: int | None = None,
    *,
    ops: Ops | None = None,
    parallel: TensorParallel | None = None,
    activation_dtype: torch.dtype | None = None,
    additions: Additions | None = None,
    routes: Routes | None = None,
) -> Model:
    """Build the model of a checkpoint with allocated, uninitialised weights.

    Args:
        config: shape, and settings of the family.
        dtype: dtype of the weights and, without ``activation_dtype``, of the activations. Logits are float32.
        device: device of the weights; ``meta`` is enough for counting them.
        max_position: positions that the rotary table covers (the engine's longest request); by default the model's.
        ops: element-wise operations of the device; by default torch's.
        parallel: the ranks among which the weights are sharded; by default this rank holds all of them.
        activation_dtype: dtype of the residual stream, norm weights and rotary tables.
        additions: what rows add to linear layers; None: nothing. An encoder has none.
        routes: collects the chosen experts; None: they are not kept.

    Raises:
        ConfigError: the architecture is not supported, or its shape cannot be divided among the ranks. An encoder is
            neither divided nor quantised.
    """
    ranks, activations = parallel or SingleRank(), activation_dtype or dtype
    if config.transformers is not None:
        from quire.worker_proc.models.transformers.model import TransformersModel  # imports transformers, in seconds

        own = Build(config, dtype, activations, device, ops or TorchOps(), ranks, additions=additions)
        return TransformersModel(own)
    if config.architecture in ENCODERS:
        if ranks.size > 1:
            raise ConfigError(f"--tensor-parallel-size must be 1 for an encoder (got {ranks.size})")
        if config.weight_format is not None:
            raise ConfigError("--quantization is not supported for an encoder: omit it")
        return Encoder(Build(config, dtype, activations, device, ops or TorchOps(), ranks), max_position)
    if config.architecture not in FAMILIES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"architecture {config.architecture!r} is not supported; supported: {supported}")
    build = Build(config, dtype, activations, device, ops or TorchOps(), ranks, additions=additions, routes=routes)
    return Decoder(build, max_position)

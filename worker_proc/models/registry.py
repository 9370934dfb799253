"""Architecture name in ``config.json`` → the class that runs it. A new family is one line here."""

import torch

from quire.protocol.errors import ConfigError
from quire.protocol.model_config import ModelConfig
from quire.worker_proc.models.decoder import Decoder

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, max_position: int | None = None
) -> Decoder:
    """The model of a checkpoint, its weights allocated and not yet filled.

    Raises:
        ConfigError: no class runs this architecture.
    """
    if config.architecture not in MODELS:
        raise ConfigError(f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[config.architecture](config, dtype, device, max_position)

"""Settings of models that make vectors: what an encoder cannot have, and what it needs."""

import msgspec

from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig


def for_model(options: EngineOptions, model: ModelConfig) -> EngineOptions:
    """Return the settings for this model: an encoder has no KV cache, and computes each prompt in one step.

    Raises:
        ConfigError: a setting that the model cannot have, with its flag.
    """
    if options.speculative_config is not None and not model.generates:
        raise ConfigError("--speculative-config needs a model that generates text: this one makes vectors only")
    if kv_layout(model, options.block_size, model.dtype).groups:
        return options
    for flag, value in (
        ("--enable-lora", options.enable_lora),
        ("--cpu-offload-bytes", options.cpu_offload_bytes),
        ("--ssd-cache-bytes", options.ssd_cache_bytes),
        ("--kv-events-endpoint", options.kv_events_endpoint),
    ):
        if value:
            raise ConfigError(f"{flag} cannot be used with an encoder, which has no KV cache and no adapters")
    return msgspec.structs.replace(options, enable_chunked_prefill=False, enable_prefix_caching=False)

"""Settings of models that make vectors: what an encoder cannot have, and what it needs."""

import msgspec

from quire.launch.config.declared import check_fit
from quire.launch.config.options import EngineOptions
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.settings import ENCODERS, VECTORS_ONLY


def for_model(options: EngineOptions, model: ModelConfig) -> EngineOptions:
    """Return the settings for this model: an encoder has no KV cache, and computes each prompt in one step.

    Raises:
        ConfigError: a setting that the model cannot have, with its flag.
    """
    if not model.generates:
        check_fit(options, VECTORS_ONLY)
    if kv_layout(model, options.block_size, model.dtype).groups:
        return options
    check_fit(options, ENCODERS)
    return msgspec.structs.replace(options, enable_chunked_prefill=False, enable_prefix_caching=False)

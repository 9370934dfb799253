"""The pooling of a model from its files, and from the flag that replaces it."""

from typing import Literal, TypeAlias

import msgspec

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.model.pooling_config import PoolingConfig

PoolingChoice: TypeAlias = Literal["auto", "none", "last", "mean", "cls"]


def with_pooling(model: ModelConfig, value: PoolingChoice) -> ModelConfig:
    """Return the model with the pooling of ``--pooling``; auto: that of its files.

    A model without a pooling configuration gets one for vectors of its hidden size.
    """
    if value == "auto":
        return model
    if value == "none":
        return msgspec.structs.replace(model, pooling=None)
    known = model.pooling
    if known is None:
        known = PoolingConfig(tasks=["embed", "token_embed"], normalize=True, size=model.hidden_size)
    return msgspec.structs.replace(model, pooling=msgspec.structs.replace(known, pooling=value))

"""The draft model of a configuration: planned with the memory, loaded with the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import stored_tensors
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.drafts.draft_model import DraftModel
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.startup.loader import fill_model

Build = Callable[[ModelConfig, torch.device | str], Decoder]
"""Makes a model whole, on whatever rank: a draft model is small, and cut up it would wait for sums at every layer."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a draft model will need.

    Attributes:
        config: the engine's, as if the draft model were served alone.
        layout: one group for all layers: blocks are for a row's whole text, whatever its layers look back to.
        weight_bytes: on each rank.
    """

    config: EngineConfig
    layout: KVLayout
    weight_bytes: int
    build: Build

    @property
    def block_bytes(self) -> int:
        """Its pool has a block for each block of the model's."""
        return self.layout.block_bytes


def plan_draft(config: EngineConfig, build: Build, cache_dtype: str) -> DraftPlan | None:
    """None where no draft model is asked for.

    Raises:
        ConfigError: the draft model cannot draft for the model.
    """
    speculative = config.speculative
    if speculative is None or speculative.method != "draft_model":
        return None
    model = speculative.model
    if model is None:
        raise ConfigError(f"speculative method draft_model for {_name(config.model_path)}: no draft model is named")
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"the draft model {_name(speculative.model_path)} has a vocabulary of {model.vocab_size} tokens, "
            f"the model {_name(config.model_path)} one of {config.model.vocab_size}: they must be the same"
        )
    if config.load_format != "dummy":
        try:
            stored_tensors(Path(speculative.model_path))
        except ConfigError as error:
            raise ConfigError(f"no draft model for {_name(config.model_path)}: {error}") from None
    own = msgspec.structs.replace(
        config, model=model, model_path=speculative.model_path, tensor_parallel_size=1, kv_cache_dtype=cache_dtype
    )
    layers = [layer for layer in range(model.num_layers) if model.cache_source(layer) == layer]
    group = KVGroup("full_attention", config.block_size, layers)
    layout = KVLayout([group], model.num_kv_heads, model.head_dim, cache_dtype)
    weights = sum(p.numel() * p.element_size() for p in build(model, "meta").parameters())
    return DraftPlan(own, layout, weights, build)


def load_draft(
    plan: DraftPlan, num_blocks: int, backend: AttentionBackend, device: torch.device, *, progress: bool
) -> DraftModel:
    """
    Args:
        num_blocks: of the model's pool, the null block included.
        backend: the draft model's own.

    Raises:
        ConfigError: its checkpoint will not do.
    """
    config = plan.config
    model = plan.build(config.model, device)
    fill_model(model, config, model.dtype, device, progress)
    caches = allocate_kv_caches(plan.layout, num_blocks, plan.layout.num_kv_heads, backend, device)
    sources = [config.model.cache_source(layer) for layer in range(config.model.num_layers)]
    return DraftModel(model, backend, [caches[source] for source in sources], config.block_size, num_blocks)


def _name(model_path: str) -> str:
    return repr(model_path) if model_path else "of random weights"

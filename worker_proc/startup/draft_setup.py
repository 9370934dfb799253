"""Setup of the draft model: planned with the memory, loaded with the weights."""

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
from quire.worker_proc.models.model import Model
from quire.worker_proc.startup.loader import fill_model

Build = Callable[[ModelConfig, torch.device | str], Model]
"""Builds an unsharded model on each rank: a draft model is small, and sharded it would wait for sums in every layer."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Plan for loading a draft model.

    Attributes:
        config: the engine configuration as if the draft model were served alone.
        layout: one full attention group for all layers: blocks cover all tokens of a row, even for layers with a
            window or chunks.
        weight_bytes: bytes of weights on each rank.
        build: builds the model.
    """

    config: EngineConfig
    layout: KVLayout
    weight_bytes: int
    build: Build

    @property
    def block_bytes(self) -> int:
        """Bytes of the draft model's cache per block of the model's pool: its pool has equally many blocks."""
        return self.layout.block_bytes


def plan_draft(config: EngineConfig, build: Build, cache_dtype: str) -> DraftPlan | None:
    """Return the plan of the draft model, or None if the configuration has none.

    Raises:
        ConfigError: the draft model cannot be used for the model.
    """
    speculative = config.speculative
    if speculative is None or speculative.method != "draft_model":
        return None
    model = speculative.model
    if model is None:
        raise ConfigError(f"speculative method draft_model for {_name(config.model_path)} needs a draft model")
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"the draft model {_name(speculative.model_path)} has a vocabulary of {model.vocab_size} tokens, "
            f"the model {_name(config.model_path)} one of {config.model.vocab_size}: they must be equal"
        )
    if len(model.all_kv_shapes) > 1:
        raise ConfigError(
            f"the draft model {_name(speculative.model_path)} has layers with different KV heads or head dimensions, "
            f"which a draft model must not have: choose another one"
        )
    if model.has_states:
        raise ConfigError(
            f"the draft model {_name(speculative.model_path)} has layers with recurrent states, which a draft model "
            f"must not have: choose another one"
        )
    if config.load_format != "dummy":
        try:
            stored_tensors(Path(speculative.model_path))
        except ConfigError as error:
            raise ConfigError(f"cannot read the draft model for {_name(config.model_path)}: {error}") from None
    own = msgspec.structs.replace(
        config, model=model, model_path=speculative.model_path, tensor_parallel_size=1, kv_cache_dtype=cache_dtype
    )
    layers = [layer for layer in range(model.num_layers) if model.cache_source(layer) == layer]
    group = KVGroup("full_attention" if model.latent is None else "latent_attention", config.block_size, layers)
    layout = KVLayout([group], model.num_kv_heads, model.head_dim, cache_dtype)
    weights = sum(p.numel() * p.element_size() for p in build(model, "meta").parameters())
    return DraftPlan(own, layout, weights, build)


def load_draft(
    plan: DraftPlan, num_blocks: int, backend: AttentionBackend, device: torch.device, *, progress: bool
) -> DraftModel:
    """Load the draft model.

    Args:
        num_blocks: number of blocks in the model's pool, including the null block.
        backend: attention backend of the draft model.

    Raises:
        ConfigError: the checkpoint is invalid.
    """
    config = plan.config
    if config.model.encoder is not None:
        raise ConfigError(f"draft model {_name(config.model_path)} is an encoder, which cannot generate")
    model = plan.build(config.model, device)
    fill_model(model, config, model.dtype, device, progress)
    caches = allocate_kv_caches(plan.layout, num_blocks, backend, device)
    sources = [config.model.cache_source(layer) for layer in range(config.model.num_layers)]
    return DraftModel(
        model, backend, [caches[source] for source in sources], plan.layout.groups[0].block_size, num_blocks
    )


def _name(model_path: str) -> str:
    return repr(model_path) if model_path else "with dummy weights"

"""The interface of a model, as runner and loader use it: decoders and encoders."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.protocol.model.checkpoint import StoredTensor
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention
from quire.worker_proc.models.checkpoint_names import Sources, find_tensor_sources
from quire.worker_proc.models.latent_attention import LatentAttention
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.mlp import SparseMlp
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build
from quire.worker_proc.states.calls import NO_STATES, StateStep


class Inputs(msgspec.Struct, frozen=True, eq=False):
    """What a model computes in one step: its tokens, flattened row by row in batch order.

    Attributes:
        token_ids: int64 ``[num_tokens]``.
        positions: int64 ``[num_tokens]``; where images decide them (``VisionConfig.mrope_section``) those of the rotary
            embedding, and in a step with images ``[3, num_tokens]``: in time, height and width.
        given_embeddings: indices of tokens, int64 ``[n]``, and the rows ``[n, hidden_size]`` that they have in the
            first residual stream in place of those of their ids, which must still be in the vocabulary. A family's
            embedding multiplier is not applied to them.
        added_rows: rows ``[n, hidden_size]`` that are added to the residual stream of the same tokens, one tensor
            behind each of the first layers.
        auxiliary_layers: layers whose inputs are returned too.
        states: the recurrent states of its rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    given_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    added_rows: tuple[torch.Tensor, ...] = ()
    auxiliary_layers: tuple[int, ...] = ()
    states: StateStep = NO_STATES

    @property
    def is_plain(self) -> bool:
        """Whether the step has tokens alone: only such a step can run as a recorded pass."""
        return self.given_embeddings is None and self.positions.dim() == 1 and not self.auxiliary_layers


class Outputs(msgspec.Struct, frozen=True, eq=False):
    """What a model returns of one step, ``[num_tokens, hidden_size]`` each.

    Attributes:
        hidden: hidden states after the final norm.
        auxiliary: the residual stream that enters each layer of ``Inputs.auxiliary_layers``, in their order.
    """

    hidden: torch.Tensor
    auxiliary: Sequence[torch.Tensor] = ()


class Model(Module):
    """One rank's share of a model: its weights, and the arithmetic from token ids to hidden states and heads.

    Attributes:
        dtype: dtype of the weights.
        can_be_captured: a CUDA graph or a recorded plan can hold its forward pass, which is Quire's own code and never
            waits for the device.
    """

    can_be_captured = True
    _prepacked = False

    def __init__(self, build: Build) -> None:
        self.build = build
        self.config: ModelConfig = build.config
        self.dtype = build.dtype

    def __call__(
        self, inputs: Inputs, kv_caches: Sequence[torch.Tensor], plans: Sequence[Any], backend: LayerAttention
    ) -> Outputs:
        """Run the tokens of one step through all layers.

        Args:
            kv_caches: one KV cache per layer, of the backend's shape; empty for an encoder.
            plans: one plan per layer, that of its KV group; an encoder has one plan, of all layers.
            backend: writes the KV caches and computes attention.

        Raises:
            KeyError: an auxiliary layer that the model does not have.
        """
        raise NotImplementedError

    def attention_shape(self, layer: int) -> AttentionShape:
        """Return the heads and dtype of a layer's queries on this rank."""
        raise NotImplementedError("the model keeps no KV")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits: ``[rows, hidden_size]`` → float32 ``[rows, vocab_size]``."""
        return self.logits_of(self.scores(hidden))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply by the head: ``[rows, hidden_size]`` → float32, this rank's part of the vocabulary."""
        raise NotImplementedError("the model has no head for tokens")

    def logits_of(self, scores: torch.Tensor) -> torch.Tensor:
        """Complete the result of ``scores``: scale, soft cap, and the parts of all ranks."""
        raise NotImplementedError("the model has no head for tokens")

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute a classification: ``[rows, hidden_size]`` → float32 logits ``[rows, num_labels]``."""
        raise NotImplementedError("the model has no head for labels")

    def new_states(self, num_tokens: int, *, one_row: bool) -> StateStep:
        """Return states of a step of its own, in new memory: of one row, or of rows of one token each."""
        return NO_STATES

    def pack_as_read(self) -> None:
        """Pack weights as they are loaded, where possible; call it before, and ``prepack`` afterwards."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_as_read()

    def prepack(self, *, deterministic: bool = False) -> bool:
        """Convert the loaded weights to this CPU's packed layout, and return whether all of them were converted.

        Call it once, after loading: it frees the plain weights, and nothing can be loaded afterwards.

        Args:
            deterministic: as in ``Linear.prepack``.
        """
        parts = [module for module in self.modules() if isinstance(module, SparseMlp | LatentAttention | Linear)]
        packed = [part.prepack(deterministic=deterministic) for part in parts]
        self._prepacked = any(packed)
        return all(packed)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that a checkpoint must hold, by full name, with fused tensors split.

        Raises:
            RuntimeError: the weights are prepacked.
        """
        if self._prepacked:
            raise RuntimeError("weights are already prepacked: load them before prepack()")
        return self._slots()

    def tensor_sources(self, folder: Path, stored: Mapping[str, StoredTensor]) -> Sources:
        """Return where the checkpoint has the tensors of ``weight_slots``.

        Args:
            stored: as ``stored_tensors`` returns them, renamed unless transformers computes the model.

        Raises:
            ConfigError: a tensor is missing, duplicate, not part of the model, or of the wrong shape.
        """
        return find_tensor_sources(folder, stored, self.weight_slots(), self.config)

    def check_loaded(self) -> None:
        """Raise ConfigError if the loaded model does not compute each row of a step by itself."""

    def set_kv_scales(self, scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the scales of keys and values in an fp8 cache, per layer that owns one; see ``Attention``."""
        raise NotImplementedError("the model keeps no KV")

    def kv_meaning(self) -> list[Any]:
        """Return what, besides the layout, determines the numbers that a token has in the KV cache: plain values."""
        return []

    def _slots(self) -> dict[str, WeightSlot]:
        raise NotImplementedError


def scales_of(specs: Iterable[AttentionSpec]) -> list[Any]:
    """Return the scales of keys and values of each layer, as plain values."""
    return [[None if s is None else s.tolist() for s in (spec.k_scale, spec.v_scale)] for spec in specs]

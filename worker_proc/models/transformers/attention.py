"""The attention function of models of transformers: the one place where their forward pass meets Quire's.

transformers calls an attention function with the calling module, so the state of a model is an attribute of its own
modules: two models in a process share nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from quire.protocol.model.measured_config import MeasuredConfig, MeasuredLayer
from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention

SERVED = "quire"
"""Name of the attention function. There is no mask function with this name, so that no masks are made."""

_ATTRIBUTE = "quire_attention"


@dataclass(slots=True)
class Call:
    """One call of the attention function.

    Attributes:
        module: the module that calls it.
        query: ``[1, num_heads, num_tokens, key_width]``, rotated.
        key: ``[1, num_kv_heads, num_tokens, key_width]``, rotated.
        value: ``[1, num_kv_heads, num_tokens, value_width]``.
        settings: further keyword arguments, as transformers names them.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    settings: dict[str, Any]


Attend = Callable[[Call], torch.Tensor]
"""Computes a call: ``[1, num_tokens, num_heads, value_width]``."""


def register(name: str) -> None:
    """Make an attention function known to transformers under ``name``; calling it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, _attend)


def connect(module: torch.nn.Module, attend: Attend) -> None:
    """Let ``attend`` compute the attention of a module."""
    setattr(module, _ATTRIBUTE, attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    attend: Attend = getattr(module, _ATTRIBUTE)
    return attend(Call(module, query, key, value, attention_mask, settings)), None


@dataclass(slots=True)
class Step:
    """What the layers of one model need of the step that runs; all belongs to the runner."""

    kv_caches: Sequence[torch.Tensor]
    plans: Sequence[Any]
    backend: LayerAttention


@dataclass(slots=True)
class CurrentStep:
    """The step that one model computes now; None between steps, whose plans and caches are not kept alive."""

    step: Step | None = None


@dataclass(slots=True)
class PagedAttention:
    """Attention of one layer over its paged KV cache.

    Where the widths of key and value differ, the narrower one is padded with zeros, which every dtype of the cache
    holds exactly: they add nothing to a score, and their part of the result is cut off.

    Attributes:
        layer: index of this layer; ``measured.source`` is the one whose cache and plan it uses.
        spec: settings for the backend. ``sinks`` is set at the first step, from the module.
    """

    layer: int
    measured: MeasuredLayer
    spec: AttentionSpec
    dtype: torch.dtype
    current: CurrentStep = field(repr=False)

    def __call__(self, call: Call) -> torch.Tensor:
        """As ``Attend``, writing the keys and values of a layer that owns its cache."""
        step, measured, width = self.current.step, self.measured, self.spec.head_dim
        assert step is not None, "attention outside of a step"
        if measured.sinks and self.spec.sinks is None:
            self.spec = replace(self.spec, sinks=call.settings["s_aux"].detach().float().contiguous())
        source = measured.source
        parts = [call.query] if source != self.layer else [call.query, call.key, call.value]
        padded = [part if part.shape[3] == width else F.pad(part, (0, width - part.shape[3])) for part in parts]
        qkv = torch.cat([part.transpose(1, 2) for part in padded], 2)[0].to(self.dtype)
        out = step.backend.attend(qkv, step.kv_caches[source], step.plans[source], self.spec, None)
        return out[..., : measured.value_width].to(call.query.dtype).unsqueeze(0)


def connect_layers(model: torch.nn.Module, measured: MeasuredConfig, dtype: torch.dtype) -> list[PagedAttention]:
    """Connect the modules that call attention to the KV cache; all share one ``CurrentStep``.

    Args:
        dtype: dtype of the activations.
    """
    current, layers = CurrentStep(), []
    for index, layer in enumerate(measured.own_layers or measured.layers):
        kv_heads, width = layer.kv_shape
        spec = AttentionSpec(layer.num_heads, kv_heads, width, layer.scale, layer.soft_cap)
        layers.append(PagedAttention(index, layer, spec, dtype, current))
        connect(model.get_submodule(layer.module), layers[-1])
    return layers

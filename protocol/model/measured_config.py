"""What a model class of transformers computes, as measured by running it once: the layout that everything else needs.

A config's fields have other names and defaults in each family, so they are not read. The measuring
(``worker_proc/models/transformers/measure.py``) runs in a process of its own: scheduler and front end get only its
result.
"""

from typing import Any

import msgspec


class MeasuredLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One attention call of the forward pass.

    Attributes:
        module: path of the module that calls attention, below the model.
        key_width, value_width: dimensions of a head's key (and query) and of its value.
        window: tokens that a token attends to, itself included; 0: all.
        soft_cap: as ``AttentionSpec.soft_cap``.
        sinks: each head has a learnt score without a value.
        source: index of the layer whose keys and values it reads: its own, or an earlier layer's.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    source: int
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of KV heads and their dimension in the cache, where the narrower of key and value is padded."""
        return self.num_kv_heads, max(self.key_width, self.value_width)


class MeasuredState(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the recurrent state of a layer.

    Attributes:
        module: path of the module that keeps it, below the model.
        kind: conv (the last inputs of a convolution) or recurrent.
        index: its number among those of its kind in the module's layer.
        shape: of one request's state.
        dtype: float32, for example, whatever the model's dtype; "": that of the activations.
    """

    module: str
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: str


class MeasuredConfig(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """A model class of transformers with the settings of one checkpoint.

    Attributes:
        class_name: the class, which ends in the head for tokens.
        version: version of transformers that was measured. Another one may compute something else.
        settings: text of ``config.json``, from which the class is built.
        vocab_size: number of logits.
        intermediate_size: largest output of a linear layer except the head, for the memory plan.
        max_position: number of positions.
        layers: the attention calls, in the order of the forward pass.
        replaceable: paths of linear layers and embeddings whose weights only their own code reads, with ``*`` for each
            number. Linear layers of one list had the same input, so that one product can compute them.
        linears: outputs and inputs of those linear layers but the head and lists of experts, by their paths.
        outside: path of the largest weight that no such layer has, if most weights are of that kind; otherwise "".
        states: recurrent states, in the order of the forward pass. Their layers are not among ``layers`` unless they
            attend too.
        ranks: ranks of tensor parallelism.
        own_layers: ``layers`` with the heads of one of several ranks; empty: those of ``layers``.
    """

    class_name: str
    version: str
    settings: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position: int
    layers: list[MeasuredLayer]
    replaceable: list[list[str]] = []
    linears: dict[str, tuple[int, int]] = {}
    outside: str = ""
    states: list[MeasuredState] = []
    ranks: int = 1
    own_layers: list[MeasuredLayer] = []


class DivisionQuestion(msgspec.Struct, frozen=True):
    """Asks for a measured layout on several ranks."""

    measured: MeasuredConfig
    ranks: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why a model cannot be served through transformers: half a sentence whose subject is the model."""

    reason: str


def measured_settings(measured: MeasuredConfig) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` that the measured layout determines."""
    layers = measured.layers
    shapes = [layer.kv_shape for layer in layers]
    windows = [layer.window for layer in layers]
    sources = [layer.source for layer in layers]
    return {
        "vocab_size": measured.vocab_size,
        "hidden_size": measured.hidden_size,
        "intermediate_size": measured.intermediate_size,
        "num_layers": len(layers),
        "num_heads": max(layer.num_heads for layer in layers),
        "num_kv_heads": shapes[0][0],
        "head_dim": shapes[0][1],
        "kv_shapes": [] if len(set(shapes)) == 1 else shapes,
        "windows": windows if any(windows) else [],
        "cache_sources": [] if sources == list(range(len(layers))) else sources,
        "max_position": measured.max_position,
        "attention_soft_cap": max(layer.soft_cap for layer in layers),
        "attention_sinks": any(layer.sinks for layer in layers),
        "transformers": measured,
    }

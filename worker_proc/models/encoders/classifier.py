"""Heads of encoders for classification."""

import torch

from quire.worker_proc.models.encoders.layer import Norm, linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build

_DENSE = {"bert": "model.pooler.dense", "roberta": "model.classifier.dense", "modernbert": "model.head.dense"}
_LAST = {"bert": "model.classifier", "roberta": "model.classifier.out_proj", "modernbert": "model.classifier"}


class Classifier(Module):
    """A dense layer with an activation, for ModernBERT a norm, and a product with one output for each label."""

    def __init__(self, build: Build, num_labels: int) -> None:
        encoder, hidden = build.config.encoder, build.config.hidden_size
        assert encoder is not None
        kind, activation = encoder.kind, encoder.classifier_activation
        self.dense = linear(build, [_DENSE[kind]], hidden, hidden, bias=encoder.classifier_bias, activation=activation)
        self.norm: Norm | None = None
        if kind == "modernbert":
            self.norm = Norm(build, "model.head.norm", encoder.norm_eps, bias=encoder.norm_bias)
        self.last = linear(build, [_LAST[kind]], num_labels, hidden, bias=True, float32_output=True)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, hidden_size]`` to float32 ``[rows, num_labels]``."""
        x = self.dense(hidden)
        return self.last(x if self.norm is None else self.norm(x))

    def weight_slots(self) -> dict[str, WeightSlot]:
        norm = {} if self.norm is None else self.norm.weight_slots()
        return self.dense.weight_slots() | norm | self.last.weight_slots()

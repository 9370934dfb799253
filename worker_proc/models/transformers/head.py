"""The head of a model of transformers: its own forward pass, with hidden states in place of the base model's.

So scales, soft caps and anything else between hidden states and logits need no code here.
"""

import copy
from typing import Any

import torch

from quire.worker_proc.models.transformers.build import base_name


class Head:
    """Logits of hidden states, by the ``forward`` of a class that ends in a head for tokens.

    The class is copied without its base model, and all other modules are shared with ``model``.
    """

    def __init__(self, model: Any) -> None:
        from transformers import PreTrainedModel

        name = base_name(model)
        base = getattr(model, name)

        class Given(torch.nn.Module):
            """Stands for the base model and the models in it, and returns the hidden states that it is given."""

            def __init__(self) -> None:
                super().__init__()
                self.hidden: torch.Tensor | None = None
                self.calls = 0

            def __getattr__(self, name: str) -> Any:
                found = getattr(base, name)
                return self if isinstance(found, PreTrainedModel) else found

            def forward(self, *inputs: Any, **settings: Any) -> "_Outputs":
                self.calls += 1
                assert self.hidden is not None
                return _Outputs(self.hidden)

        self._given = Given()
        self._model = copy.copy(model)
        self._model._modules = model._modules | {name: self._given}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` → ``[rows, vocab_size]``, in the dtype of the class."""
        self._given.hidden = hidden[None]
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=tokens).logits
            return logits[0]
        finally:
            self._given.hidden = None

    @property
    def calls(self) -> int:
        """How often the class has asked its base model for hidden states."""
        return self._given.calls


class _Outputs:
    """Outputs of a base model that has hidden states alone."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

"""RMS norms of a class of transformers, computed by the device's operations where these are shown to be equal."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch

from quire.worker_proc.models.ops import Ops, TorchOps
from quire.worker_proc.models.transformers.forwards import compute_by

_SCALES = (1e-4, 1e-2, 1.0, 30.0)
"""Standard deviations of the rows of the trial. In the first two, epsilon counts as much as the row's square."""

_TOLERANCE = 1e-5

Weigh = Callable[[torch.Tensor], torch.Tensor]


def use_norms(model: torch.nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Let ``ops`` compute the modules whose class is named as an RMS norm and computes one.

    Each is tried in float32 on a few rows with random weights; others stay as they are. In narrower dtypes ``ops``
    rounds once, and the class may round between its steps.

    Args:
        dtype: dtype of the activations. A weight that the class keeps in another one changes the dtype of its results.
    """
    found = {module: _norm_of(module, dtype) for module in model.modules()}
    compute_by(model, {module: partial(_normalise, module, ops, *norm) for module, norm in found.items() if norm})


def _norm_of(module: torch.nn.Module, dtype: torch.dtype) -> tuple[float, Weigh] | None:
    """Return epsilon and what the rows are multiplied by, from the weight; None if the module is no such norm."""
    weight = module._parameters.get("weight")
    if (
        not type(module).__name__.endswith("RMSNorm")
        or weight is None
        or weight.dim() != 1
        or weight.dtype is not dtype
        or len(module._parameters) > 1
        or module._buffers
        or module._modules
        or len(signature(module.forward).parameters) != 1
    ):
        return None
    found = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1]
    if len(found) != 1:
        return None
    trial = deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(_SCALES), len(weight), generator=generator) * torch.tensor(_SCALES)[:, None]
    trial.weight = torch.nn.Parameter(torch.randn(len(weight), generator=generator), requires_grad=False)
    wanted = trial(rows[None])
    for weigh in (_as_it_is, _above_one):
        if wanted.shape == rows[None].shape:
            computed = _normalise(trial, TorchOps(), found[0], weigh, rows[None])
            if torch.allclose(computed, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                return found[0], weigh
    return None


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _above_one(weight: torch.Tensor) -> torch.Tensor:
    """Families that store the distance from 1; added in float32, as they do."""
    return weight.float() + 1.0


def _normalise(module: Any, ops: Ops, eps: float, weigh: Weigh, hidden_states: torch.Tensor) -> torch.Tensor:
    """Normalise the last dimension of ``[..., width]``. Heads of a fused product need no copy: ``[1, n, heads, d]``."""
    shape = hidden_states.shape
    per_head = len(shape) == 4 and shape[0] == 1
    rows = hidden_states[0] if per_head else hidden_states.reshape(-1, shape[-1])
    return ops.rms_norm(rows, weigh(module.weight), eps).view(shape)

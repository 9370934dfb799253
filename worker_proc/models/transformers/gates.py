"""Gated feed-forward layers of a class of transformers, whose activations the device's operations compute.

``down(activation(gate(x)) * up(x))`` has another class in each family, so a module is recognised by what it computes:
its code is run with stand-ins for its three linear layers.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from inspect import signature
from typing import Any

import torch

from quire.worker_proc.models.ops import Ops, TorchOps
from quire.worker_proc.models.transformers.forwards import Forward, compute_by
from quire.worker_proc.models.transformers.linears import JoinedProduct

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_TOLERANCE = 1e-5


def use_gates(model: torch.nn.Module, products: Sequence[JoinedProduct], ops: Ops) -> None:
    """Let ``ops`` compute the gates of modules that compute nothing else between their linear layers.

    Args:
        products: the model's; a module's gate and up must share one, in this order.
    """
    of_gate = {product.modules[0]: product for product in products if len(product.modules) == 2}
    forwards: dict[torch.nn.Module, Forward] = {}
    for module in model.modules():
        linears = {name: child for name, child in module.named_children() if type(child) is torch.nn.Linear}
        found = [of_gate[child] for child in linears.values() if child in of_gate]
        if len(linears) != 3 or len(found) != 1 or len(signature(module.forward).parameters) != 1:
            continue
        (down,) = [child for child in linears.values() if child not in found[0].modules]
        activation = _activation_of(module, linears, [*found[0].modules, down])
        if activation:
            forwards[module] = partial(_gated, found[0], ops, activation, down)
    compute_by(model, forwards)


def _gated(
    product: JoinedProduct, ops: Ops, activation: str, down: torch.nn.Module, input: torch.Tensor
) -> torch.Tensor:
    gated = ops.gate(product.whole(input), activation)
    out: torch.Tensor = down.forward(gated.view(*input.shape[:-1], gated.shape[-1]))
    return out


@torch.no_grad()
def _activation_of(
    module: torch.nn.Module, linears: dict[str, torch.nn.Linear], order: Sequence[torch.nn.Module]
) -> str:
    """Return the activation of a module; "" if it computes anything but a gate. ``order``: gate, up, down."""
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down = (3 * torch.randn(1, 4, width, generator=generator) for width in (8, 64, 64, 8))
    outputs = dict(zip(order, (gate, up, down), strict=True))
    inputs: dict[torch.nn.Module, torch.Tensor] = {}

    def stand_in(layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        inputs[layer] = input
        return outputs[layer]

    trial = copy(module)
    parts: dict[str, Any] = {name: partial(stand_in, layer) for name, layer in linears.items()}
    trial._modules = module._modules | parts
    try:
        out = trial(x)
        of_gate, of_up, found = (inputs[layer] for layer in order)
        if of_gate is not x or of_up is not x or not torch.equal(out, down):
            return ""
        for activation in _ACTIVATIONS:
            expected = TorchOps().gate(torch.cat([gate, up], -1), activation)
            if torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return activation
    except Exception:  # any code of the library: it is then not such a module, and stays as it is
        return ""
    return ""

"""The quantised experts of a layer as one weight, for a kernel that computes all of them."""

from collections.abc import Sequence

import torch

from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.dense.packed_linear import KINDS, MIN_GROUP_SIZE, accepts
from quire.protocol.errors import ConfigError
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.module import Module


def stack_experts(linears: Sequence[Module], layer: str) -> ScaledWeight:
    """Return a weight with the rows of all experts, and let each expert's layer hold its part of that memory.

    Call it before weights are loaded: their present values are lost.

    Raises:
        ConfigError: the kernel does not compute this format, or it differs between the experts.
    """
    same = [each for each in linears if isinstance(each, QuantisedLinear)]
    if len(same) < len(linears) or any(each.form != same[0].form for each in same):
        raise _unsupported(layer, "their types differ, or are types of GGUF files")
    weight, form = same[0].scaled_weight(), same[0].form
    if form.int8_activations or not accepts(weight):
        rounded = " with activations rounded to int8" if form.int8_activations else ""
        raise _unsupported(layer, f"{weight.kind} in groups of {weight.group_size}{rounded}")
    codes, scales, zeros = (_whole(part, len(same)) for part in (weight.codes, weight.scales, weight.zeros))
    assert codes is not None and scales is not None
    for expert, linear in enumerate(same):
        rows = slice(expert * len(weight.codes), (expert + 1) * len(weight.codes))
        linear.move(codes[rows], scales[rows], None if zeros is None else zeros[rows])
    return ScaledWeight(weight.kind, codes, scales, weight.group_size, zeros)


def _whole(part: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if part is None else part.new_empty(count * len(part), *part.shape[1:])


def _unsupported(layer: str, found: str) -> ConfigError:
    return ConfigError(
        f"{layer}: these experts need --device cpu ({found}); supported on a GPU: {', '.join(KINDS)}, with one group "
        f"or groups of a multiple of {MIN_GROUP_SIZE} inputs"
    )

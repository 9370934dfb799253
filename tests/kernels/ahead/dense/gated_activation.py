"""Variants of the gated activation kernel to compile ahead of time."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.dense import gated_activation
from quire.kernels.dense.gated_activation_triton import gated_activation_kernel


def variants() -> Iterator[Variant]:
    for activation in ("gelu", "swiglu_oai"):
        yield Variant(
            name=f"gated_activation bf16 {activation}",
            kernel=gated_activation_kernel,
            types={"gate_up": "*bf16", "out": "*bf16"},
            constants=gated_activation.launch_constants(14336, activation),
            options={},
        )

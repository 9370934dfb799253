"""Variants of the expert kernels to compile ahead of time."""

from collections.abc import Iterator

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe import fused_experts, fused_experts_triton


def variants() -> Iterator[Variant]:
    # Few and many pairs per expert: with many, the products' accumulators may not fit in registers.
    for dtype, tile_pairs, activation in [
        (torch.bfloat16, 16, "silu"),
        (torch.bfloat16, 128, "swiglu_oai"),
    ]:
        element = "*" + TRITON_TYPES[dtype]
        names = ("x", "w13", "w2", "bias13", "bias2", "gated", "results", "out")
        types = dict.fromkeys(names, element) | {"pairs": "*i32", "tile_experts": "*i32", "weights": "*fp32"}
        sizes = (dtype, tile_pairs, 2880 if activation == "swiglu_oai" else 2048, 768)
        up = fused_experts.launch_constants(*sizes, down=False)
        down = fused_experts.launch_constants(*sizes, down=True)
        bias = {"HAS_BIAS": int(activation == "swiglu_oai")}
        up |= bias | {"ACTIVATION": ACTIVATIONS[activation]}
        options = fused_experts.launch_options(dtype, tile_pairs)
        name = f"experts {element[1:]} tile={tile_pairs}"
        yield Variant(f"{name} up {activation}", fused_experts_triton.gate_up_kernel, types, up, options)
        yield Variant(f"{name} down", fused_experts_triton.down_kernel, types, down | bias, options)
    constants = fused_experts.sum_launch_constants(2048, 8)
    types |= {"expert_ids": "*i32"}
    yield Variant("experts bf16 sum of 8", fused_experts_triton.sum_experts_kernel, types, constants, {})

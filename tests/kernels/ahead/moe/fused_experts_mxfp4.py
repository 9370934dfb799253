"""Variants of the MXFP4 expert kernels to compile ahead of time, in gpt-oss's sizes."""

from collections.abc import Iterator

import torch
from kernel_variant import Variant

from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe import fused_experts_mxfp4, fused_experts_mxfp4_triton


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("x", "bias13", "bias2", "gated", "results"), "*bf16")
    types |= dict.fromkeys(("blocks", "scales"), "*u8") | dict.fromkeys(("pairs", "tile_experts"), "*i32")
    types |= {"weights": "*fp32"}
    # Only small tiles: MAX_TILE_PAIRS takes as long to compile as all other variants together.
    tile_pairs = 16
    constants = fused_experts_mxfp4.launch_constants(torch.bfloat16, tile_pairs, 2880, 2880) | {"HAS_BIAS": 1}
    options = fused_experts_mxfp4.launch_options()
    up, down = fused_experts_mxfp4_triton.gate_up_mxfp4_kernel, fused_experts_mxfp4_triton.down_mxfp4_kernel
    activation = {"ACTIVATION": ACTIVATIONS["swiglu_oai"]}
    yield Variant(f"experts mxfp4 bf16 tile={tile_pairs} up", up, types, constants | activation, options)
    yield Variant(f"experts mxfp4 bf16 tile={tile_pairs} down", down, types, constants, options)

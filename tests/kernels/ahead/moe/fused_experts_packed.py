"""Variants of the packed expert kernels to compile ahead of time, for few pairs of an expert and many."""

from collections.abc import Iterator

import torch
from kernel_variant import Variant

from quire.kernels.dense import packed_linear
from quire.kernels.dense.gated_activation import ACTIVATIONS
from quire.kernels.moe import fused_experts_packed, fused_experts_packed_triton


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("x", "scales", "gated", "results"), "*bf16") | {"zeros": "*i8", "weights": "*fp32"}
    types |= dict.fromkeys(("pairs", "tile_experts"), "*i32")
    for kind, tile_pairs, group_size in [("int4", 16, 128), ("int4", 64, 32), ("int8", 64, 0)]:
        constants = packed_linear.launch_constants(kind, torch.bfloat16, tile_pairs, 2048, group_size)
        constants |= {"HAS_ZEROS": int(kind == "int4")}
        options = fused_experts_packed.launch_options(tile_pairs)
        codes = {"codes": "*i8" if kind == "int8" else "*u8"}
        name = f"experts {kind} bf16 tile={tile_pairs} group={group_size or 'all'}"
        kernels = fused_experts_packed_triton
        first = constants | {"ACTIVATION": ACTIVATIONS["silu"]}
        yield Variant(f"{name} up", kernels.gate_up_packed_kernel, types | codes, first, options)
        yield Variant(f"{name} down", kernels.down_packed_kernel, types | codes, constants, options)

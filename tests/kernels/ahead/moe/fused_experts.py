"""Variants of the expert kernels to compile ahead of time: each form of weights, few pairs of an expert and many."""

from collections.abc import Iterator

import torch
from kernel_variant import Variant

from quire.kernels.dense import packed_linear
from quire.kernels.moe import fused_experts, fused_experts_mxfp4, fused_experts_packed
from quire.kernels.moe.fused_experts_triton import experts_kernel, sum_experts_kernel

DTYPE = torch.bfloat16


def products(
    name: str, codes: str, first: dict[str, int], second: dict[str, int], options: dict[str, int], oai: bool = False
) -> Iterator[Variant]:
    """Yield both products; ``oai``: in gpt-oss's sizes, with its activation and biases."""
    types = dict.fromkeys(("x", "scales", "bias", "out"), "*bf16") | {"zeros": "*i8", "weights": "*fp32"}
    types |= dict.fromkeys(("pairs", "tile_experts"), "*i32") | {"codes": codes}
    if "mxfp4" in name:
        types["scales"] = "*u8"
    activation, hidden_size, width = (
        ("swiglu_oai", 2880, 2880 if "mxfp4" in name else 768) if oai else ("silu", 2048, 768)
    )
    for down, form in ((False, first), (True, second)):
        constants = fused_experts.product_constants(activation, down, 8, hidden_size, width, has_bias=oai) | form
        yield Variant(f"experts {name} {'down' if down else 'up'}", experts_kernel, types, constants, options)


def variants() -> Iterator[Variant]:
    # With many pairs, the products' accumulators may not fit in registers.
    for tile_pairs, oai in ((16, False), (128, True)):
        both = [fused_experts.launch_constants(DTYPE, tile_pairs, down) for down in (False, True)]
        options = fused_experts.launch_options(DTYPE, tile_pairs)
        yield from products(f"bf16 tile={tile_pairs}", "*bf16", *both, options, oai)
    # Only small tiles: MAX_TILE_PAIRS takes as long to compile as all other variants together.
    form = fused_experts_mxfp4.launch_constants(DTYPE, 16)
    yield from products("mxfp4 bf16 tile=16", "*u8", form, form, fused_experts_mxfp4.launch_options(), oai=True)
    for kind, tile_pairs, group_size in [("int4", 16, 128), ("int4", 64, 32), ("int8", 64, 0)]:
        form = packed_linear.launch_constants(kind, DTYPE, tile_pairs, 2048, group_size)
        form |= {"HAS_ZEROS": int(kind == "int4")}
        name = f"{kind} bf16 tile={tile_pairs} group={group_size or 'all'}"
        codes = "*i8" if kind == "int8" else "*u8"
        yield from products(name, codes, form, form, fused_experts_packed.launch_options(tile_pairs))
    types = {"results": "*bf16", "out": "*bf16", "expert_ids": "*i32"}
    constants = fused_experts.sum_launch_constants(2048, 8)
    yield Variant("experts bf16 sum of 8", sum_experts_kernel, types, constants, {})

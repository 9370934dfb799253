"""Variants of the routing kernels to compile ahead of time."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.moe import moe_routing, moe_routing_triton


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("expert_ids", "counts", "pairs", "tile_experts"), "*i32")
    types |= {"logits": "*bf16", "weights": "*fp32"}
    for num_experts, top_k, renormalise in [(128, 8, False)]:
        constants = moe_routing.route_constants(num_experts, top_k, renormalise)
        yield Variant(f"moe route bf16 {top_k} of {num_experts}", moe_routing_triton.route_kernel, types, constants, {})
    scan = {"SCAN_PAIRS": moe_routing.SCAN_PAIRS}
    yield Variant("moe count pairs", moe_routing_triton.count_pairs_kernel, types, scan, {})
    tiles = {"TILE_PAIRS": 64, "TILE_EXPERTS": 128}
    yield Variant("moe place pairs", moe_routing_triton.place_pairs_kernel, types, scan | tiles, {})

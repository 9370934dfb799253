"""Variants of the attention kernel and of the merge to compile ahead."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels.attention.attention_plan import AttentionPlan, Scratch, Section
from quire.kernels.attention.attention_tiles import AttentionShape, Regime, launch_options, tiles_of
from quire.kernels.attention.attention_work import Visible
from quire.kernels.attention.paged_attention import cache_constants, launch_constants, merge_constants
from quire.kernels.attention.paged_attention_triton import attention_kernel, merge_kernel
from quire.kernels.common.fp8 import FP8_DTYPES

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NONE = torch.empty(0)
POINTERS = {"block_table": "*i32", "query_start_loc": "*i32", "seq_lens": "*i32", "positions": "*i32"}
POINTERS |= {"last_keys": "*i32", "pieces": "*i32"}
FLOATS = dict.fromkeys(("partial_acc", "partial_stats", "sinks", "k_scale", "v_scale"), "*fp32")

CASES: list[tuple[torch.dtype, int, int, Regime, int, dict[str, Any]]] = [
    # dtype, head dimension, query heads per KV head, regime, tokens per tile, options
    (BF16, 64, 8, "decode", 1, {"window": 128, "sinks": True, "soft_cap": 50.0}),
    (BF16, 128, 4, "decode", 1, {}),
    (BF16, 128, 4, "decode", 1, {"cache": E4M3}),
    (BF16, 256, 2, "decode", 1, {}),
    (BF16, 64, 8, "prefill", 64, {}),
    (BF16, 128, 4, "prefill", 64, {}),
    (BF16, 256, 2, "prefill", 64, {"window": 1024, "soft_cap": 50.0}),
    (BF16, 256, 2, "prefill", 64, {"window": 1024, "last_keys": True}),
    (BF16, 128, 4, "fixed", 64, {"fixed_split": 1024}),
    (BF16, 128, 5, "decode", 1, {"chunk": 8192}),
    (BF16, 128, 5, "prefill", 64, {"chunk": 8192}),
    (FP32, 64, 4, "prefill", 64, {}),
    (BF16, 576, 20, "decode", 1, {"value_dim": 512}),
    (BF16, 576, 128, "prefill", 64, {"value_dim": 512}),
    (BF16, 576, 20, "fixed", 64, {"value_dim": 512, "fixed_split": 1024}),
]


def variants() -> Iterator[Variant]:
    for dtype, head_dim, group, regime, tile_tokens, extras in CASES:
        yield attention(dtype, head_dim, group, regime, tile_tokens, **extras)
    for fixed_split in (0, 1024):
        constants = merge_constants(128, fixed_split)
        types = {"merges": "*i32", "out": "*bf16"} | {n: FLOATS[n] for n in ("partial_acc", "partial_stats", "sinks")}
        yield Variant(f"attention merge D=128 split={fixed_split}", merge_kernel, types, constants, {})


def attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    regime: Regime,
    tile_tokens: int,
    *,
    cache: torch.dtype | None = None,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    shared: bool = False,
    last_keys: bool = False,
    fixed_split: int = 0,
    value_dim: int = 0,
) -> Variant:
    kv_heads = 1 if value_dim else 8
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, dtype, value_dim)
    section = Section(NONE, tile_tokens, regime, shared)
    plan = AttentionPlan(shape, Visible(window, chunk), 1, 1, 90, (section,), NONE, Scratch(NONE, NONE))
    plan = replace(plan, fixed_split=fixed_split)
    tiles = tiles_of(shape, regime, tile_tokens, plan.capability)
    scaled = cache in FP8_DTYPES
    constants = launch_constants(shape, 16, section, tiles, plan) | cache_constants(cache or dtype, None, None)
    constants |= {"SOFT_CAP": soft_cap > 0}
    absent = {"positions": shared, "last_keys": last_keys, "sinks": sinks, "k_scale": scaled, "v_scale": scaled}
    constants |= {name: None for name, present in absent.items() if not present}
    element = "*" + TRITON_TYPES[dtype]
    stored = "*u8" if scaled else element
    types = POINTERS | FLOATS | {"query": element, "out": element, "kv_cache": stored, "factor": "fp32", "cap": "fp32"}
    flags = {"shared": shared, "images": last_keys, "sinks": sinks, "window": window, "chunk": chunk, "cap": soft_cap}
    features = "".join(f" {name}" for name, on in flags.items() if on)
    name = f"attention {regime} {element[1:]}/{stored[1:]} D={head_dim} G={group} T={tile_tokens}{features}"
    return Variant(name, attention_kernel, types, constants, launch_options(tiles))

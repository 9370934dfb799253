"""Variants of the paged attention kernel to compile ahead."""

from collections.abc import Iterator

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels import paged_attention
from quire.kernels.paged_attention_triton import paged_attention_kernel


def variants() -> Iterator[Variant]:
    cases = [
        # dtype, head dimension, query heads of a KV head, tokens of a tile
        (torch.bfloat16, 64, 4, 64),
        (torch.bfloat16, 128, 8, 1),
        (torch.bfloat16, 80, 7, 64),
        (torch.bfloat16, 256, 2, 64),
        (torch.float16, 128, 4, 8),
        (torch.float32, 64, 4, 64),
        (torch.float32, 128, 4, 1),
    ]
    for dtype, head_dim, group, tile_tokens in cases:
        element = "*" + TRITON_TYPES[dtype]
        tensors = {"query": element, "kv_cache": element, "out": element, "scale_log2": "fp32"}
        indices = dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "tiles"), "*i32")
        constants = paged_attention.launch_constants(dtype, head_dim, group, 16, tile_tokens)
        yield Variant(
            name=f"paged_attention {element[1:]} D={head_dim} G={group} tokens={tile_tokens}",
            kernel=paged_attention_kernel,
            types=tensors | indices,
            constants=constants,
            options=paged_attention.launch_options(dtype, constants),
        )

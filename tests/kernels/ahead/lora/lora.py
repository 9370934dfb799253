"""Variants of the kernels of LoRA adapters to compile ahead of time."""

from collections.abc import Iterator

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels.lora import lora
from quire.kernels.lora.lora_triton import expand_kernel, shrink_kernel


def variants() -> Iterator[Variant]:
    memory = {"entries": "*i64", "tiles": "*i32", "order": "*i32", "shrunk": "*fp32"}
    for dtype, max_parts, max_rank in ((torch.bfloat16, 3, 64), (torch.bfloat16, 1, 16), (torch.float32, 2, 256)):
        constants = lora.launch_constants(max_parts, max_rank, 4096)
        name, types = TRITON_TYPES[dtype], memory | dict.fromkeys(("x", "y"), f"*{TRITON_TYPES[dtype]}")
        last = f"{name} parts={max_parts} rank={max_rank}"
        first, second = lora.shrink_constants(constants, dtype), lora.expand_constants(constants, dtype)
        yield Variant(f"adapters shrink {last}", shrink_kernel, types, first, {})
        yield Variant(f"adapters expand {last}", expand_kernel, types, second, {})

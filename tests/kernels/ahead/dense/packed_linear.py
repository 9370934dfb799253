"""Variants of the product of packed weights to compile ahead of time, for few rows and many."""

from collections.abc import Iterator

import torch
from kernel_variant import Variant

from quire.kernels.dense import packed_linear
from quire.kernels.dense.packed_linear_triton import packed_linear_kernel


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("x", "scales", "bias", "out"), "*bf16") | {"zeros": "*i8"}
    forms = [("int4", 16, 128), ("int4", 2048, 32), ("int8", 16, 0), ("int8", 2048, 128), ("fp8", 16, 128)]
    for kind, rows, group_size in [*forms, ("fp8", 2048, 0)]:
        constants = packed_linear.launch_constants(kind, torch.bfloat16, rows, 4096, group_size)
        zeros = kind == "int4"
        yield Variant(
            name=f"packed linear {kind} bf16 rows={rows} group={group_size or 'all'}",
            kernel=packed_linear_kernel,
            types=types | {"codes": "*i8" if kind == "int8" else "*u8"},
            constants=constants | {"HAS_ZEROS": int(zeros), "HAS_BIAS": 1},
            options=packed_linear.launch_options(constants["TILE_ROWS"]),
        )

"""Variants of the planning kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.attention.attention_decode import plan_constants, plan_options
from quire.kernels.attention.attention_plan_triton import plan_kernel


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("query_start_loc", "seq_lens", "pieces", "merges"), "*i32")
    for windowed, max_rows in ((False, 256), (True, 1024)):
        constants = plan_constants(windowed, max_rows)
        name = f"attention plan rows={max_rows}" + " window" * windowed
        yield Variant(name, plan_kernel, types, constants, plan_options(max_rows))

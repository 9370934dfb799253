"""Variants of the planning kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.attention.attention_decode import plan_constants, plan_options
from quire.kernels.attention.attention_plan_triton import plan_kernel
from quire.kernels.attention.attention_work import Visible


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("query_start_loc", "seq_lens", "pieces", "merges"), "*i32")
    for local, max_rows in (("", 256), (" window", 1024), (" chunk", 256)):
        constants = plan_constants(Visible(window=local == " window", chunk=local == " chunk"), max_rows)
        name = f"attention plan rows={max_rows}{local}"
        yield Variant(name, plan_kernel, types, constants, plan_options(max_rows))

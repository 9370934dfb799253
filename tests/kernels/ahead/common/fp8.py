"""A kernel that converts between 8-bit floats, to compile the conversions ahead of time."""

from collections.abc import Iterator

import triton
import triton.language as tl
from kernel_variant import Variant

from quire.kernels.common.fp8_triton import decode_fp8, encode_fp8


@triton.jit
def recode_kernel(bits, out, COUNT: tl.constexpr, E5M2: tl.constexpr):
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + index, encode_fp8(decode_fp8(tl.load(bits + index), E5M2) * 3.0, E5M2))


def variants() -> Iterator[Variant]:
    for e5m2 in (0, 1):
        yield Variant(
            name=f"fp8 {'e5m2' if e5m2 else 'e4m3'} there and back",
            kernel=recode_kernel,
            types={"bits": "*u8", "out": "*u8"},
            constants={"COUNT": 2048, "E5M2": e5m2},
            options={},
        )

"""The Triton kernel behind ``mxfp4.dequantise_mxfp4``, and what kernels that read such weights share with it.

Imports triton, so only launchers and kernels import it.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and refuses most.

import triton
import triton.language as tl


@triton.jit
def e2m1(code):
    """The float32 of each int32's lowest four bits.

    Exponent and mantissa are put where a float32 has the lowest bits of its own, which makes the number 2**126 times
    too small, subnormal ones included.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e8m0(scale):
    """The float32 power of two of each int32 in [0, 255]: 2**(scale - 127); of 255 NaN."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def dequantise_mxfp4_kernel(blocks, scales, out, num_groups, TILE_GROUPS: tl.constexpr):
    """Program ``i``: the ``i``-th TILE_GROUPS groups of 16 bytes."""
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    in_groups = group < num_groups
    power = e8m0(tl.load(scales + group, mask=in_groups, other=0).to(tl.int32))[:, None]
    byte_offset = (group * 16)[:, None] + tl.arange(0, 16)[None, :]
    byte = tl.load(blocks + byte_offset, mask=in_groups[:, None], other=0).to(tl.int32)
    values = tl.interleave(e2m1(byte) * power, e2m1(byte >> 4) * power)
    target = out + (group * 32)[:, None] + tl.arange(0, 32)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=in_groups[:, None])

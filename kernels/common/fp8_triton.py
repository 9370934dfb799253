"""Conversion of 8-bit floats, stored as bytes, inside Triton kernels. Imports triton, so only kernels import it.

Computed with integers and float16, so that the result is the same on every GPU and in the interpreter.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def decode_fp8(bits, E5M2: tl.constexpr):
    """Convert a uint8 tile to float32, exactly; NaN and infinity are preserved."""
    wide = bits.to(tl.uint16)
    if E5M2:
        # The upper byte of a float16.
        value = (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # Sign, 4 bits of exponent and 3 of mantissa, moved to a float16's fields: its bias is 15 rather than 7.
        magnitude = wide & 0x7F
        half = ((wide & 0x80) << 8) | (magnitude << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return value


@triton.jit
def encode_fp8(x, E5M2: tl.constexpr):
    """Convert a float32 tile to uint8: to nearest, ties to even; out of range to the largest value; NaN stays NaN."""
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    SHIFT: tl.constexpr = 23 - MANTISSA
    # float32 bit patterns of the format's largest number (57344, 448), of its smallest normal number (2**-14, 2**-6),
    # and of the number at which the spacing of float32 equals the format's smallest subnormal (2**-16, 2**-9).
    LARGEST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
    SMALLEST_NORMAL: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000
    COARSE: tl.constexpr = 0x43000000 if E5M2 else 0x46800000
    COARSE_VALUE: tl.constexpr = 128.0 if E5M2 else 16384.0
    # The difference of the exponent biases, 127 - 15 or 127 - 7.
    REBIAS: tl.constexpr = (112 if E5M2 else 120) << MANTISSA

    pattern = x.to(tl.int32, bitcast=True)
    sign = (pattern >> 24) & 0x80
    # Bit patterns of positive floats have the same order as the floats.
    magnitude = pattern & 0x7FFFFFFF
    capped = tl.minimum(magnitude, LARGEST)
    # Add half a unit minus one, plus one if the last kept bit is odd. A carry into the exponent is correct.
    rounded = capped + ((1 << (SHIFT - 1)) - 1) + ((capped >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - REBIAS
    # The addition rounds to a multiple of the smallest subnormal.
    subnormal = (capped.to(tl.float32, bitcast=True) + COARSE_VALUE).to(tl.int32, bitcast=True) - COARSE
    code = tl.where(capped < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)

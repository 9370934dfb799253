// e^x for vectors, within 2 units in the last place. The polynomial is that of Cephes' expf, over the remainder after
// subtracting a multiple of ln 2 in two parts.
#pragma once

#include "native/common.h"

namespace quire {

// e^x is exp_parts times 2^n, with an integer n. e^|x| must be in float32's range, or x NaN.
QUIRE_INLINE vfloat exp_parts(vfloat x, vfloat& n) {
    const vfloat magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    n = multiply_add(x, splat(1.44269504f), magic) - magic;
    const vfloat r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    vfloat p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    return multiply_add(p, r * r, r) + 1.f;
}

// 0 below -104, infinity above 88.72; NaN stays NaN.
QUIRE_INLINE vfloat exp_of(vfloat x) {
    const vfloat low = splat(-104.f), high = splat(88.8f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    vfloat n;
    const vfloat p = exp_parts(x, n);
    // Multiply by 2^n in two factors: 2^n may be out of float32's range although the product is not.
    const vint whole = __builtin_convertvector(n, vint), half = whole >> 1;
    return p * (vfloat)((half + 127) << 23) * (vfloat)((whole - half + 127) << 23);
}

}  // namespace quire

// Vector functions of attention, in addition to common.h: number formats of a KV cache, ordered sums, an exponential.
//
// Must not be compiled with -ffast-math: masks are infinities, and the order of every sum is part of the contract.
#pragma once

#include <utility>

#include "native/common.h"
#include "native/exp.h"

#if defined(__GNUC__) && !defined(__clang__)
// All functions are inlined, so the calling convention for vectors does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace quire {

typedef uint16_t vu16 __attribute__((vector_size(2 * VF)));
typedef uint8_t vu8 __attribute__((vector_size(VF)));
typedef float vf4 __attribute__((vector_size(16)));

// ---- number formats. `value` widens exactly; the stored number is FACTOR times the result. `add` adds the products of
// a register of a query and one of a key.

struct Widened {
    static QUIRE_INLINE vfloat add(vfloat query, vfloat key, vfloat sum) { return multiply_add(query, key, sum); }
};

QUIRE_INLINE vfloat widen_half(vu16 half) {
#if defined(__AVX512F__) && !defined(QUIRE_VF)
    return (vfloat)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__) && !defined(QUIRE_VF)
    return (vfloat)_mm256_cvtph_ps((__m128i)half);
#else
    const vuint wide = __builtin_convertvector(half, vuint);
    const vfloat magnitude = (vfloat)((wide & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112: difference of the biases
    const vuint special = (vuint)((wide & 0x7c00) == 0x7c00) & 0x7f800000u;
    return (vfloat)((vuint)magnitude | special | ((wide & 0x8000) << 16));
#endif
}

QUIRE_INLINE vu16 widen_bytes(vu8 bytes) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(QUIRE_VF)
    __m128i low = _mm_setzero_si128();
    std::memcpy(&low, &bytes, sizeof(bytes));
    return (vu16)_mm_cvtepu8_epi16(low);
#else
    return __builtin_convertvector(bytes, vu16);
#endif
}

struct Float32 : Widened {
    typedef float stored;
    static constexpr float FACTOR = 1.0f;
    static QUIRE_INLINE vfloat value(const stored* from) { return load<vfloat>(from); }
};

struct BFloat16 : Widened {
    typedef uint16_t stored;
    static constexpr float FACTOR = 1.0f;
    static QUIRE_INLINE vfloat value(const stored* from) {
        // gcc 12 compiles __builtin_convertvector to four instructions.
#if defined(__AVX512F__) && !defined(QUIRE_VF)
        return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)load<vu16>(from)), 16);
#elif defined(__AVX2__) && !defined(QUIRE_VF)
        return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)load<vu16>(from)), 16);
#else
        return load_floats(from);
#endif
    }
};

struct Float16 : Widened {
    typedef uint16_t stored;
    static constexpr float FACTOR = 1.0f;
    static QUIRE_INLINE vfloat value(const stored* from) { return widen_half(load<vu16>(from)); }
};

// Exponent bias 7 instead of float16's 15; no infinity, and 0x7f is NaN (OCP 8-bit floating point formats, 1.0).
struct Float8E4M3 : Widened {
    typedef uint8_t stored;
    static constexpr float FACTOR = 256.0f;
    static QUIRE_INLINE vfloat value(const stored* from) {
        const vu16 wide = widen_bytes(load<vu8>(from));
        const vu16 magnitude = wide & 0x7f;
        const vu16 nan = (vu16)(magnitude == 0x7f) & 0x7e00;
        return widen_half(((wide & 0x80) << 8) | (magnitude << 7) | nan);
    }
};

// The upper half of a float16.
struct Float8E5M2 : Widened {
    typedef uint8_t stored;
    static constexpr float FACTOR = 1.0f;
    static QUIRE_INLINE vfloat value(const stored* from) {
        return widen_half(widen_bytes(load<vu8>(from)) << 8);
    }
};

// Two neighbouring bfloat16 numbers, of a query or of a key, as the words of registers of float32: an instruction adds
// both products to a float32 sum.
struct Words {
    typedef float stored;
    static QUIRE_INLINE vfloat value(const stored* from) { return load<vfloat>(from); }
#if defined(__AVX512BF16__)
    static constexpr bool COMPILED = VF == 16;
    static QUIRE_INLINE vfloat add(vfloat query, vfloat key, vfloat sum) {
        return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)query, (__m512bh)key);
    }
#else
    static constexpr bool COMPILED = false;
    static QUIRE_INLINE vfloat add(vfloat, vfloat, vfloat sum) { return sum; }
#endif
};

// Forces a single load: gcc would load a value again for each use, and loads are the bottleneck here.
QUIRE_INLINE vfloat in_register(vfloat v) {
#if defined(__AVX__) && !defined(QUIRE_VF)
    __asm__("" : "+v"(v));
#endif
    return v;
}

// ---- reductions

#if defined(__clang__)
#define QUIRE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QUIRE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) < (b)){__VA_ARGS__})
#endif

// Adds neighbours: [a0+a1, a2+a3, b0+b1, b2+b3], in each group of four lanes.
QUIRE_INLINE vf4 neighbours(vf4 a, vf4 b) {
    return QUIRE_SHUFFLE(a, b, 0, 2, 4, 6) + QUIRE_SHUFFLE(a, b, 1, 3, 5, 7);
}

#if QUIRE_LANES >= 8
typedef float vf8 __attribute__((vector_size(32)));
QUIRE_INLINE vf8 neighbours(vf8 a, vf8 b) {
    return QUIRE_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + QUIRE_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
#endif

template <class Half, class Whole>
QUIRE_INLINE Half fold(Whole v) {
    Half halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return halves[0] + halves[1];
}

// Sums of four vectors, each in the same order.
QUIRE_INLINE vf4 sums(vfloat a, vfloat b, vfloat c, vfloat d) {
#if QUIRE_LANES == 16
    return fold<vf4>(neighbours(neighbours(fold<vf8>(a), fold<vf8>(b)), neighbours(fold<vf8>(c), fold<vf8>(d))));
#elif QUIRE_LANES == 8
    return fold<vf4>(neighbours(neighbours(a, b), neighbours(c, d)));
#else
    return neighbours(neighbours(a, b), neighbours(c, d));
#endif
}

QUIRE_INLINE float sum(vfloat v) { return sums(v, v, v, v)[0]; }

QUIRE_INLINE float largest(vf4 v) {
    const vf4 swapped = QUIRE_SHUFFLE(v, v, 2, 3, 0, 1);
    v = swapped > v ? swapped : v;
    return v[1] > v[0] ? v[1] : v[0];
}
#if QUIRE_LANES >= 8
QUIRE_INLINE float largest(vf8 v) {
    vf4 halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return largest(halves[1] > halves[0] ? halves[1] : halves[0]);
}
#endif
#if QUIRE_LANES == 16
QUIRE_INLINE float largest(vfloat v) {
    vf8 halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return largest(halves[1] > halves[0] ? halves[1] : halves[0]);
}
#endif

// ---- transposition

// Exchanges the lanes of `a` whose number contains the bit H with those of `b` whose number does not.
template <int H, int... L>
QUIRE_INLINE void exchange(vfloat& a, vfloat& b, std::integer_sequence<int, L...>) {
    const vfloat low = QUIRE_SHUFFLE(a, b, (L & H ? VF + L - H : L)...);
    b = QUIRE_SHUFFLE(a, b, (L & H ? VF + L : L + H)...);
    a = low;
}

// Transposes VF registers of VF lanes.
template <int H = VF / 2>
QUIRE_INLINE void transpose(vfloat* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < VF; i++)
        if (!(i & H)) exchange<H>(rows[i], rows[i + H], std::make_integer_sequence<int, VF>());
    if constexpr (H > 1) transpose<H / 2>(rows);
}

// ---- exponentials

// For x <= 88. Exactly 0 below -87, and exactly 1 for 0; NaN stays NaN. Relative error under 2e-7.
QUIRE_INLINE vfloat exponential(vfloat x) {
    const vfloat bounded = x < -87.0f ? splat(-87.0f) : x;
    vfloat n;
    const vfloat p = exp_parts(bounded, n);
    const vint power = ((vint)(n + 12582912.0f) + 127) << 23;  // 1.5 * 2^23: n is in the low bits of the sum
    return x < -87.0f ? vfloat{} : p * (vfloat)power;
}

// 1 - 2 / (exp(2x) + 1).
QUIRE_INLINE vfloat hyperbolic_tangent(vfloat x) {
    vfloat bounded = x > 15.0f ? splat(15.0f) : x;
    bounded = bounded < -15.0f ? splat(-15.0f) : bounded;
    return 1.0f - 2.0f / (exponential(bounded * 2.0f) + 1.0f);
}

}  // namespace quire

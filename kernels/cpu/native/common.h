// Definitions shared by all sources: vectors as wide as the CPU's registers, bfloat16, and the export attribute.
//
// Vectors use the compilers' vector extension, so that one source serves AVX2, AVX-512, NEON and others.
//
// A product and a sum are rounded once only where the code calls multiply_add. The compiler must not contract them
// (-ffp-contract=off): gcc tuned for Zen contracts some loops and not others, and a row's bits would depend on the
// number of rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#define QUIRE_API extern "C" __attribute__((visibility("default")))
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

#if defined(QUIRE_VF)  // CXXFLAGS=-DQUIRE_VF=16 compiles the code for another width on any CPU, for tests
#define QUIRE_LANES QUIRE_VF
#elif defined(__AVX512F__)
#define QUIRE_LANES 16
#elif defined(__AVX__)
#define QUIRE_LANES 8
#else
#define QUIRE_LANES 4
#endif
constexpr int VF = QUIRE_LANES;  // float32 lanes of a register

typedef float vfloat __attribute__((vector_size(4 * VF)));
typedef int32_t vint __attribute__((vector_size(4 * VF)));
typedef uint32_t vuint __attribute__((vector_size(4 * VF)));
typedef uint16_t vbf16 __attribute__((vector_size(2 * VF)));

// Calls body(i) for constants i in [0, N). The compiler keeps in registers what it indexes with constants from the start
// only: an unrolled loop over many sums stores them in each iteration.
template <class Body, int... I>
QUIRE_INLINE void each(std::integer_sequence<int, I...>, const Body& body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
QUIRE_INLINE void each(const Body& body) {
    each(std::make_integer_sequence<int, N>{}, body);
}
#define QUIRE_EACH(i) [&](auto i) __attribute__((always_inline))

// memcpy of a register's size is one unaligned load or store.
template <class V, class T>
QUIRE_INLINE V load(const T* from) {
    V out;
    std::memcpy(&out, from, sizeof(V));
    return out;
}

template <class V, class T>
QUIRE_INLINE void store(T* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

QUIRE_INLINE vfloat splat(float x) { return x - vfloat{}; }  // subtracting +0 keeps the sign of a zero

// a * b + c, rounded once if the CPU has fused multiply-add.
QUIRE_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (VF == 8) {
        __m256 out, left, right, sum;
        std::memcpy(&left, &a, 32), std::memcpy(&right, &b, 32), std::memcpy(&sum, &c, 32);
        out = _mm256_fmadd_ps(left, right, sum);
        std::memcpy(&a, &out, 32);
        return a;
    }
#elif defined(__ARM_NEON) && defined(__aarch64__)
    if constexpr (VF == 4) {
        float32x4_t out, left, right, sum;
        std::memcpy(&left, &a, 16), std::memcpy(&right, &b, 16), std::memcpy(&sum, &c, 16);
        out = vfmaq_f32(sum, left, right);
        std::memcpy(&a, &out, 16);
        return a;
    }
#endif
    return a * b + c;
}

QUIRE_INLINE vfloat multiply_add(vfloat a, float b, float c) { return multiply_add(a, splat(b), splat(c)); }
QUIRE_INLINE vfloat multiply_add(vfloat a, vfloat b, float c) { return multiply_add(a, b, splat(c)); }

QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN (a carry could otherwise turn it into infinity).
QUIRE_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

QUIRE_INLINE vfloat load_floats(const float* from) { return load<vfloat>(from); }
QUIRE_INLINE vfloat load_floats(const uint16_t* from) {
#if defined(__AVX512F__)
    // gcc widens the halves of a vector apart.
    if constexpr (VF == 16) return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#endif
    return (vfloat)(__builtin_convertvector(load<vbf16>(from), vuint) << 16);
}

QUIRE_INLINE void store_floats(float* to, vfloat x) { store(to, x); }
QUIRE_INLINE void store_floats(uint16_t* to, vfloat x) {
    const vuint bits = (vuint)x;
    const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vuint quiet_nan = vuint{} + 0x7fc0;
    store(to, __builtin_convertvector(x == x ? rounded : quiet_nan, vbf16));
}

// Sum in a fixed order: adds the halves of the vector until one lane is left.
QUIRE_INLINE float sum_lanes(vfloat x) {
    float lanes[VF];
    store(lanes, x);
    for (int half = VF / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

QUIRE_INLINE void store_float(float* to, float x) { *to = x; }
QUIRE_INLINE void store_float(uint16_t* to, float x) { *to = to_bf16(x); }

// If a row's width is not a multiple of a register's, its last elements use the same vector arithmetic, padded with zeros.
template <class T>
QUIRE_INLINE vfloat load_some(const T* from, int count) {
    if (count >= VF) return load_floats(from);
    float lanes[VF] = {};
    for (int i = 0; i < count; i++) lanes[i] = to_float(from[i]);
    return load<vfloat>(lanes);
}

template <class T>
QUIRE_INLINE void store_some(T* to, vfloat x, int count) {
    if (count >= VF) return store_floats(to, x);
    float lanes[VF];
    store(lanes, x);
    for (int i = 0; i < count; i++) store_float(to + i, lanes[i]);
}

}  // namespace quire

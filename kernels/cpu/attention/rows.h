// Conversion of rows between float32 and the other number formats.
#pragma once

#include "attention/vec.h"

namespace quire {

// Same numbers as in worker_proc/attention/cpu_native.py.
enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8_E4M3 = 3, FLOAT8_E5M2 = 4 };

QUIRE_INLINE int64_t format_bytes(int64_t format) { return format == FLOAT32 ? 4 : format < FLOAT8_E4M3 ? 2 : 1; }

// Number of registers for a length.
QUIRE_INLINE int64_t padded(int64_t length) { return (length + VF - 1) / VF * VF; }

// to[i] = from[i] * factor; the last register is padded with zeros.
template <class F>
void widen_row(const void* from, int64_t length, float factor, float* to) {
    const auto* source = static_cast<const typename F::stored*>(from);
    int64_t i = 0;
    for (; i + VF <= length; i += VF) store(to + i, F::value(source + i) * factor);
    if (i == length) return;
    typename F::stored rest[VF] = {};
    std::memcpy(rest, source + i, (length - i) * sizeof(rest[0]));
    store(to + i, F::value(rest) * factor);
}

inline void widen_row(int64_t format, const void* from, int64_t length, float factor, float* to) {
    switch (format) {
        case FLOAT32: return widen_row<Float32>(from, length, factor, to);
        case BFLOAT16: return widen_row<BFloat16>(from, length, factor, to);
        case FLOAT16: return widen_row<Float16>(from, length, factor, to);
        case FLOAT8_E4M3: return widen_row<Float8E4M3>(from, length, factor * Float8E4M3::FACTOR, to);
        default: return widen_row<Float8E5M2>(from, length, factor, to);
    }
}

// Rounds to nearest, ties to even, in a format with MANTISSA bits and exponent bias BIAS; |x| must be in its range or NaN.
template <int MANTISSA, int BIAS>
QUIRE_INLINE uint32_t narrow_bits(float magnitude) {
    constexpr int DROPPED = 23 - MANTISSA;
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    const uint32_t rounded = bits + ((1u << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1);
    const uint32_t normal = (rounded >> DROPPED) - (uint32_t(127 - BIAS) << MANTISSA);
    // Subnormal numbers are equally spaced: adding 2^23 rounds to a multiple of the spacing.
    const float steps = magnitude * float(1 << (BIAS + MANTISSA - 1)) + 8388608.0f;
    uint32_t step_bits;
    std::memcpy(&step_bits, &steps, 4);
    const bool subnormal = bits < (uint32_t(127 - BIAS + 1) << 23);
    return subnormal ? step_bits & 0x7fffff : normal;
}

QUIRE_INLINE uint16_t to_half(float x) {
    const float magnitude = __builtin_fabsf(x);
    const uint32_t sign = __builtin_signbit(x) ? 0x8000 : 0;
    if (!(magnitude < 65520.0f)) return uint16_t(x != x ? 0x7e00 : sign | 0x7c00);
    return uint16_t(sign | narrow_bits<10, 15>(magnitude));
}

// Values out of range become the largest number, as an fp8 KV cache requires; torch's cast would give NaN or infinity.
template <int MANTISSA, int BIAS>
QUIRE_INLINE uint8_t to_byte(float x, float most) {
    if (x != x) return 0x7f;
    const float magnitude = __builtin_fabsf(x);
    const uint32_t sign = __builtin_signbit(x) ? 0x80 : 0;
    return uint8_t(sign | narrow_bits<MANTISSA, BIAS>(magnitude < most ? magnitude : most));
}

// to[i] = from[i] / divisor.
inline void narrow_row(int64_t format, const float* from, int64_t length, float divisor, void* to) {
    auto* floats = static_cast<float*>(to);
    auto* halves = static_cast<uint16_t*>(to);
    auto* bytes = static_cast<uint8_t*>(to);
    switch (format) {
        case FLOAT32:
            for (int64_t i = 0; i < length; i++) floats[i] = from[i] / divisor;
            return;
        case BFLOAT16:
            for (int64_t i = 0; i < length; i++) halves[i] = to_bf16(from[i] / divisor);
            return;
        case FLOAT16:
            for (int64_t i = 0; i < length; i++) halves[i] = to_half(from[i] / divisor);
            return;
        case FLOAT8_E4M3:
            for (int64_t i = 0; i < length; i++) bytes[i] = to_byte<3, 7>(from[i] / divisor, 448.0f);
            return;
        default:
            for (int64_t i = 0; i < length; i++) bytes[i] = to_byte<2, 15>(from[i] / divisor, 57344.0f);
    }
}

}  // namespace quire

// Weights as codes with scales (ScaledWeight of kernels/common/scaled_weight.py) that stay packed.
//
// A panel has the codes, then scales [groups][PANEL] in their stored type, zeros [groups][PANEL] int8, and row scales
// [PANEL]. Codes of 8 bits are [inputs][PANEL] bytes; codes of 4 bits are [inputs / 8][PANEL] words, the first input in
// the lowest bits.
//
// An output is the sum, over blocks of K_BLOCK inputs, of chains over the block's groups: each adds, with one rounding,
// the scale times the group's own chain of fused multiply-adds over code - zero. That number is exact in bfloat16, so a
// block that is decoded into the layout of a bfloat16 panel gives the same bits.
#pragma once

#include "linear_mxfp4.h"

namespace quire {
namespace {

// As in kernels/cpu/scaled_linear.py.
enum CodeKind { INT8, INT4, FP8, FP4 };
enum ScaleKind { SCALE_FLOAT32, SCALE_BFLOAT16, SCALE_FLOAT16, SCALE_FLOAT8 };

constexpr int STEP = 8;  // inputs decoded at a time: one word of 4-bit codes

// As in kernels/cpu/scaled_linear.py, which keeps one per layer.
struct ScaledLayer {
    const char* packed;
    const float* bias;  // or null
    int32_t outputs, inputs, kind, group_size, scale_kind, has_zeros, has_row_scales;
};

// Sizes and offsets of a panel's parts.
struct Parts {
    long groups, codes, scale_bytes, zeros, row_scales, bytes;
    explicit Parts(const ScaledLayer& layer) {
        const int bits = layer.kind == INT8 || layer.kind == FP8 ? 8 : 4;
        const long padded = (long(layer.inputs) + STEP - 1) / STEP * STEP;
        groups = (layer.inputs + layer.group_size - 1) / layer.group_size;
        codes = (bits == 8 ? layer.inputs : padded / 2) * PANEL;
        scale_bytes = layer.scale_kind == SCALE_FLOAT32 ? 4 : layer.scale_kind == SCALE_FLOAT8 ? 1 : 2;
        zeros = codes + groups * PANEL * scale_bytes;
        row_scales = zeros + (layer.has_zeros ? groups * PANEL : 0);
        bytes = (row_scales + (layer.has_row_scales ? PANEL * 4 : 0) + 63) / 64 * 64;
    }
};

template <class T>
struct ScaledCall : Call<T> {
    const ScaledLayer& layer;
    Parts parts;
    const char* panel(int index) const { return this->packed + index * parts.bytes; }
    int group_end(int k, int end) const {
        return int(std::min<long>(end, (k / layer.group_size + 1L) * layer.group_size));
    }
};

QUIRE_INLINE vint load_signed_bytes(const char* from) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) return (vint)_mm512_cvtepi8_epi32(load<__m128i>(from));
#endif
#if defined(__AVX2__)
    if constexpr (VF == 8) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
        return load<vint>((const char*)&wide);
    }
#endif
    int32_t lanes[VF];
    for (int i = 0; i < VF; i++) lanes[i] = int8_t(from[i]);
    return load<vint>(lanes);
}

// Numbers of float8 e4m3 divided by 2 ** 8: their bits at the places of a float16's.
constexpr float FLOAT8_STEP = 256;
QUIRE_INLINE vfloat e4m3(const char* from) {
    const vint bits = load_signed_bytes(from);
    const vuint magnitude = (vuint)bits & 0x7f;
    const vfloat small = __builtin_convertvector((vint)magnitude, vfloat) * (1.f / (1 << 17));
    const vuint normal = (magnitude << 20) + (112u << 23);
    return (vfloat)((magnitude < 8 ? (vuint)small : normal) | ((vuint)bits & 0x80000000u));
}

template <int KIND, bool ZEROS>
struct Codes {
    static constexpr int BITS = KIND == INT8 || KIND == FP8 ? 8 : 4;
    static constexpr int MAX_ROWS = 4;
    static constexpr int panels(int rows) { return rows <= (VF == 16 ? 2 : 1) ? 2 : 1; }

    // Decodes code - zero of input i of a step.
    static QUIRE_INLINE vfloat value(const char* codes, int i, int v, vfloat zero) {
        if constexpr (BITS == 8) {
            const char* at = codes + i * PANEL + v * VF;
            if constexpr (KIND == FP8) return e4m3(at);
            const vfloat code = __builtin_convertvector(load_signed_bytes(at), vfloat);
            return ZEROS ? code - zero : code;
        } else {
            const vuint word = load<vuint>(codes + v * VF * 4) >> 4 * i;
            if constexpr (KIND == FP4) return e2m1(word);
#if defined(__AVX512F__)
            if constexpr (VF == 16) {
                const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
                const vfloat code = (vfloat)_mm512_permutexvar_ps((__m512i)word, table);
                return ZEROS ? code - zero : code;
            }
#endif
            return __builtin_convertvector((vint)(word & 15), vfloat) - (ZEROS ? zero + 8 : splat(8));
        }
    }

    // Zeros of a group, less the 8 that the table of 4-bit codes has.
    static QUIRE_INLINE vfloat zero(const Parts& parts, const char* panel, int group, int v) {
        if constexpr (!ZEROS) return vfloat{};
        const char* at = panel + parts.zeros + long(group) * PANEL + v * VF;
        return __builtin_convertvector(load_signed_bytes(at), vfloat) - (KIND == INT4 ? 8.f : 0.f);
    }
};

// Calls body(k, weights, odd) for `count` inputs of P panels, which start at a step.
template <class C, int P, class Body>
QUIRE_INLINE void for_inputs(const char* codes, long bytes, int count, const vfloat (&zeros)[P][2], Body&& body) {
    const auto one = [&](int k, int i, bool odd) __attribute__((always_inline)) {
        vfloat weights[P][2];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) weights[p][v] = C::value(codes + p * bytes, i, v, zeros[p][v]);
        body(k + i, weights, odd);
    };
    int k = 0;
    for (; k + STEP <= count; k += STEP, codes += PANEL * C::BITS) {
        prefetch<P>(codes, bytes, PANEL * C::BITS);
#pragma GCC unroll 4
        for (int i = 0; i < STEP; i += 2) {
            one(k, i, false);
            one(k, i + 1, true);
        }
    }
    for (int i = 0; k + i < count; i++) one(k, i, i & 1);
}

QUIRE_INLINE vfloat scale_at(const ScaledLayer& layer, const Parts& parts, const char* panel, int group, int v) {
    const char* at = panel + parts.codes + (long(group) * PANEL + v * VF) * parts.scale_bytes;
    vfloat scale = layer.scale_kind == SCALE_FLOAT32    ? load<vfloat>(at)
                   : layer.scale_kind == SCALE_BFLOAT16 ? load_floats((const uint16_t*)at)
                   : layer.scale_kind == SCALE_FLOAT16  ? widen_halves(at)
                                                        : e4m3(at) * FLOAT8_STEP;
    if (layer.kind == FP8) scale *= FLOAT8_STEP;
    return layer.has_row_scales ? scale * load<vfloat>(panel + parts.row_scales + v * VF * 4) : scale;
}

template <int R, int P, class T>
QUIRE_INLINE void add_scaled(Tile<R, P>& total, const Tile<R, P>& part, const ScaledCall<T>& call, int panel,
                             int group) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const vfloat scale = scale_at(call.layer, call.parts, call.panel(panel + p), group, v);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                total.sums[r][p][v] = multiply_add(part.sums[r][p][v], scale, total.sums[r][p][v]);
        }
}

// Decodes inputs [k, end) of a panel into the layout of a bfloat16 panel.
template <class C, class T>
void decode_codes(const ScaledCall<T>& call, int panel, int k, int end, char* to) {
    const char* at = call.panel(panel);
    for (int until; k < end; k = until) {
        until = call.group_end(k, end);
        vfloat zeros[1][2], even[2];
        for (int v = 0; v < 2; v++) zeros[0][v] = C::zero(call.parts, at, k / call.layer.group_size, v);
        const char* codes = at + long(k) * PANEL * C::BITS / 8;
        const auto put = [&](int, const vfloat(&weights)[1][2], bool odd) __attribute__((always_inline)) {
            for (int v = 0; v < 2; v++) {
                char* const words = to + v * VF * 4;
                if (odd)
                    store(words, ((vuint)weights[0][v] & 0xffff0000u) | (vuint)even[v] >> 16);
                else
                    even[v] = weights[0][v];
            }
            if (odd) to += PANEL * 4;
        };
        for_inputs<C, 1>(codes, 0, until - k, zeros, put);
        if ((until - k) % 2)
            for (int v = 0; v < 2; v++) store(to + v * VF * 4, (vuint)even[v] >> 16);
    }
}

// Calls body(block) for every block of inputs of panels [panel, panel_end), `group` panels at a time, decoded.
template <class C, class T, class Body>
void for_decoded_codes(const ScaledCall<T>& call, int panel, int panel_end, int group, Body&& body) {
    alignas(64) char decoded[GROUP_BYTES];
    const int depth = std::min(K_BLOCK, call.inputs);
    group = std::min(group, int(GROUP_BYTES / Bf16::panel_bytes(depth)));
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += K_BLOCK) {
            const int count = std::min(K_BLOCK, call.inputs - k);
            const Block of{decoded, Bf16::panel_bytes(count), panel, std::min(panel + group, panel_end), k, count};
            for (int p = panel; p < of.end; p++)
                decode_codes<C>(call, p, k, k + count, decoded + (p - panel) * of.bytes);
            body(of);
        }
}

}  // namespace
}  // namespace quire

// MXFP4 weights that stay packed: decoded in registers, or a block at a time into the layout of a bfloat16 panel.
//
// A panel is a sequence of groups of 32 inputs: [PANEL] scales, then [4][PANEL] words, each with the codes of eight
// neighbouring inputs, the first in the lowest bits. A decoded number is exact in float32 and in bfloat16, so the sums
// are those of the same weights stored as bfloat16.
#pragma once

#include "linear/panels.h"

namespace quire {
namespace {

constexpr int MX_GROUP = 32;  // inputs with a common scale
constexpr int MX_WORD = 8;    // inputs whose codes are in one word
constexpr int MX_GROUP_BYTES = PANEL * (1 + MX_GROUP / 2);

struct Mxfp4 {
    static constexpr int MAX_ROWS = VF == 16 ? 10 : 4;
    static constexpr int panels(int rows) { return rows <= (VF == 16 ? 2 : 1) ? 2 : 1; }
    static long panel_bytes(long inputs) { return inputs / MX_GROUP * MX_GROUP_BYTES; }
};

// Compilers widen vectors of bytes lane by lane.
QUIRE_INLINE vuint load_bytes(const char* from) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) return (vuint)_mm512_cvtepu8_epi32(load<__m128i>(from));
#endif
    uint32_t lanes[VF];
    for (int i = 0; i < VF; i++) lanes[i] = uint8_t(from[i]);
    return load<vuint>(lanes);
}

// Decodes the lowest four bits of each lane: a sign, two bits of exponent and one of mantissa.
QUIRE_INLINE vfloat e2m1(vuint codes) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) {
        const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
        return (vfloat)_mm512_permutexvar_ps((__m512i)codes, table);
    }
#endif
    const vuint sign = codes << 28 & 0x80000000u;
#if defined(__AVX2__)
    if constexpr (VF == 8) {
        __m256 out = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
        __m256i index;
        std::memcpy(&index, &codes, 32);
        out = _mm256_permutevar8x32_ps(out, index);
        vuint bits;
        std::memcpy(&bits, &out, 32);
        return (vfloat)(bits ^ sign);
    }
#endif
    const vuint magnitude = codes & 7;
    const vuint normal = (magnitude << 22) + (126u << 23);  // 0 and 0.5, without an exponent, are the exceptions
    const vuint half = vuint{} + 0x3f000000u;
    return (vfloat)((magnitude > 1 ? normal : magnitude == 1 ? half : vuint{}) ^ sign);
}

// Decodes scales: 2 ** (byte - 127), and NaN for 255.
QUIRE_INLINE vfloat e8m0(vuint bytes) {
    const vuint smallest = vuint{} + 0x00400000u, nan = vuint{} + 0x7fc00000u;
    return (vfloat)(bytes == 0 ? smallest : bytes == 255 ? nan : bytes << 23);
}

template <int R, int P>
QUIRE_INLINE void block(Mxfp4, Tile<R, P>& tile, const float* x, long stride, const char* panel, long bytes, int count) {
    for (int k = 0; k < count; k += MX_GROUP, panel += MX_GROUP_BYTES) {
        vfloat scales[P][2];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < 2; v++) scales[p][v] = e8m0(load_bytes(panel + p * bytes + v * VF));
        prefetch<P>(panel, bytes, MX_GROUP_BYTES);
        const char* words_at = panel + PANEL;
        for (int word = 0; word < MX_GROUP; word += MX_WORD, words_at += PANEL * 4) {
            vuint codes[P][2];
#pragma GCC unroll 2
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) codes[p][v] = load<vuint>(words_at + p * bytes + v * VF * 4);
#pragma GCC unroll 8
            for (int i = 0; i < MX_WORD; i++) {
                vfloat weights[P][2];
#pragma GCC unroll 2
                for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                    for (int v = 0; v < 2; v++) weights[p][v] = e2m1(codes[p][v] >> 4 * i) * scales[p][v];
                multiply<R, P>(tile, x + k + word + i, stride, weights);
            }
        }
    }
}

// Decodes `count` inputs of a panel into the layout of a bfloat16 panel.
inline void decode_to_bf16(const char* panel, char* to, int count) {
    for (int k = 0; k < count; k += MX_GROUP, panel += MX_GROUP_BYTES) {
        vfloat scales[2];
        for (int v = 0; v < 2; v++) scales[v] = e8m0(load_bytes(panel + v * VF));
        for (int line = 0; line < MX_GROUP_BYTES; line += 64) __builtin_prefetch(panel + line + AHEAD);
        const char* words_at = panel + PANEL;
        for (int word = 0; word < MX_GROUP; word += MX_WORD, words_at += PANEL * 4, to += MX_WORD / 2 * PANEL * 4)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const vuint codes = load<vuint>(words_at + v * VF * 4);
#pragma GCC unroll 4
                for (int i = 0; i < MX_WORD; i += 2) {
                    const vuint first = (vuint)(e2m1(codes >> 4 * i) * scales[v]);
                    const vuint second = (vuint)(e2m1(codes >> (4 * i + 4)) * scales[v]);
                    store(to + (i / 2 * PANEL + v * VF) * 4, (second & 0xffff0000u) | first >> 16);
                }
            }
    }
}

// Calls body(decoded) for every block of inputs of panels [panel, panel_end), `group` panels at a time, decoded into the
// layout of bfloat16 panels.
template <class T, class Body>
void for_decoded_blocks(const Call<T>& call, int panel, int panel_end, int group, Body&& body) {
    alignas(64) char decoded[GROUP_BYTES];
    const int depth = block_inputs(call.inputs);
    group = std::min(group, int(GROUP_BYTES / Bf16::panel_bytes(depth)));
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += depth) {
            Block of = block_of<Mxfp4>(call, panel, std::min(panel + group, panel_end), k);
            const long bytes = Bf16::panel_bytes(of.count);
            for (int p = panel; p < of.end; p++) decode_to_bf16(of.of(p), decoded + (p - panel) * bytes, of.count);
            of.weights = decoded;
            of.bytes = bytes;
            body(of);
        }
}

// blocks: [outputs][inputs / 32][16], scales: [outputs][inputs / 32]. Outputs past the end are zeros.
inline void pack_mxfp4_panel(const uint8_t* blocks, const uint8_t* scales, uint8_t* to, int first, int outputs,
                             int inputs) {
    const int groups = inputs / MX_GROUP, half = MX_GROUP / 2;
    for (int i = 0; i < PANEL; i++) {
        const bool held = first + i < outputs;
        const long row = long(first + i) * groups;
        for (int group = 0; group < groups; group++) {
            uint8_t* own = to + long(group) * MX_GROUP_BYTES;
            own[i] = held ? scales[row + group] : 127;
            for (int byte = 0; byte < half; byte++)
                own[PANEL + byte / 4 * PANEL * 4 + i * 4 + byte % 4] = held ? blocks[(row + group) * half + byte] : 0;
        }
    }
}

}  // namespace
}  // namespace quire

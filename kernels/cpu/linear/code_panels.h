// Panels of weights whose codes are integers, with a scale for each block of inputs: their layout, and decoding.
//
// A panel is a sequence of super-blocks: [head][block]... A block is [PANEL] scales, [PANEL] minimums in float16 if the
// layer has them, [PANEL] zeros in int8 if it has them, and codes. Kinds of scales:
//
// * plain numbers in the type that the file has. All blocks are one super-block, whose head has the row scales, if any.
// * bytes (K types of GGUF files, also those with six bits in the file): a super-block has 256 inputs, and its head
//   has float16 factors of scales, and of minimums if the layer has them; a block's minimums are bytes too.
//
// Codes of eight inputs are [4][PANEL] pairs of bytes, or one word of four-bit codes for each output. Pair j has inputs
// j and j + 4, also in rounded rows (code_rows.h): a shift and a mask of a word give pairs of 16-bit integers. Codes of
// five and six bits have four bits of all inputs first, then words with the upper bits.
#pragma once

#include "linear/panels.h"

namespace quire {
namespace {

// As in kernels/cpu/linear/codes.py.
enum CodeKind { CODES_8, CODES_4, CODES_5, CODES_6, CODES_FP4 };
enum ScaleKind { SCALE_FLOAT32, SCALE_BFLOAT16, SCALE_FLOAT16, SCALE_FLOAT8, SCALE_BYTES };

constexpr int WORD = 8;         // inputs whose codes are decoded together
constexpr int SUPER = 256;       // inputs of a super-block whose blocks have scales in bytes
constexpr int MOST_BLOCK = 512;  // inputs of a block: sums of code * row stay below 2 ** 31

// As in kernels/cpu/linear/codes.py, which keeps one per layer.
struct CodesLayer {
    const char* packed;
    const float* bias;     // or null
    const int32_t* order;  // input of each packed one, -1 for padding; null: as they are
    int32_t outputs, inputs;
    int32_t packed_inputs;  // a multiple of WORD; the last block may have fewer inputs than the others
    int32_t kind, block, scale_kind, offset, has_zeros, has_mins, has_row_scales;
    int32_t rounds_rows;  // to int8, with a scale for each row
};

struct Layout {
    int blocks, per_super;
    long super_head, mins, zeros, codes, block_bytes, super_bytes, panel_bytes;

    Layout() = default;
    explicit Layout(const CodesLayer& layer) {
        const bool bytes = layer.scale_kind == SCALE_BYTES;
        const long words = layer.block / WORD;
        blocks = (layer.packed_inputs + layer.block - 1) / layer.block;
        per_super = bytes ? SUPER / layer.block : blocks;
        super_head = PANEL * (bytes ? layer.has_mins ? 4 : 2 : layer.has_row_scales ? 4 : 0);
        mins = PANEL * (bytes || layer.scale_kind == SCALE_FLOAT8 ? 1 : layer.scale_kind == SCALE_FLOAT32 ? 4 : 2);
        zeros = mins + (layer.has_mins ? PANEL * (bytes ? 1 : 2) : 0);
        codes = zeros + (layer.has_zeros ? PANEL : 0);
        block_bytes = codes + words * word_bytes(layer.kind);
        super_bytes = super_head + per_super * block_bytes;
        const long last = (layer.packed_inputs - (blocks - 1L) * layer.block) / WORD;
        const long missing = (words - last) * word_bytes(layer.kind);
        panel_bytes = (blocks / per_super * super_bytes - missing + 63) / 64 * 64;
    }

    static constexpr long word_bytes(int kind) {
        return PANEL * (kind == CODES_8 ? 8 : kind == CODES_5 ? 5 : kind == CODES_6 ? 6 : 4);
    }
    long head_of(int block) const { return block / per_super * super_bytes; }
    long of(int block) const { return head_of(block) + super_head + block % per_super * block_bytes; }
};

QUIRE_INLINE vint splat_int(int32_t x) { return vint{} + x; }

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

typedef int16_t vshort __attribute__((vector_size(4 * VF)));
typedef int8_t vbyte __attribute__((vector_size(2 * VF)));

// Widens pairs of signed bytes to pairs of 16-bit integers, one pair in each lane.
QUIRE_INLINE vint load_pairs(const char* from) {
#if defined(__AVX512BW__)
    if constexpr (VF == 16) return (vint)_mm512_cvtepi8_epi16(load<__m256i>(from));
#endif
#if defined(__AVX2__)
    if constexpr (VF == 8) {
        const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(from));
        return load<vint>((const char*)&wide);
    }
#endif
    return (vint)__builtin_convertvector(load<vbyte>(from), vshort);
}

// Numbers of float8 e4m3 divided by 2 ** 8: their bits at the places of a float16's.
constexpr float FLOAT8_STEP = 256;
QUIRE_INLINE vfloat e4m3(const char* from) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) {
        const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from)), 7);
        return (vfloat)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(int16_t(0xbfff))));
    }
#endif
    const vint bits = load_signed_bytes(from);
    const vuint magnitude = (vuint)bits & 0x7f;
    const vfloat small = __builtin_convertvector((vint)magnitude, vfloat) * (1.f / (1 << 17));
    const vuint normal = (magnitude << 20) + (112u << 23);
    return (vfloat)((magnitude < 8 ? (vuint)small : normal) | ((vuint)bits & 0x80000000u));
}

QUIRE_INLINE vfloat plain_scale(int kind, const char* scales, int v) {
    return kind == SCALE_FLOAT32    ? load<vfloat>(scales + v * VF * 4)
           : kind == SCALE_BFLOAT16 ? load_floats((const uint16_t*)scales + v * VF)
           : kind == SCALE_FLOAT16  ? widen_halves(scales + v * VF * 2)
                                    : e4m3(scales + v * VF) * FLOAT8_STEP;
}

// Scales of a block, and what is added to each of its codes times scale: 0 unless the layer has minimums.
struct Scales {
    vfloat scale, min;
};

QUIRE_INLINE Scales scales_of(const CodesLayer& layer, const Layout& layout, const char* head, const char* at, int v) {
    if (layer.scale_kind == SCALE_BYTES) {
        const auto number = [&](const char* factors, const char* bytes) __attribute__((always_inline)) {
            const vfloat factor = widen_halves(factors + v * VF * 2);
            return factor * __builtin_convertvector(load_signed_bytes(bytes + v * VF), vfloat);
        };
        return {number(head, at), layer.has_mins ? -number(head + PANEL * 2, at + layout.mins) : vfloat{}};
    }
    vfloat scale = plain_scale(layer.scale_kind, at, v);
    if (layer.kind == CODES_FP4) scale *= .5f;
    if (layer.has_row_scales) scale *= load<vfloat>(head + v * VF * 4);
    return {scale, layer.has_mins ? widen_halves(at + layout.mins + v * VF * 2) : vfloat{}};
}

// Pairs of doubled e2m1 numbers, which are integers, from the lowest four bits of the halves of each lane.
QUIRE_INLINE vint e2m1_pairs(vuint codes) {
#if defined(__AVX512BW__)
    if constexpr (VF == 16) {
        const __m256i once = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        return (vint)_mm512_permutexvar_epi16((__m512i)codes, _mm512_broadcast_i64x4(once));  // ignores the fifth bit
    }
#endif
    const vshort all = (vshort)codes, magnitude = all & 7, negative = (all & 8) != 0;
    const vshort number = magnitude + ((magnitude > 4) & 1) + ((magnitude > 5) & 1) + ((magnitude > 6) & 3);
    return (vint)((number ^ negative) - negative);
}

// Decodes pair j of one word of a block.
template <int KIND>
QUIRE_INLINE vint decode_pair(const char* codes, int word, int j, int v) {
    if constexpr (KIND == CODES_8) return load_pairs(codes + ((word * 4 + j) * PANEL + v * VF) * 2);
    const vuint low = load<vuint>(codes + (word * PANEL + v * VF) * 4) >> 4 * j;
    if constexpr (KIND == CODES_FP4) return e2m1_pairs(low);
    vuint upper = {};
    if constexpr (KIND == CODES_5)
        upper = (load<vuint>(codes + (4 * PANEL + v * VF) * 4) >> (word * 4 + j) & 0x00010001u) << 4;
    if constexpr (KIND == CODES_6)
        upper = (load<vuint>(codes + (2 * PANEL + v * VF) * 4) >> (word * 8 + 2 * j) & 0x00030003u) << 4;
    return (vint)((low & 0x000f000fu) | upper);
}

// Adds the products of both integers of each lane's pair.
QUIRE_INLINE vint add_products(vint sum, vint a, vint b) {
#if defined(__AVX512VNNI__)
    if constexpr (VF == 16) {
        // gcc takes it that either operand of the intrinsic may lie in memory, and spills them.
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
#elif defined(__AVX512BW__)
    if constexpr (VF == 16)
        return (vint)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#endif
#if defined(__AVX2__)
    if constexpr (VF == 8) {
        __m256i left, right;
        std::memcpy(&left, &a, 32), std::memcpy(&right, &b, 32);
        const __m256i product = _mm256_madd_epi16(left, right);
        sum += load<vint>((const char*)&product);
        asm("" : "+x"(sum));  // gcc adds products to each other first, in registers that the sums need
        return sum;
    }
#endif
    return sum + (a >> 16) * (b >> 16) + (a << 16 >> 16) * (b << 16 >> 16);
}

}  // namespace
}  // namespace quire

// Packing of weights whose codes are integers, from a ScaledWeight or the blocks of a GGUF file, into code_panels.h.
#pragma once

#include <vector>

#include "code_panels.h"

namespace quire {
namespace {

// As in kernels/cpu/codes_linear.py. Types of GGUF blocks: see kernels/common/block_weight.py.
enum SourceKind { FROM_INT8, FROM_INT4, FROM_FP4, FROM_Q4_1, FROM_Q5_0, FROM_Q5_1, FROM_Q4_K, FROM_Q5_K, FROM_Q6_K };

// As in kernels/cpu/codes_linear.py.
struct CodesSource {
    const uint8_t* codes;  // or blocks; rows `row_bytes` apart
    const char* scales;    // [outputs][groups], or null
    const int8_t* zeros;   // the same, or null
    const float* row_scales;
    const int32_t* order;  // code of each packed input, -1 for padding; null: as they are
    int64_t row_bytes;
    int32_t kind, inputs;
    int32_t groups, blocks_per_group;
};

inline int fifth_bit(const uint8_t* word, int i) { return word[i / 8] >> i % 8 & 1; }

// Unpacks an output's codes.
inline void unpack_codes(const CodesSource& from, const uint8_t* row, uint8_t* to) {
    const bool pairs = from.kind == FROM_INT4 || from.kind == FROM_FP4;
    if (from.kind == FROM_INT8) return (void)std::memcpy(to, row, from.inputs);
    if (pairs) {
        for (int i = 0; i < from.inputs; i++) to[i] = row[i / 2] >> (i & 1) * 4 & 15;
        return;
    }
    const bool whole = from.kind >= FROM_Q4_K;
    for (int k = 0; k < from.inputs; k += whole ? 256 : 32, to += whole ? 256 : 32) {
        if (!whole) {  // [scale][minimum][fifth bits][codes]
            const uint8_t* fifth = row + (from.kind == FROM_Q5_0 ? 2 : 4);
            const bool five = from.kind != FROM_Q4_1;
            const uint8_t* codes = fifth + (five ? 4 : 0);
            for (int i = 0; i < 32; i++)
                to[i] = uint8_t((codes[i % 16] >> i / 16 * 4 & 15) | (five ? fifth_bit(fifth, i) << 4 : 0));
            row = codes + 16;
        } else if (from.kind == FROM_Q6_K) {
            for (int i = 0; i < 256; i++) {
                const int half = i / 128, group = i % 128 / 32, at = i % 32;
                const int low = row[half * 64 + group % 2 * 32 + at] >> group / 2 * 4 & 15;
                to[i] = uint8_t(low | (row[128 + half * 32 + at] >> group * 2 & 3) << 4);
            }
            row += 210;
        } else {
            const uint8_t* fifth = row + 16;
            const bool five = from.kind == FROM_Q5_K;
            const uint8_t* codes = fifth + (five ? 32 : 0);
            for (int i = 0; i < 256; i++) {
                const int low = codes[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
                to[i] = uint8_t(low | (five ? (fifth[i % 32] >> i / 32 & 1) << 4 : 0));
            }
            row = codes + 128;
        }
    }
}

// Writes the scales of output `i` of a panel from the blocks of a GGUF file.
inline void pack_block_scales(const CodesLayer& layer, const Layout& layout, const CodesSource& from,
                              const uint8_t* row, char* to, int i) {
    static constexpr long SIZES[] = {0, 0, 0, 20, 22, 24, 144, 176, 210};
    for (int block = 0; block < layout.blocks; block++) {
        char *head = to + layout.head_of(block), *at = to + layout.of(block);
        const uint8_t* own = row + block / (layer.scale_kind < SCALE_6_BITS ? 1 : layout.per_super) * SIZES[from.kind];
        if (layer.scale_kind == SCALE_8_BITS) {
            std::memcpy(head + i * 2, own + 208, 2);
            at[i] = char(own[192 + block % 16]);
        } else if (layer.scale_kind == SCALE_6_BITS) {
            if (block % 8) continue;
            std::memcpy(head + i * 2, own, 2);
            std::memcpy(head + PANEL * 2 + i * 2, own + 2, 2);
            uint32_t scales = 0, mins = 0, upper = 0;
            for (uint32_t g = 0; g < 8; g++) {
                const uint8_t *six = own + 4, *rest = six + 8 + g % 4;
                const uint32_t scale = g < 4 ? six[g] & 63 : (*rest & 15) | six[g - 4] >> 6 << 4;
                const uint32_t min = g < 4 ? six[4 + g] & 63 : *rest >> 4 | six[g] >> 6 << 4;
                scales |= (scale & 15) << 4 * g, mins |= (min & 15) << 4 * g;
                upper |= scale >> 4 << 2 * g | min >> 4 << (16 + 2 * g);
            }
            const uint32_t words[] = {scales, mins, upper};
            for (int w = 0; w < 3; w++) std::memcpy(head + PANEL * 4 + (w * PANEL + i) * 4, &words[w], 4);
        } else {
            std::memcpy(at + i * 2, own, 2);
            if (layer.has_mins) std::memcpy(at + layout.mins + i * 2, own + 2, 2);
        }
    }
}

inline void pack_plain_scales(const CodesLayer& layer, const Layout& layout, const CodesSource& from, long output,
                              char* to, int i) {
    const long size = layout.mins / PANEL;
    if (layer.has_row_scales) std::memcpy(to + i * 4, from.row_scales + output, 4);
    for (int block = 0; block < layout.blocks; block++) {
        const long group = output * from.groups + block / from.blocks_per_group;
        char* at = to + layout.of(block);
        std::memcpy(at + i * size, from.scales + group * size, size);
        if (layer.has_zeros) at[layout.zeros + i] = from.zeros[group];
    }
}

// Writes 8 codes of output `i`: those of word `word` of a block.
inline void pack_word(const CodesLayer& layer, const uint8_t* eight, char* codes, int word, int i) {
    if (layer.kind == CODES_8) {
        for (int j = 0; j < 8; j++) codes[((word * 4 + j % 4) * PANEL + i) * 2 + j / 4] = char(eight[j]);
        return;
    }
    uint32_t low = 0, upper = 0;
    const int bits = layer.kind == CODES_6 ? 2 : 1;
    for (int j = 0; j < 8; j++) {
        low |= uint32_t(eight[j] & 15) << 4 * j;
        upper |= uint32_t(eight[j] >> 4) << (j / 4 * 16 + (word * 4 + j % 4) * bits);
    }
    std::memcpy(codes + (word * PANEL + i) * 4, &low, 4);
    if (layer.kind != CODES_5 && layer.kind != CODES_6) return;
    char* const plane = codes + (layer.block / WORD * PANEL + i) * 4;
    uint32_t before;
    std::memcpy(&before, plane, 4);
    upper |= before;
    std::memcpy(plane, &upper, 4);
}

inline void pack_panel(const CodesLayer& layer, const Layout& layout, const CodesSource& from, char* to, int first) {
    std::memset(to, 0, layout.panel_bytes);
    std::vector<uint8_t> stored(from.inputs), ordered(layer.packed_inputs);
    for (int i = 0; i < PANEL && first + i < layer.outputs; i++) {
        const uint8_t* row = from.codes + long(first + i) * from.row_bytes;
        unpack_codes(from, row, stored.data());
        for (int k = 0; k < layer.packed_inputs; k++) {
            const int at = from.order ? from.order[k] : k < from.inputs ? k : -1;
            ordered[k] = at < 0 ? 0 : stored[at];
        }
        if (from.scales)
            pack_plain_scales(layer, layout, from, first + i, to, i);
        else
            pack_block_scales(layer, layout, from, row, to, i);
        for (int k = 0; k < layer.packed_inputs; k += WORD) {
            const int block = k / layer.block;
            pack_word(layer, ordered.data() + k, to + layout.of(block) + layout.codes, k % layer.block / WORD, i);
        }
    }
}

}  // namespace
}  // namespace quire

// Packing of weights whose codes are integers, from a ScaledWeight or the blocks of a GGUF file, into code_panels.h.
#pragma once

#include <vector>

#include "linear/code_panels.h"

namespace quire {
namespace {

// As in kernels/cpu/linear/codes.py. Types of GGUF blocks: see kernels/common/block_weight.py.
enum SourceKind {
    FROM_INT8,
    FROM_INT4,
    FROM_FP4,
    FROM_Q4_0,
    FROM_Q4_1,
    FROM_Q5_0,
    FROM_Q5_1,
    FROM_Q8_0,
    FROM_Q4_K,
    FROM_Q5_K,
    FROM_Q6_K
};

// As in kernels/cpu/linear/codes.py.
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
        if (from.kind == FROM_Q8_0) {
            std::memcpy(to, row + 2, 32);
            row += 34;
        } else if (!whole) {  // [scale][minimum][fifth bits][codes]
            const uint8_t* fifth = row + (from.kind == FROM_Q4_0 || from.kind == FROM_Q5_0 ? 2 : 4);
            const bool five = from.kind == FROM_Q5_0 || from.kind == FROM_Q5_1;
            const uint8_t* codes = fifth + (five ? 4 : 0);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 16; i++) to[half * 16 + i] = codes[i] >> 4 * half & 15;
            if (five)
                for (int i = 0; i < 32; i++) to[i] |= fifth_bit(fifth, i) << 4;
            row = codes + 16;
        } else if (from.kind == FROM_Q6_K) {
            for (int part = 0; part < 8; part++) {
                const int half = part / 4, group = part % 4;
                const uint8_t *low = row + half * 64 + group % 2 * 32, *upper = row + 128 + half * 32;
                for (int i = 0; i < 32; i++)
                    to[part * 32 + i] = uint8_t((low[i] >> group / 2 * 4 & 15) | (upper[i] >> group * 2 & 3) << 4);
            }
            row += 210;
        } else {
            const uint8_t* fifth = row + 16;
            const bool five = from.kind == FROM_Q5_K;
            const uint8_t* codes = fifth + (five ? 32 : 0);
            for (int part = 0; part < 8; part++)
                for (int i = 0; i < 32; i++)
                    to[part * 32 + i] = uint8_t((codes[part / 2 * 32 + i] >> part % 2 * 4 & 15) |
                                                (five ? (fifth[i] >> part & 1) << 4 : 0));
            row = codes + 128;
        }
    }
}

inline bool is_finite_half(const uint8_t* at) { return (at[1] & 0x7c) != 0x7c; }

// Writes the scales of output `i` of a panel from the blocks of a GGUF file. Returns whether they are finite.
inline bool pack_block_scales(const CodesLayer& layer, const Layout& layout, const CodesSource& from,
                              const uint8_t* row, char* to, int i) {
    static constexpr long SIZES[] = {0, 0, 0, 18, 20, 22, 24, 34, 144, 176, 210};
    bool finite = true;
    for (int block = 0; block < layout.blocks; block++) {
        char *head = to + layout.head_of(block), *at = to + layout.of(block);
        const bool bytes = layer.scale_kind == SCALE_BYTES;
        const int place = bytes ? block % layout.per_super : 0;
        const uint8_t* own = row + block / (bytes ? layout.per_super : 1) * SIZES[from.kind];
        if (bytes && !layer.has_mins) {
            finite &= is_finite_half(own + 208);
            std::memcpy(head + i * 2, own + 208, 2);
            at[i] = char(own[192 + place]);
        } else if (bytes) {
            finite &= is_finite_half(own) && is_finite_half(own + 2);
            std::memcpy(head + i * 2, own, 2);
            std::memcpy(head + PANEL * 2 + i * 2, own + 2, 2);
            const uint8_t *six = own + 4, *rest = six + 8 + place % 4;
            at[i] = char(place < 4 ? six[place] & 63 : (*rest & 15) | six[place - 4] >> 6 << 4);
            at[layout.mins + i] = char(place < 4 ? six[4 + place] & 63 : *rest >> 4 | six[place] >> 6 << 4);
        } else {
            finite &= is_finite_half(own) && (!layer.has_mins || is_finite_half(own + 2));
            std::memcpy(at + i * 2, own, 2);
            if (layer.has_mins) std::memcpy(at + layout.mins + i * 2, own + 2, 2);
        }
    }
    return finite;
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

// Packs the low four bits of 8 bytes, the first lowest.
inline uint32_t low_bits(const uint8_t* eight) {
    uint64_t bits = load<uint64_t>(eight) & 0x0f0f0f0f0f0f0f0f;
    bits = (bits | bits >> 4) & 0x00ff00ff00ff00ff;
    bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
    return uint32_t(bits | bits >> 16);
}

// Packs the fifth bits of 8 bytes in the same way: the product moves that of byte j to bit 56 + j.
inline uint32_t fifth_bits(const uint8_t* eight) {
    return uint32_t((load<uint64_t>(eight) >> 4 & 0x0101010101010101) * 0x0102040810204080 >> 56);
}

// The same for the fifth and sixth bits.
inline uint32_t upper_pairs(const uint8_t* eight) {
    uint64_t bits = load<uint64_t>(eight) >> 4 & 0x0303030303030303;
    bits = (bits | bits >> 6) & 0x000f000f000f000f;
    bits = (bits | bits >> 12) & 0x000000ff000000ff;
    return uint32_t(bits | bits >> 24);
}

// Writes the codes of a block of output `i`.
inline void pack_block(const CodesLayer& layer, const uint8_t* from, char* codes, int words, int i) {
    uint32_t plane = 0;
    for (int word = 0; word < words; word++, from += WORD) {
        if (layer.kind == CODES_8) {
            for (int j = 0; j < 4; j++) {
                const uint8_t pair[] = {from[j], from[j + 4]};
                std::memcpy(codes + ((word * 4 + j) * PANEL + i) * 2, pair, 2);
            }
            continue;
        }
        const uint32_t low = low_bits(from);
        std::memcpy(codes + (word * PANEL + i) * 4, &low, 4);
        if (layer.kind != CODES_5 && layer.kind != CODES_6) continue;
        const uint32_t upper = layer.kind == CODES_5 ? fifth_bits(from) : upper_pairs(from);
        const int half = layer.kind == CODES_5 ? 4 : 8;
        plane |= (upper & ((1u << half) - 1)) << word * half | upper >> half << (16 + word * half);
    }
    if (layer.kind == CODES_5 || layer.kind == CODES_6)
        std::memcpy(codes + (layer.block / WORD * PANEL + i) * 4, &plane, 4);
}

// Writes outputs [first, first + count) of the layer, the source's rows from `row` on, to one panel. Returns whether
// scales of blocks are finite.
inline bool pack_outputs(const CodesLayer& layer, const Layout& layout, const CodesSource& from, int row, int first,
                         int count) {
    char* const to = (char*)layer.packed + first / PANEL * layout.panel_bytes;
    std::vector<uint8_t> stored(std::max(from.inputs, layer.packed_inputs)), ordered(layer.packed_inputs);
    bool finite = true;
    for (int output = first; output < first + count; output++, row++) {
        const int i = output % PANEL;
        const uint8_t* own = from.codes + long(row) * from.row_bytes;
        unpack_codes(from, own, stored.data());
        if (from.order)
            for (int k = 0; k < layer.packed_inputs; k++)
                ordered[k] = from.order[k] < 0 ? 0 : stored[from.order[k]];
        if (from.scales)
            pack_plain_scales(layer, layout, from, row, to, i);
        else
            finite &= pack_block_scales(layer, layout, from, own, to, i);
        const uint8_t* codes = from.order ? ordered.data() : stored.data();
        for (int block = 0; block < layout.blocks; block++) {
            const int at = block * layer.block, words = std::min(layer.block, layer.packed_inputs - at) / WORD;
            pack_block(layer, codes + at, to + layout.of(block) + layout.codes, words, i);
        }
    }
    return finite;
}

}  // namespace
}  // namespace quire

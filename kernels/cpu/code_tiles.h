// Sums of codes times rounded rows. They are exact integers for each block of inputs, whichever way they are computed;
// each block's sum is then added to a float32 total, in ascending order, with one rounding.
//
// Few rows decode codes in registers. More rows decode blocks once into pairs of 16-bit integers, which stay in a cache.
#pragma once

#include "code_rows.h"

namespace quire {
namespace {

// Rounded rows from one on. What belongs to a block lies `rows`, or for sums of integers `rows` * digits, apart.
struct Rows {
    const int32_t* words;  // of the first digit
    const int32_t* sums;
    const float *scales, *totals;
    long stride, rows;
};

template <int DIGITS>
QUIRE_INLINE Rows rows_from(const RoundedRows& rounded, int row) {
    const long first = long(row) * DIGITS;
    return {rounded.words + first * rounded.stride,
            rounded.sums + first,
            rounded.scales + row,
            rounded.totals + row,
            rounded.stride,
            rounded.rows};
}

// Adds a block's sums of the digits of each row to the rows' totals.
template <int DIGITS, int R, bool MINS>
QUIRE_INLINE void add_block(vfloat* totals, const vint* sums, const Scales& by, const Rows& rows, int block) {
    const float *scales = rows.scales + block * rows.rows, *row_totals = rows.totals + block * rows.rows;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        vfloat sum = __builtin_convertvector(sums[r * DIGITS], vfloat);
        if constexpr (DIGITS == 2)
            sum = multiply_add(__builtin_convertvector(sums[r * 2 + 1], vfloat), splat(SECOND_DIGIT), sum);
        totals[r] = multiply_add(sum * scales[r], by.scale, totals[r]);
        if constexpr (MINS) totals[r] = multiply_add(by.min, splat(row_totals[r]), totals[r]);
    }
}

struct CodesCall {
    const CodesLayer& layer;
    const Layout& layout;
    const RoundedRows& rounded;
    const Sums& sums;
    const char* panel(int index) const { return layer.packed + index * layout.panel_bytes; }
    int words_of(int block) const {
        return std::min(layer.block, layer.packed_inputs - block * layer.block) / WORD;
    }
};

// Computes R rows of one panel, decoded in registers. One panel at a time is one stream from memory, which the hardware
// prefetches: with two or four panels beside each other, one row took 1.4 times as long.
template <int KIND, int DIGITS, int R>
void run_in_registers(const CodesCall& call, int row, int index) {
    constexpr int ALL = R * DIGITS;
    constexpr long BYTES = Layout::word_bytes(KIND);
    const Rows rows = rows_from<DIGITS>(call.rounded, row);
    const CodesLayer& layer = call.layer;
    const Layout& layout = call.layout;
    const char* panel = call.panel(index);
    vfloat totals[2][R] = {};
    for (int block = 0; block < layout.blocks; block++) {
        const char* codes = panel + layout.of(block) + layout.codes;
        const int32_t* x = rows.words + long(block) * layer.block / 2;
        vint sums[2][ALL] = {}, others[2] = {};  // of one row: two chains, which wait for each other less
        const int words = KIND == CODES_5 ? 4 : KIND == CODES_6 ? 2 : call.words_of(block);
        for (int word = 0; word < words; word++, x += 4) {
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(codes + word * BYTES + line + AHEAD);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                vint pairs[4];
                decode_word<KIND>(codes, word, v, pairs);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
                    for (int r = 0; r < ALL; r++) {
                        vint& sum = ALL == 1 && j % 2 ? others[v] : sums[v][r];
                        sum = add_products(sum, pairs[j], splat_int(x[r * rows.stride + j]));
                    }
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const Scales by = scales_of(layer, layout, panel, block, v);
            if (ALL == 1) sums[v][0] += others[v];
            vint zero = splat_int(layer.offset);
            if (layer.has_zeros) zero += load_signed_bytes(panel + layout.of(block) + layout.zeros + v * VF);
            if (layer.has_zeros || layer.offset)
#pragma GCC unroll 8
                for (int r = 0; r < ALL; r++) sums[v][r] -= zero * rows.sums[block * rows.rows * DIGITS + r];
            if (layer.has_mins)
                add_block<DIGITS, R, true>(totals[v], sums[v], by, rows, block);
            else
                add_block<DIGITS, R, false>(totals[v], sums[v], by, rows, block);
        }
    }
    for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) store(call.sums.of(row + r, index) + v * VF, totals[v][r]);
}

// Some blocks of inputs of panels [panel, end), decoded: pairs [inputs / 2][PANEL], then scales and minimums,
// [blocks][PANEL] each.
struct DecodedBlocks {
    char* at;
    long panel_bytes, scales, mins;
    int panel, end, block, block_end;

    static long bytes(const CodesLayer& layer, int blocks) {
        return blocks * (layer.block / 2L * PANEL * 4 + PANEL * (layer.has_mins ? 8 : 4));
    }
    DecodedBlocks(const CodesLayer& layer, char* at_, int panel_, int end_, int block_, int block_end_)
        : at(at_), panel(panel_), end(end_), block(block_), block_end(block_end_) {
        const int blocks = block_end - block;
        scales = blocks * (layer.block / 2L) * PANEL * 4;
        mins = scales + blocks * PANEL * 4L;
        panel_bytes = bytes(layer, blocks);
    }
    char* of(int p) const { return at + (p - panel) * panel_bytes; }
};

template <int KIND>
void decode_blocks(const CodesCall& call, const DecodedBlocks& to) {
    const CodesLayer& layer = call.layer;
    for (int panel = to.panel; panel < to.end; panel++) {
        const char* from = call.panel(panel);
        char* const out = to.of(panel);
        for (int block = to.block; block < to.block_end; block++) {
            const char* at = from + call.layout.of(block);
            const int words = call.words_of(block), place = block - to.block;
            for (int v = 0; v < 2; v++) {
                const Scales by = scales_of(layer, call.layout, from, block, v);
                store(out + to.scales + (place * PANEL + v * VF) * 4, by.scale);
                if (layer.has_mins) store(out + to.mins + (place * PANEL + v * VF) * 4, by.min);
                vint zero = splat_int(layer.offset);
                if (layer.has_zeros) zero += load_signed_bytes(at + call.layout.zeros + v * VF);
                const vshort zeros = (vshort)((zero & 0xffff) | zero << 16);
                char* pairs_at = out + (long(place) * layer.block / 2 * PANEL + v * VF) * 4;
                for (int word = 0; word < words; word++)  {
                    vint pairs[4];
                    const long bytes = Layout::word_bytes(KIND);
                    if (v == 0)
                        for (int line = 0; line < bytes; line += 64)
                            __builtin_prefetch(at + call.layout.codes + word * bytes + line + AHEAD);
                    decode_word<KIND>(at + call.layout.codes, word, v, pairs);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++, pairs_at += PANEL * 4) store(pairs_at, (vshort)pairs[j] - zeros);
                }
            }
        }
    }
}

// Adds decoded blocks of one panel to the totals of R rows; the first block starts them.
template <int DIGITS, int R, bool MINS>
void run_decoded(const CodesCall& call, const DecodedBlocks& of, int row, int panel) {
    constexpr int ALL = R * DIGITS;
    const Rows rows = rows_from<DIGITS>(call.rounded, row);
    const char* const decoded = of.of(panel);
    const char* pairs = decoded;
    const int32_t* x = rows.words + long(of.block) * call.layer.block / 2;
    vfloat memory[2][R] = {};
    vfloat(*totals)[R] = memory;
    asm volatile("" : "+r"(totals) : : "memory");  // not in registers, which the sums of a block need
    if (of.block)
        for (int v = 0; v < 2; v++)
            for (int r = 0; r < R; r++) totals[v][r] = load<vfloat>(call.sums.of(row + r, panel) + v * VF);
    for (int block = of.block; block < of.block_end; block++) {
        vint sums[2][ALL] = {};
        const int count = call.words_of(block) * 4;
        for (int pair = 0; pair < count; pair++, pairs += PANEL * 4, x++) {
            const vint first = load<vint>(pairs), second = load<vint>(pairs + VF * 4);
#pragma GCC unroll 16
            for (int r = 0; r < ALL; r++) {
                const vint value = splat_int(x[r * rows.stride]);
                sums[0][r] = add_products(sums[0][r], first, value);
                sums[1][r] = add_products(sums[1][r], second, value);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const long place = ((block - of.block) * PANEL + v * VF) * 4L;
            Scales by{load<vfloat>(decoded + of.scales + place), {}};
            if constexpr (MINS) by.min = load<vfloat>(decoded + of.mins + place);
            add_block<DIGITS, R, MINS>(totals[v], sums[v], by, rows, block);
        }
    }
    for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) store(call.sums.of(row + r, panel) + v * VF, totals[v][r]);
}

}  // namespace
}  // namespace quire

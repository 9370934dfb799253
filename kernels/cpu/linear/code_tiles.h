// Sums of codes times rounded rows. They are exact integers for each block of inputs, whichever way they are computed;
// each block's sum is then added to a float32 total, in ascending order, with one rounding.
#pragma once

#include "linear/code_rows.h"

namespace quire {
namespace {

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

// Adds blocks [block, end) of one panel to the totals of R rows. Codes are decoded in registers, and sums stay there. So
// do totals with 16 lanes: on Zen 5 no dot product or multiply-add starts in the cycle of a store.
template <int KIND, int DIGITS, int R>
void run_tile(const CodesCall& call, int row, int index, int block, int end) {
    constexpr int ALL = R * DIGITS;
    constexpr long BYTES = Layout::word_bytes(KIND);
    const CodesLayer& layer = call.layer;
    const Layout& layout = call.layout;
    const RoundedRows& rows = call.rounded;
    const char* head = call.panel(index) + layout.head_of(block);
    int place = block % layout.per_super;
    vfloat memory[2][R] = {};
    vfloat(*totals)[R] = memory;
    if constexpr (VF < 16 && ALL > 3) asm volatile("" : "+r"(totals) : : "memory");  // not in registers
    if (block)
        for (int v = 0; v < 2; v++)
            for (int r = 0; r < R; r++) totals[v][r] = load<vfloat>(call.sums.of(row + r, index) + v * VF);
    for (; block < end; block++) {
        const char* const at = head + layout.super_head + place * layout.block_bytes;
        const char* codes = at + layout.codes;
        vint sums[2][ALL], others[2] = {};  // of one row: two chains, which wait for each other less
        const long at_rows = block * rows.rows + row;
        const int32_t* starts = rows.starts + at_rows * DIGITS;
#pragma GCC unroll 16
        for (int r = 0; r < ALL; r++) sums[0][r] = sums[1][r] = splat_int(starts[r]);
        if (layer.has_zeros)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const vint zeros = load_signed_bytes(at + layout.zeros + v * VF);
#pragma GCC unroll 16
                for (int r = 0; r < ALL; r++) sums[v][r] *= zeros;
            }
        const auto add_word = [&](int word) __attribute__((always_inline)) {
            const int32_t* x = rows.at(long(row) * DIGITS, block * (layer.block / WORD) + word);
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(codes + word * BYTES + line + AHEAD);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const vint first = decode_pair<KIND>(codes, word, j, 0), second = decode_pair<KIND>(codes, word, j, 1);
#pragma GCC unroll 16
                for (int r = 0; r < ALL; r++) {
                    const vint value = splat_int(x[r * RoundedRows::CHUNK + j]);
                    vint &left = ALL == 1 && j % 2 ? others[0] : sums[0][r],
                         &right = ALL == 1 && j % 2 ? others[1] : sums[1][r];
                    left = add_products(left, first, value);
                    right = add_products(right, second, value);
                }
            }
        };
        if constexpr (KIND == CODES_5 || KIND == CODES_6) {  // shifts of upper bits are constants, which spill less
#pragma GCC unroll 4
            for (int word = 0; word < (KIND == CODES_5 ? 4 : 2); word++) add_word(word);
        } else {
            for (int word = 0, words = call.words_of(block); word < words; word++) add_word(word);
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const Scales by = scales_of(layer, layout, head, at, v);
            if (ALL == 1) sums[v][0] += others[v];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                vfloat sum = __builtin_convertvector(sums[v][r * DIGITS], vfloat);
                if constexpr (DIGITS == 2)
                    sum = multiply_add(__builtin_convertvector(sums[v][r * 2 + 1], vfloat), splat(SECOND_DIGIT), sum);
                totals[v][r] = multiply_add(sum * rows.scales[at_rows + r], by.scale, totals[v][r]);
            }
            if (layer.has_mins)
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
                    totals[v][r] = multiply_add(by.min, splat(rows.totals[at_rows + r]), totals[v][r]);
        }
        if (++place == layout.per_super) place = 0, head += layout.super_bytes;
    }
    for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) store(call.sums.of(row + r, index) + v * VF, totals[v][r]);
}

}  // namespace
}  // namespace quire

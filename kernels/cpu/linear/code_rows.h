// Rows rounded to 16-bit integers, the operand of weights whose codes are integers.
//
// Each block of a row has a scale of its own, a power of two. A bfloat16 number is one integer: the block's largest
// magnitude is between 2 ** 14 and 2 ** 15, so that a number of at least a 128th of it is exact. A float32 number is two
// integers, the second with a scale 2 ** 15 times smaller: 29 bits of the block's largest magnitude.
//
// Integers lie in the order of code_panels.h: of each 8 inputs, pairs of inputs j and j + 4.
#pragma once

#include <cmath>
#include <utility>

#include "linear/code_panels.h"

namespace quire {
namespace {

constexpr float SECOND_DIGIT = 1.f / 32768;

// Rounded rows in memory of the caller's, which a late thread may read when the product is complete.
//
// Chunks of 32 inputs, as pairs, lie beside each other for all rows (an odd number: their sets of a cache differ), so
// that a tile of rows is one pointer and constant distances. Each digit of a float32 row is a line of its own.
struct RoundedRows {
    static constexpr int CHUNK = 16;  // words: a cache line

    int32_t* words;   // [chunks][apart][CHUNK]
    int32_t* starts;  // [blocks][rows * digits]: minus a block's sum of integers, times the offset of a layer without zeros
    float* scales;    // [blocks][rows]
    float* totals;    // [blocks][rows]: sums of the rounded numbers
    long rows, apart;

    RoundedRows(const CodesLayer& layer, char* memory, long rows_, int digits)
        : words((int32_t*)memory), rows(rows_), apart(rows_ * digits | 1) {
        const long blocks = Layout(layer).blocks;
        starts = words + apart * words_of(layer);
        scales = (float*)(starts + rows * digits * blocks);
        totals = scales + rows * blocks;
    }

    // The pairs of inputs 8 * `word` and on of a line, a row's or a digit's.
    int32_t* at(long line, unsigned word) const { return words + (word / 4 * apart + line) * CHUNK + word % 4 * 4; }

    static long row_bytes(const CodesLayer& layer, int digits) {
        return (2 * digits * words_of(layer) + (digits + 2) * Layout(layer).blocks) * 4;
    }

  private:
    static long words_of(const CodesLayer& layer) { return (layer.packed_inputs / 2 + CHUNK - 1) / CHUNK * CHUNK; }
};

// Rounds to integers below 2 ** 22, ties to even.
QUIRE_INLINE vint round_to_int(vfloat x) {
    const vfloat magic = splat(3 << 22);
    return (vint)(x + magic) - (vint)magic;
}

// Stores 2 * VF integers as pairs of inputs j and j + 4 of each 8.
template <class V>
QUIRE_INLINE void store_pairs(int32_t* to, V first, V second) {
    V low = first, high = second;
    if constexpr (sizeof(V) == 64) {
        low = __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        high = __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    } else if constexpr (sizeof(V) == 32) {
        low = __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11);
        high = __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    store(to, (low & 0xffff) | high << 16);
}

template <int N, int... I>
QUIRE_INLINE vint rotate(vint x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I + N) % VF...);
}

// Combines all lanes, into each lane.
template <int N = VF / 2, class Combine>
QUIRE_INLINE vint over_lanes(vint x, Combine combine) {
    x = combine(x, rotate<N>(x, std::make_integer_sequence<int, VF>{}));
    if constexpr (N > 1) return over_lanes<N / 2>(x, combine);
    return x;
}

QUIRE_INLINE vint larger(vint a, vint b) { return a > b ? a : b; }

// Bits of the largest magnitude, in all lanes; NaN and infinity are larger than all numbers.
QUIRE_INLINE vint largest_bits(const float* x, int count) {
    vint most = {};
    for (int i = 0; i < count; i += VF) most = larger(most, load<vint>(x + i) & 0x7fffffff);
    return over_lanes(most, larger);
}

// Returns `count` inputs of a row from packed input k on, with zeros up to a multiple of 2 * VF, `padded`.
template <class T>
QUIRE_INLINE const float* read_inputs(const CodesLayer& layer, const T* x, int k, int count, int padded,
                                      float* memory) {
    int i = 0;
    if (layer.order) {
        for (; i < count; i++) memory[i] = layer.order[k + i] < 0 ? 0.f : to_float(x[layer.order[k + i]]);
    } else {
        const int held = std::min(count, layer.inputs - k);
        if constexpr (sizeof(T) == 4)
            if (held == padded) return x + k;
        for (; i + VF <= held; i += VF) store(memory + i, load_floats(x + k + i));
        for (; i < held; i++) memory[i] = to_float(x[k + i]);
    }
    for (; i < padded; i++) memory[i] = 0;
    return memory;
}

constexpr int padded_inputs(int count) { return (count + 2 * VF - 1) / (2 * VF) * (2 * VF); }

// The scale of a row that is rounded to int8.
template <class T>
vfloat int8_scale(const CodesLayer& layer, const T* x) {
    vint most = {};
    alignas(64) float memory[MOST_BLOCK];
    for (int k = 0; k < layer.packed_inputs; k += MOST_BLOCK) {
        const int count = std::min(MOST_BLOCK, layer.packed_inputs - k), padded = padded_inputs(count);
        most = larger(most, largest_bits(read_inputs(layer, x, k, count, padded, memory), padded));
    }
    return (vfloat)larger((vint)((vfloat)most / 127.5f), splat_int(1 << 23));
}

// Rounds row `row`. DIGITS: 1 for bfloat16, 2 for float32. INT8: to one integer of 8 bits, with a scale for the row.
template <int DIGITS, bool INT8, class T>
void round_row(const CodesLayer& layer, int blocks, const RoundedRows& to, const T* x, int row) {
    alignas(64) float memory[MOST_BLOCK];
    alignas(64) int32_t words[DIGITS][MOST_BLOCK / 2];
    const vfloat row_scale = INT8 ? int8_scale(layer, x) : vfloat{};
    const bool uses_sums = layer.offset || layer.has_zeros || layer.has_mins;
    for (int block = 0; block < blocks; block++) {
        const int k = block * layer.block, count = std::min(layer.block, layer.packed_inputs - k);
        const int padded = padded_inputs(count);
        const float* numbers = read_inputs(layer, x, k, count, padded, memory);
        const vint exponent = largest_bits(numbers, padded) >> 23;
        // From 2 ** -100 on, so that the inverse is a number. NaN or infinity in a block make its scale NaN.
        const vint place = larger(exponent, splat_int(27)) - (DIGITS == 2 ? 13 : 14);
        const vfloat inverse = (vfloat)((254 - place) << 23);
        const vfloat scale = INT8 ? row_scale : (vfloat)(place << 23);
        const bool whole = count == padded && layer.block % (2 * VF) == 0;  // no word of two blocks
        vint sums[DIGITS] = {};
        for (int i = 0; i < padded; i += 2 * VF) {
            vint out[DIGITS][2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const vfloat number = load<vfloat>(numbers + i + half * VF);
                const vfloat first = INT8 ? number / row_scale : number * inverse;
                const vint digit = round_to_int(first);
                out[0][half] = INT8 ? (digit > 127 ? splat_int(127) : digit) : digit;
                if constexpr (DIGITS == 2)
                    out[1][half] = round_to_int((first - __builtin_convertvector(digit, vfloat)) * 32768.f);
#pragma GCC unroll 2
                for (int d = 0; d < DIGITS; d++) sums[d] += out[d][half];
            }
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; d++)
                store_pairs(whole ? to.at(long(row) * DIGITS + d, (k + i) / WORD) : words[d] + i / 2, out[d][0],
                            out[d][1]);
        }
        vfloat total = {};
        for (int d = DIGITS - 1; d >= 0; d--) {
            for (int i = whole ? count : 0; i < count; i += WORD)
                std::memcpy(to.at(long(row) * DIGITS + d, (k + i) / WORD), words[d] + i / 2, WORD * 2);
            const vint sum = uses_sums ? over_lanes(sums[d], [](vint a, vint b) { return a + b; }) : vint{};
            to.starts[(block * to.rows + row) * DIGITS + d] = -sum[0] * (layer.has_zeros ? 1 : layer.offset);
            total = multiply_add(total, splat(SECOND_DIGIT), __builtin_convertvector(sum, vfloat));
        }
        to.scales[block * to.rows + row] = (exponent == 255 ? splat(NAN) : scale)[0];
        to.totals[block * to.rows + row] = to.scales[block * to.rows + row] * total[0];
    }
}

}  // namespace
}  // namespace quire

// Products of bfloat16 rows with an instruction that adds two products to a float32 sum. Its operands are words of two
// neighbouring inputs: those of a bfloat16 panel, and one of each row.
#pragma once

#include "linear_mxfp4.h"

namespace quire {
namespace {

#if defined(__AVX512BF16__)
constexpr bool DOTS_COMPILED = VF == 16;

struct Dots : Bf16 {
    static constexpr int MAX_ROWS = 12;  // 24 sums, two registers of weights, and those of the rows
    static constexpr int panels(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
};

QUIRE_INLINE vfloat add_dots(vfloat sum, uint32_t x, vuint weights) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)weights);
}

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

// Adds one word of each row, at rows[r / 3] + r % 3 * apart + offset.
template <int R, int P>
QUIRE_INLINE void add_words(Tile<R, P>& tile, const char* const (&rows)[(R + 2) / 3], long apart, long offset,
                            const char* panel, long bytes) {
    vuint weights[P][2];
    prefetch<P>(panel, bytes, PANEL * 4);
    each<P>(QUIRE_EACH(p) {
        each<2>(QUIRE_EACH(v) { weights[p][v] = load<vuint>(panel + p * bytes + v * VF * 4); });
    });
    each<R>(QUIRE_EACH(r) {
        const uint32_t word = load<uint32_t>(rows[r / 3] + r % 3 * apart + offset);
        each<P>(QUIRE_EACH(p) {
            each<2>(QUIRE_EACH(v) { tile.sums[r][p][v] = add_dots(tile.sums[r][p][v], word, weights[p][v]); });
        });
    });
}

template <int R, int P>
QUIRE_INLINE void block(Dots, Tile<R, P>& out, const uint16_t* x, long stride, const char* panel, long bytes,
                        int count) {
    constexpr int THIRDS = (R + 2) / 3, UNROLL = 4;
    // One pointer for three rows, which the compiler must not replace by three.
    const long apart = stride * 2;
    const char* rows[THIRDS];
    each<THIRDS>(QUIRE_EACH(i) { rows[i] = (const char*)x + 3 * i * apart; });
    Tile<R, P> tile = {};
    int k = 0;
    for (; k + 2 * UNROLL <= count; k += 2 * UNROLL, panel += UNROLL * PANEL * 4) {
        each<UNROLL>(QUIRE_EACH(i) { add_words(tile, rows, apart, 4 * i, panel + i * PANEL * 4, bytes); });
        each<THIRDS>(QUIRE_EACH(i) {
            rows[i] += 4 * UNROLL;
            asm volatile("" : "+r"(rows[i]));
        });
    }
    for (; k + 2 <= count; k += 2, panel += PANEL * 4) {
        add_words(tile, rows, apart, 0, panel, bytes);
        each<THIRDS>(QUIRE_EACH(i) { rows[i] += 4; });
    }
    if (k < count) {
        // The word's other half may belong to another row.
        uint32_t last[3 * THIRDS] = {};
        const char* copies[THIRDS];
        each<R>(QUIRE_EACH(r) { last[r] = load<uint16_t>(rows[r / 3] + r % 3 * apart); });
        each<THIRDS>(QUIRE_EACH(i) { copies[i] = (const char*)(last + 3 * i); });
        add_words(tile, copies, 4, 0, panel, bytes);
    }
    out = tile;
}
#else
constexpr bool DOTS_COMPILED = false;
#endif

}  // namespace
}  // namespace quire

// Products of bfloat16 rows with an instruction that adds two products to a float32 sum. Its operands are words of two
// neighbouring inputs: those of a bfloat16 panel, and one of each row.
#pragma once

#include "linear/mxfp4.h"

namespace quire {
namespace {

#if defined(__AVX512BF16__)
constexpr bool DOTS_COMPILED = VF == 16;

constexpr int FAR_AHEAD = 8192;  // bytes, into L2: with AHEAD, into L1, few rows are a fifth slower

// More panels at a time for few rows, which wait for memory: it is faster with more streams.
struct Dots {
    static constexpr int MAX_ROWS = 12;  // 24 sums, two registers of weights, and those of the rows
    static constexpr int panels(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : rows <= 6 ? 2 : 1; }
};

QUIRE_INLINE vfloat add_dots(vfloat sum, uint32_t x, vuint weights) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)weights);
}

// Adds one word of each row, at rows[r / 3] + r % 3 * apart + offset.
template <int R, int P>
QUIRE_INLINE void add_words(Tile<R, P>& tile, const char* const (&rows)[(R + 2) / 3], long apart, long offset,
                            const char* panel, long bytes, const char* next) {
    vuint weights[P][2];
    each<P>(QUIRE_EACH(p) {
        for (int line = 0; line < PANEL * 4; line += 64) __builtin_prefetch(next + p * bytes + line, 0, 2);
    });
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

// As block of panels.h. next: weights to prefetch meanwhile, `step` bytes for each word.
template <int R, int P>
QUIRE_INLINE void dots(Tile<R, P>& out, const uint16_t* x, long stride, const char* panel, long bytes, int count,
                       const char* next, long step) {
    constexpr int THIRDS = (R + 2) / 3, UNROLL = 4;
    // One pointer for three rows, which the compiler must not replace by three.
    const long apart = stride * 2;
    const char* rows[THIRDS];
    each<THIRDS>(QUIRE_EACH(i) { rows[i] = (const char*)x + 3 * i * apart; });
    Tile<R, P> tile = {};
    int k = 0;
    for (; k + 2 * UNROLL <= count; k += 2 * UNROLL, panel += UNROLL * PANEL * 4) {
        each<UNROLL>(QUIRE_EACH(i) {
            add_words(tile, rows, apart, 4 * i, panel + i * PANEL * 4, bytes, next);
            next += step;
            asm volatile("" : "+r"(next));  // otherwise the addresses are computed first, and spill
        });
        each<THIRDS>(QUIRE_EACH(i) {
            rows[i] += 4 * UNROLL;
            asm volatile("" : "+r"(rows[i]));
        });
    }
    for (; k + 2 <= count; k += 2, panel += PANEL * 4) {
        add_words(tile, rows, apart, 0, panel, bytes, next);
        next += step;
        each<THIRDS>(QUIRE_EACH(i) { rows[i] += 4; });
    }
    if (k < count) {
        // The word's other half may belong to another row.
        uint32_t last[3 * THIRDS] = {};
        const char* copies[THIRDS];
        each<R>(QUIRE_EACH(r) { last[r] = load<uint16_t>(rows[r / 3] + r % 3 * apart); });
        each<THIRDS>(QUIRE_EACH(i) { copies[i] = (const char*)(last + 3 * i); });
        add_words(tile, copies, 4, 0, panel, bytes, next);
    }
    out = tile;
}

// Computes rows [row, row_end) of a block. ahead: bytes to the weights to prefetch: each tile of rows prefetches its
// share, so that memory is read all the time.
inline void run_block_dots(const Call<uint16_t>& call, int row, int row_end, const Block& of, long ahead) {
    const long all = row_end - row, bytes = Bf16::panel_bytes(of.count);
    for_tiles<Dots>(row, row_end, of, [&](auto rows, auto panels, int from, int panel) __attribute__((always_inline)) {
        const char* const weights = of.of(panel);
        const char* const next = weights + ahead + bytes * (from - row) / all;
        Tile<rows.value, panels.value> out;
        dots(out, call.x + from * call.x_stride + of.k, call.x_stride, weights, of.bytes, of.count, next,
             (PANEL * 4 * rows.value + all - 1) / all);
        finish(call.sums, (const float*)out.sums, from, rows.value, panel, panels.value, of.k == 0);
    });
}

// Computes rows [row, row_end) of panels [panel, panel_end). One tile of rows reads its panels as they lie in memory; for
// more, a group of panels stays in the cache for all rows.
inline void run_dots(const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int rows = row_end - row, depth = block_inputs(call.inputs);
    const bool one = rows <= Dots::MAX_ROWS;
    const int group = one ? Dots::panels(rows) : panels_in_cache<Bf16>(call.inputs) / 2;
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += depth) {
            const Block of = block_of<Bf16>(call, panel, std::min(panel + group, panel_end), k);
            const bool ends = k + depth >= call.inputs;
            const long next = ends ? group * of.bytes - Bf16::panel_bytes(k) : Bf16::panel_bytes(depth);
            run_block_dots(call, row, row_end, of, one ? FAR_AHEAD : next);
        }
}

// As run_dots, for weights in MXFP4: each block is decoded once; for few rows it stays in L1.
inline void run_dots_mxfp4(const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int rows = row_end - row;
    const int group = rows <= Dots::MAX_ROWS ? Dots::panels(rows) : panels_in_cache<Bf16>(call.inputs);
    for_decoded_blocks(call, panel, panel_end, group,
                       [&](const Block& decoded) { run_block_dots(call, row, row_end, decoded, 0); });
}
#else
constexpr bool DOTS_COMPILED = false;
inline void run_dots(const Call<uint16_t>&, int, int, int, int) {}
inline void run_dots_mxfp4(const Call<uint16_t>&, int, int, int, int) {}
#endif

}  // namespace
}  // namespace quire

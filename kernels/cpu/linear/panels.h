// Panels of packed weights and the sums over one block of a panel: see linear.cpp.
#pragma once

#include <algorithm>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "native/common.h"

namespace quire {
namespace {

constexpr int PANEL = 2 * VF;                // outputs side by side: two registers
constexpr int K_BLOCK = 512;                 // inputs: 12 bfloat16 rows of a block are 12 KB, less than half a usual L1
constexpr int LONGEST_BLOCK = 576;           // rather than a short block at the end
constexpr int GROUP_BYTES = 192 * 1024;      // weights that stay in L2 while all rows are computed
constexpr int AHEAD = 2048;                  // bytes: the hardware prefetcher stops at the end of a 4 KB page

// panels: panels at a time for a number of rows. Few rows leave registers free: more panels give more independent sums,
// and more streams from memory.
struct Wide {
    static constexpr int panels(int rows) { return rows == 1 ? 4 : rows == 2 || (rows == 3 && VF == 16) ? 2 : 1; }
};

// MAX_ROWS: rows at a time, two sums each, that leave registers for the operands. One more row spills a sum, which
// halves the speed.
struct Bf16 : Wide {
    static constexpr int MAX_ROWS = VF == 16 ? 10 : 5;
    static long panel_bytes(long inputs) { return (inputs + 1) / 2 * PANEL * 4; }
};
struct Float32 : Wide {
    static constexpr int MAX_ROWS = VF == 16 ? 12 : 6;
    static long panel_bytes(long inputs) { return inputs * PANEL * 4; }
};

struct Float16 : Wide {
    static constexpr int MAX_ROWS = Float32::MAX_ROWS;
    static long panel_bytes(long inputs) { return inputs * PANEL * 2; }
};

// Converts one register of float16 weights in hardware; the launcher rejects float16 on CPUs without this conversion.
#if defined(__F16C__)
constexpr bool HAS_FLOAT16 = VF >= 8;
QUIRE_INLINE vfloat widen_halves(const char* from) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) return (vfloat)_mm512_cvtph_ps(load<__m256i>(from));
#endif
    vfloat out;
    for (int i = 0; i + 8 <= VF; i += 8)
        store((float*)&out + i, _mm256_cvtph_ps(load<__m128i>(from + 2 * i)));
    return out;
}
#elif defined(__aarch64__)
typedef __fp16 vhalf __attribute__((vector_size(2 * VF)));
constexpr bool HAS_FLOAT16 = true;
QUIRE_INLINE vfloat widen_halves(const char* from) { return __builtin_convertvector(load<vhalf>(from), vfloat); }
#else
constexpr bool HAS_FLOAT16 = false;
QUIRE_INLINE vfloat widen_halves(const char*) { return vfloat{}; }
#endif

// As in kernels/cpu/linear/linear.py, which keeps one per layer so that a call has few arguments to convert.
struct Layer {
    const char* packed;
    const float* bias;  // or null
    int32_t outputs, inputs, kind;
    int32_t activation;  // of the outputs; negative: none
};

// Where the sums of a part of a product go: rows from `row` and panels from `panel`, rows `stride` floats apart.
struct Sums {
    float* at;
    long stride;
    int row, panel;
    float* of(int r, int p) const { return at + (r - row) * stride + (p - panel) * PANEL; }
};

template <class T>
struct Call {
    const T* x;
    long x_stride;
    const char* packed;
    int inputs;
    Sums sums;
};

// A block of inputs [k, k + count) of the weights of panels [panel, end), `bytes` apart.
struct Block {
    const char* weights;
    long bytes;
    int panel, end, k, count;
    const char* of(int p) const { return weights + (p - panel) * bytes; }
};

template <int R, int P>
struct Tile {
    vfloat sums[R][P][2];
};

// Calls run(rows, panels, row, panel) for R rows and each panel of a block, as many panels at a time as W keeps in
// registers. The first two arguments are constants.
template <class W, int R, class Run>
void for_panels(int rows, int row, const Block& of, const Run& run) {
    if constexpr (R > 0) {
        if (rows != R) return for_panels<W, R - 1>(rows, row, of, run);
        constexpr int P = W::panels(R);
        const std::integral_constant<int, R> all_rows;
        int panel = of.panel;
        for (; panel + P <= of.end; panel += P) run(all_rows, std::integral_constant<int, P>{}, row, panel);
        for (; panel < of.end; panel++) run(all_rows, std::integral_constant<int, 1>{}, row, panel);
    }
}

// The same for rows [row, row_end), in tiles of nearly equal size.
template <class W, class Run>
void for_tiles(int row, int row_end, const Block& of, const Run& run) {
    const long rows = row_end - row, tiles = (rows + W::MAX_ROWS - 1) / W::MAX_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
        const int from = row + int(rows * tile / tiles), to = row + int(rows * (tile + 1) / tiles);
        for_panels<W, W::MAX_ROWS>(to - from, from, of, run);
    }
}

// Inputs of a layer's blocks, a multiple of 32. The last block may have less.
inline int block_inputs(int inputs) {
    const int blocks = (inputs + LONGEST_BLOCK - 1) / LONGEST_BLOCK;
    return ((inputs + blocks - 1) / blocks + 31) / 32 * 32;
}

template <class W, class T>
Block block_of(const Call<T>& call, int panel, int end, int k) {
    const long bytes = W::panel_bytes(call.inputs);
    const char* weights = call.packed + panel * bytes + W::panel_bytes(k);
    return {weights, bytes, panel, end, k, std::min(block_inputs(call.inputs), call.inputs - k)};
}

// Panels whose block of inputs stays in L2 while all rows are computed.
template <class W>
int panels_in_cache(int inputs) {
    return std::max(4, int(GROUP_BYTES / W::panel_bytes(std::min(block_inputs(inputs), inputs))));
}

// Multiplies one input of R rows by its weights in P panels.
template <int R, int P>
QUIRE_INLINE void multiply(Tile<R, P>& tile, const float* x, long stride, const vfloat (&weights)[P][2]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const vfloat value = splat(x[r * stride]);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            tile.sums[r][p][0] = multiply_add(value, weights[p][0], tile.sums[r][p][0]);
            tile.sums[r][p][1] = multiply_add(value, weights[p][1], tile.sums[r][p][1]);
        }
    }
}

template <int P>
QUIRE_INLINE void prefetch(const char* panel, long bytes, int width) {
    for (int p = 0; p < P; p++)
        for (int line = 0; line < width; line += 64) __builtin_prefetch(panel + p * bytes + line + AHEAD);
}

QUIRE_INLINE vfloat weights_at(Float32, const char* panel, int v) { return load<vfloat>(panel + v * VF * 4); }
QUIRE_INLINE vfloat weights_at(Float16, const char* panel, int v) { return widen_halves(panel + v * VF * 2); }

template <int R, int P, class W>
QUIRE_INLINE void block(W, Tile<R, P>& tile, const float* x, long stride, const char* panel, long bytes, int count) {
#pragma GCC unroll 2
    for (int k = 0; k < count; k++, panel += W::panel_bytes(1)) {
        vfloat weights[P][2];
        prefetch<P>(panel, bytes, int(W::panel_bytes(1)));
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) weights[p][v] = weights_at(W{}, panel + p * bytes, v);
        multiply<R, P>(tile, x + k, stride, weights);
    }
}

template <int P>
QUIRE_INLINE void widen(vfloat (&weights)[P][2], const char* panel, long bytes, bool odd) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const vuint words = load<vuint>(panel + p * bytes + v * VF * 4);
            weights[p][v] = (vfloat)(odd ? words & 0xffff0000u : words << 16);
        }
}

template <int R, int P>
QUIRE_INLINE void block(Bf16, Tile<R, P>& tile, const float* x, long stride, const char* panel, long bytes, int count) {
    vfloat weights[P][2];
    int k = 0;
    for (; k + 1 < count; k += 2, panel += PANEL * 4) {
        prefetch<P>(panel, bytes, PANEL * 4);
        widen<P>(weights, panel, bytes, false);
        multiply<R, P>(tile, x + k, stride, weights);
        // Load the words again: keeping them would spill sums.
        asm volatile("" : "+r"(panel));
        widen<P>(weights, panel, bytes, true);
        multiply<R, P>(tile, x + k + 1, stride, weights);
    }
    if (k < count) {
        widen<P>(weights, panel, bytes, false);
        multiply<R, P>(tile, x + k, stride, weights);
    }
}

// Adds one block's sums, [rows][panels * PANEL], to those of the blocks before.
__attribute__((noinline)) inline void finish(const Sums& sums, const float* block, int row, int rows, int panel,
                                             int panels, bool first) {
    for (int r = 0; r < rows; r++) {
        float* to = sums.of(row + r, panel);
        for (int i = 0; i < panels * PANEL; i += VF, block += VF)
            store(to + i, first ? load<vfloat>(block) : load<vfloat>(to + i) + load<vfloat>(block));
    }
}

}  // namespace
}  // namespace quire

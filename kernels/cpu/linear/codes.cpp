// Linear layers, y = x W^T + bias, over weights whose codes are integers: see code_panels.h, code_rows.h, code_tiles.h.
#include <atomic>

#include "linear/code_pack.h"
#include "linear/code_tiles.h"
#include "linear/run.h"

using namespace quire;

namespace {

// Integer rows of a tile: with one more, sums or (with 16 lanes) totals leave the registers.
constexpr int MOST_ROWS = VF == 16 ? 7 : 6, MOST_FLOAT_ROWS = VF == 16 ? 4 : 3;
constexpr int DEPTH = 1024;  // inputs whose weights stay in a cache for several tiles

template <int KIND, int DIGITS, int R>
void tile_of_rows(const CodesCall& call, int rows, int row, int panel, int block, int end) {
    if constexpr (R > 1)
        if (rows != R) return tile_of_rows<KIND, DIGITS, R - 1>(call, rows, row, panel, block, end);
    run_tile<KIND, DIGITS, R>(call, row, panel, block, end);
}

// Computes rows [row, row_end) of panels [panel, panel_end).
template <int KIND, int DIGITS>
void run_part(const CodesCall& call, int row, int row_end, int panel, int panel_end) {
    constexpr int MOST = DIGITS == 1 ? MOST_ROWS : MOST_FLOAT_ROWS;
    const long rows = row_end - row, tiles = (rows + MOST - 1) / MOST;
    const int all = call.layout.blocks, blocks = tiles == 1 ? all : DEPTH / call.layer.block;
    for (int block = 0; block < all; block += blocks)
        for (int p = panel; p < panel_end; p++)
            for (int tile = 0; tile < tiles; tile++) {
                const int from = row + int(rows * tile / tiles), to = row + int(rows * (tile + 1) / tiles);
                tile_of_rows<KIND, DIGITS, MOST>(call, to - from, from, p, block, std::min(block + blocks, all));
            }
}

template <int DIGITS>
void run_kind(const CodesCall& call, int row, int row_end, int panel, int panel_end) {
    switch (call.layer.kind) {
        case CODES_8: return run_part<CODES_8, DIGITS>(call, row, row_end, panel, panel_end);
        case CODES_4: return run_part<CODES_4, DIGITS>(call, row, row_end, panel, panel_end);
        case CODES_5: return run_part<CODES_5, DIGITS>(call, row, row_end, panel, panel_end);
        case CODES_6: return run_part<CODES_6, DIGITS>(call, row, row_end, panel, panel_end);
        default: return run_part<CODES_FP4, DIGITS>(call, row, row_end, panel, panel_end);
    }
}

template <class T, int DIGITS, bool INT8>
struct CodesProduct {
    const CodesLayer* layer;
    const T* x;
    long x_stride;
    Layout layout;
    RoundedRows rounded;

    void prepare(int row, int row_end) const {
        for (; row < row_end; row++) round_row<DIGITS, INT8>(*layer, layout.blocks, rounded, x + row * x_stride, row);
    }

    void operator()(int row, int row_end, int panel, int panel_end, const Sums& sums) const {
        run_kind<DIGITS>(CodesCall{*layer, layout, rounded, sums}, row, row_end, panel, panel_end);
    }
};

}  // namespace

QUIRE_API long quire_codes_bytes(const CodesLayer* layer) {
    return (layer->outputs + PANEL - 1) / PANEL * Layout(*layer).panel_bytes;
}

// Packs the source's rows as outputs [first, first + count) into layer->packed, whose last panel is zeros before. Returns
// whether the scales of blocks are finite.
QUIRE_API int quire_pack_codes(const CodesLayer* layer, const CodesSource* source, int first, int count) {
    const Layout layout(*layer);
    const int begin = first / PANEL, end = (first + count + PANEL - 1) / PANEL;
    std::atomic<bool> all_finite{true};
    parallel_for(end - begin, max_threads(), [&](int64_t index) {
        const int start = (begin + int(index)) * PANEL;
        const int from = std::max(start, first), to = std::min(start + PANEL, first + count);
        if (!pack_outputs(*layer, layout, *source, from - first, from, to - from))
            all_finite.store(false, std::memory_order_relaxed);
    });
    return all_finite.load();
}

template <int DIGITS, bool INT8, class T>
void multiply_rows(const CodesLayer& layer, const T* x, long x_stride, char* memory, void* out, int out_is_bf16,
                   int rows) {
    const CodesProduct<T, DIGITS, INT8> product{
        &layer, x, x_stride, Layout(layer), RoundedRows(layer, memory, rows, DIGITS)};
    multiply(product, layer, out, out_is_bf16, rows);
}

// Bytes of memory for each row of a call.
QUIRE_API long quire_codes_row_bytes(const CodesLayer* layer, int x_is_bf16) {
    return RoundedRows::row_bytes(*layer, x_is_bf16 || layer->rounds_rows ? 1 : 2);
}

// x: [rows][inputs], float32 or bfloat16, rows x_stride apart. out: [rows][outputs], the same types. memory: aligned to
// 64 bytes; its contents are lost.
QUIRE_API void quire_codes_linear(const CodesLayer* layer, const void* x, int x_is_bf16, long x_stride, char* memory,
                                  void* out, int out_is_bf16, int rows) {
    if (layer->rounds_rows && x_is_bf16)
        multiply_rows<1, true>(*layer, (const uint16_t*)x, x_stride, memory, out, out_is_bf16, rows);
    else if (layer->rounds_rows)
        multiply_rows<1, true>(*layer, (const float*)x, x_stride, memory, out, out_is_bf16, rows);
    else if (x_is_bf16)
        multiply_rows<1, false>(*layer, (const uint16_t*)x, x_stride, memory, out, out_is_bf16, rows);
    else
        multiply_rows<2, false>(*layer, (const float*)x, x_stride, memory, out, out_is_bf16, rows);
}

// Linear layers, y = x W^T + bias, over weights in codes with scales: for layout and order of sums see linear_scaled.h.
//
// Few rows decode codes in registers. More rows, and the matrix tiles of AMX, decode a block of panels once, which
// stays in L2.
#include "linear_scaled.h"

#include "linear_amx.h"
#include "linear_run.h"

using namespace quire;

namespace {

// Sums of one group's codes, decoded in registers.
template <class C>
struct InRegisters {
    static constexpr int MAX_ROWS = C::MAX_ROWS;
    static constexpr int panels(int rows) { return C::panels(rows); }
    template <int R, int P>
    static QUIRE_INLINE void sum(const ScaledCall<float>& call, Tile<R, P>& part, const float* x, const Block&,
                                 int panel, int k, int until) {
        vfloat zeros[P][2];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                zeros[p][v] = C::zero(call.parts, call.panel(panel + p), k / call.layer.group_size, v);
        const char* codes = call.panel(panel) + long(k) * PANEL * C::BITS / 8;
        for_inputs<C, P>(codes, call.parts.bytes, until - k, zeros,
                         [&](int i, const vfloat(&weights)[P][2], bool) __attribute__((always_inline)) {
                             multiply<R, P>(part, x + i, call.x_stride, weights);
                         });
    }
};

// Sums of one group's codes in a decoded block.
struct Decoded {
    static constexpr int MAX_ROWS = Bf16::MAX_ROWS;
    static constexpr int panels(int rows) { return rows == 2 || (rows == 3 && VF == 16) ? 2 : 1; }
    template <int R, int P>
    static QUIRE_INLINE void sum(const ScaledCall<float>& call, Tile<R, P>& part, const float* x, const Block& of,
                                 int panel, int k, int until) {
        block<R, P>(Bf16{}, part, x, call.x_stride, of.of(panel) + long(k - of.k) * PANEL * 2, of.bytes, until - k);
    }
};

template <class W, int R, int P>
void run_tile(const ScaledCall<float>& call, int row, const Block& of, int panel) {
    Tile<R, P> total = {};
    const float* x = call.x + row * call.x_stride;
    for (int k = of.k, end = of.k + of.count, until; k < end; k = until) {
        until = call.group_end(k, end);
        Tile<R, P> part = {};
        W::template sum<R, P>(call, part, x + k, of, panel, k, until);
        add_scaled(total, part, call, panel, k / call.layer.group_size);
    }
    finish(call.sums, (const float*)total.sums, row, R, panel, P, of.k == 0);
}

template <class W>
void run_block(const ScaledCall<float>& call, int row, int row_end, const Block& of) {
    for_tiles<W>(row, row_end, of, [&](auto rows, auto panels, int from, int panel) __attribute__((always_inline)) {
        run_tile<W, rows.value, panels.value>(call, from, of, panel);
    });
}

template <class C>
void run_part(const ScaledCall<float>& call, int row, int row_end, int panel, int panel_end) {
    if (row_end - row <= C::MAX_ROWS) {
        constexpr int GROUP = 4;
        for (; panel < panel_end; panel += GROUP)
            for (int k = 0; k < call.inputs; k += K_BLOCK) {
                const int end = std::min(panel + GROUP, panel_end), count = std::min(K_BLOCK, call.inputs - k);
                run_block<InRegisters<C>>(call, row, row_end, Block{nullptr, 0, panel, end, k, count});
            }
        return;
    }
    for_decoded_codes<C>(call, panel, panel_end, panels_in_cache<Bf16>(call.inputs),
                         [&](const Block& decoded) { run_block<Decoded>(call, row, row_end, decoded); });
}

#if defined(__AMX_BF16__) && defined(__linux__)
// Computes up to 32 rows of one panel of a decoded block in tiles.
void run_tiles_of_panel(const ScaledCall<uint16_t>& call, int row, int rows, const Block& of, int panel) {
    alignas(64) float sums[2 * TILE_ROWS * PANEL], totals[2 * TILE_ROWS * PANEL];
    std::memset(totals, 0, rows * PANEL * 4);
    for (int k = of.k, end = of.k + of.count, until; k < end; k = until) {
        until = call.group_end(k, end);
        const char* weights = of.of(panel) + long(k - of.k) * PANEL * 2;
        const uint16_t* x = call.x + row * call.x_stride + k;
        (rows > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>)(sums, x, call.x_stride, weights, until - k);
        for (int v = 0; v < 2; v++) {
            const int group = k / call.layer.group_size;
            const vfloat scale = scale_at(call.layer, call.parts, call.panel(panel), group, v);
            for (int r = 0; r < rows; r++) {
                float* total = totals + r * PANEL + v * VF;
                store(total, multiply_add(load<vfloat>(sums + r * PANEL + v * VF), scale, load<vfloat>(total)));
            }
        }
    }
    finish(call.sums, totals, row, rows, panel, 1, of.k == 0);
}

template <class C>
void run_part(const ScaledCall<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int group = row_end - row <= 2 * TILE_ROWS ? 1 : panels_in_cache<Bf16>(call.inputs);
    for_decoded_codes<C>(call, panel, panel_end, group, [&](const Block& of) {
        for (int from = row; from < row_end; from += 2 * TILE_ROWS) {
            const int rows = std::min(2 * TILE_ROWS, row_end - from);
            shape_tiles(std::min(rows, TILE_ROWS), rows - TILE_ROWS);
            for (int p = of.panel; p < of.end; p++) run_tiles_of_panel(call, from, rows, of, p);
        }
    });
    _tile_release();
}
#else
template <class C>
void run_part(const ScaledCall<uint16_t>&, int, int, int, int) {}
#endif

template <class T>
struct ScaledProduct {
    const ScaledLayer* layer;
    const T* x;
    long x_stride;

    void operator()(int row, int row_end, int panel, int panel_end, const Sums& sums) const {
        const ScaledCall<T> call{{x, x_stride, layer->packed, layer->inputs, sums}, *layer, Parts(*layer)};
        void (*part)(const ScaledCall<T>&, int, int, int, int) = run_part<Codes<INT8, false>>;
        if (layer->kind == INT8 && layer->has_zeros) part = run_part<Codes<INT8, true>>;
        if (layer->kind == INT4) part = run_part<Codes<INT4, false>>;
        if (layer->kind == INT4 && layer->has_zeros) part = run_part<Codes<INT4, true>>;
        if (layer->kind == FP8) part = run_part<Codes<FP8, false>>;
        if (layer->kind == FP4) part = run_part<Codes<FP4, false>>;
        part(call, row, row_end, panel, panel_end);
    }
};

// Copies outputs from `first` of [outputs][count] elements to [count][PANEL]. Outputs past the end, and bytes past the
// end of a row, `stride`, are zeros.
void interleave(const char* from, char* to, int first, int outputs, long count, long size, long stride) {
    for (int i = 0; i < PANEL; i++)
        for (long k = 0; k < count; k++) {
            char* at = to + (k * PANEL + i) * size;
            const long left = std::min(size, stride - k * size);
            std::memset(at, 0, size);
            if (first + i < outputs) std::memcpy(at, from + (first + i) * stride + k * size, left);
        }
}

}  // namespace

QUIRE_API long quire_scaled_bytes(const ScaledLayer* layer) {
    return (layer->outputs + PANEL - 1) / PANEL * Parts(*layer).bytes;
}

// Arguments as in ScaledWeight; zeros and row_scales may be null. Outputs past the end are zeros.
QUIRE_API void quire_pack_scaled(const ScaledLayer* layer, const char* codes, const char* scales, const char* zeros,
                                 const char* row_scales) {
    char* packed = (char*)layer->packed;
    prefer_huge_pages(packed, quire_scaled_bytes(layer));
    const Parts parts(*layer);
    const bool octets = layer->kind == INT8 || layer->kind == FP8;
    parallel_for((layer->outputs + PANEL - 1) / PANEL, max_threads(), [&](int64_t panel) {
        const int first = int(panel) * PANEL, outputs = layer->outputs;
        char* to = packed + panel * parts.bytes;
        const auto put = [&](const char* from, long at, long count, long size, long stride) {
            if (from) interleave(from, to + at, first, outputs, count, size, stride);
        };
        if (octets)
            put(codes, 0, layer->inputs, 1, layer->inputs);
        else
            put(codes, 0, (layer->inputs + STEP - 1) / STEP, 4, layer->inputs / 2);
        put(scales, parts.codes, parts.groups, parts.scale_bytes, parts.groups * parts.scale_bytes);
        put(zeros, parts.zeros, parts.groups, 1, parts.groups);
        put(row_scales, parts.row_scales, 1, 4, 4);
    });
}

// As quire_linear.
QUIRE_API void quire_scaled_linear(const ScaledLayer* layer, const float* x, long x_stride, void* out, int out_is_bf16,
                                   int rows) {
    multiply(ScaledProduct<float>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// Whether quire_scaled_linear_bf16 can multiply rows by this layer.
QUIRE_API int quire_scaled_takes_bf16(const ScaledLayer* layer) {
    const bool whole = layer->group_size == layer->inputs || layer->group_size % TILE_INPUTS == 0;
    return TILES_COMPILED && whole && layer->inputs % TILE_INPUTS == 0 && may_use_tiles();
}

// As quire_scaled_linear, for bfloat16 rows.
QUIRE_API void quire_scaled_linear_bf16(const ScaledLayer* layer, const uint16_t* x, long x_stride, void* out,
                                        int out_is_bf16, int rows) {
    multiply(ScaledProduct<uint16_t>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// Linear layers, y = x W^T + bias, over float8 e4m3 weights with scales (ScaledWeight) that stay packed.
//
// A panel has the codes, [inputs][PANEL] bytes, then scales [groups][PANEL] in their stored type.
//
// An output is the sum, over blocks of K_BLOCK inputs, of chains over the block's groups: each adds, with one rounding,
// the scale times the group's own chain of fused multiply-adds. A number of float8 is exact in bfloat16, so a block that
// is decoded into the layout of a bfloat16 panel gives the same bits.
//
// Few rows decode codes in registers. More rows, and the matrix tiles of AMX, decode a block of panels once, which
// stays in L2.
#include "linear/amx.h"
#include "linear/code_panels.h"
#include "linear/run.h"

using namespace quire;

namespace {

// As in kernels/cpu/linear/fp8.py, which keeps one per layer.
struct Fp8Layer {
    const char* packed;
    const float* bias;  // or null
    int32_t outputs, inputs, group_size, scale_kind;
};

// Sizes and offsets of a panel's parts.
struct Parts {
    long groups, codes, scale_bytes, bytes;
    explicit Parts(const Fp8Layer& layer) {
        groups = (layer.inputs + layer.group_size - 1) / layer.group_size;
        codes = long(layer.inputs) * PANEL;
        scale_bytes = layer.scale_kind == SCALE_FLOAT32 ? 4 : layer.scale_kind == SCALE_FLOAT8 ? 1 : 2;
        bytes = (codes + groups * PANEL * scale_bytes + 63) / 64 * 64;
    }
};

template <class T>
struct Fp8Call : Call<T> {
    const Fp8Layer& layer;
    Parts parts;
    const char* panel(int index) const { return this->packed + index * parts.bytes; }
    int group_end(int k, int end) const {
        return int(std::min<long>(end, (k / layer.group_size + 1L) * layer.group_size));
    }
    vfloat scale(int panel_index, int k, int v) const {
        const char* scales = panel(panel_index) + parts.codes + k / layer.group_size * PANEL * parts.scale_bytes;
        return plain_scale(layer.scale_kind, scales, v) * FLOAT8_STEP;
    }
};

// Sums of one group's codes, decoded in registers.
struct InRegisters {
    static constexpr int MAX_ROWS = 4;
    static constexpr int panels(int rows) { return rows <= (VF == 16 ? 2 : 1) ? 2 : 1; }
    template <int R, int P>
    static QUIRE_INLINE void sum(const Fp8Call<float>& call, Tile<R, P>& part, const float* x, const Block&, int panel,
                                 int k, int until) {
        const char* codes = call.panel(panel) + long(k) * PANEL;
#pragma GCC unroll 4
        for (int i = 0; i < until - k; i++, codes += PANEL) {
            vfloat weights[P][2];
            prefetch<P>(codes, call.parts.bytes, PANEL);
#pragma GCC unroll 2
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) weights[p][v] = e4m3(codes + p * call.parts.bytes + v * VF);
            multiply<R, P>(part, x + i, call.x_stride, weights);
        }
    }
};

// Sums of one group's codes in a decoded block.
struct Decoded {
    static constexpr int MAX_ROWS = Bf16::MAX_ROWS;
    static constexpr int panels(int rows) { return rows == 2 || (rows == 3 && VF == 16) ? 2 : 1; }
    template <int R, int P>
    static QUIRE_INLINE void sum(const Fp8Call<float>& call, Tile<R, P>& part, const float* x, const Block& of,
                                 int panel, int k, int until) {
        block<R, P>(Bf16{}, part, x, call.x_stride, of.of(panel) + long(k - of.k) * PANEL * 2, of.bytes, until - k);
    }
};

template <class W, int R, int P>
void run_tile(const Fp8Call<float>& call, int row, const Block& of, int panel) {
    Tile<R, P> total = {};
    const float* x = call.x + row * call.x_stride;
    for (int k = of.k, end = of.k + of.count, until; k < end; k = until) {
        until = call.group_end(k, end);
        Tile<R, P> part = {};
        W::template sum<R, P>(call, part, x + k, of, panel, k, until);
        for (int p = 0; p < P; p++)
            for (int v = 0; v < 2; v++) {
                const vfloat scale = call.scale(panel + p, k, v);
                for (int r = 0; r < R; r++)
                    total.sums[r][p][v] = multiply_add(part.sums[r][p][v], scale, total.sums[r][p][v]);
            }
    }
    finish(call.sums, (const float*)total.sums, row, R, panel, P, of.k == 0);
}

template <class W>
void run_block(const Fp8Call<float>& call, int row, int row_end, const Block& of) {
    for_tiles<W>(row, row_end, of, [&](auto rows, auto panels, int from, int panel) __attribute__((always_inline)) {
        run_tile<W, rows.value, panels.value>(call, from, of, panel);
    });
}

// Decodes `count` inputs of a panel from k on into the layout of a bfloat16 panel. A last odd input has a zero beside it.
template <class T>
void decode_codes(const Fp8Call<T>& call, int panel, int k, int count, char* to) {
    const char* codes = call.panel(panel) + long(k) * PANEL;
    for (int i = 0; i < count; i += 2, codes += 2 * PANEL, to += PANEL * 4) {
        prefetch<1>(codes, 0, 2 * PANEL);
        for (int v = 0; v < 2; v++) {
            const vuint odd = i + 1 < count ? (vuint)e4m3(codes + PANEL + v * VF) : vuint{};
            store(to + v * VF * 4, odd | (vuint)e4m3(codes + v * VF) >> 16);
        }
    }
}

// Calls body(block) for every block of inputs of panels [panel, panel_end), `group` panels at a time, decoded.
template <class T, class Body>
void for_decoded_codes(const Fp8Call<T>& call, int panel, int panel_end, int group, Body&& body) {
    alignas(64) char decoded[GROUP_BYTES];
    const int depth = std::min(K_BLOCK, call.inputs);
    group = std::min(group, int(GROUP_BYTES / Bf16::panel_bytes(depth)));
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += K_BLOCK) {
            const int count = std::min(K_BLOCK, call.inputs - k);
            const Block of{decoded, Bf16::panel_bytes(count), panel, std::min(panel + group, panel_end), k, count};
            for (int p = panel; p < of.end; p++) decode_codes(call, p, k, count, decoded + (p - panel) * of.bytes);
            body(of);
        }
}

void run_part(const Fp8Call<float>& call, int row, int row_end, int panel, int panel_end) {
    if (row_end - row <= InRegisters::MAX_ROWS) {
        constexpr int GROUP = 4;
        for (; panel < panel_end; panel += GROUP)
            for (int k = 0; k < call.inputs; k += K_BLOCK) {
                const int end = std::min(panel + GROUP, panel_end), count = std::min(K_BLOCK, call.inputs - k);
                run_block<InRegisters>(call, row, row_end, Block{nullptr, 0, panel, end, k, count});
            }
        return;
    }
    for_decoded_codes(call, panel, panel_end, panels_in_cache<Bf16>(call.inputs),
                      [&](const Block& decoded) { run_block<Decoded>(call, row, row_end, decoded); });
}

#if defined(__AMX_BF16__) && defined(__linux__)
// Computes up to 32 rows of one panel of a decoded block in tiles.
void run_tiles_of_panel(const Fp8Call<uint16_t>& call, int row, int rows, const Block& of, int panel) {
    alignas(64) float sums[2 * TILE_ROWS * PANEL], totals[2 * TILE_ROWS * PANEL];
    std::memset(totals, 0, rows * PANEL * 4);
    for (int k = of.k, end = of.k + of.count, until; k < end; k = until) {
        until = call.group_end(k, end);
        const char* weights = of.of(panel) + long(k - of.k) * PANEL * 2;
        const uint16_t* x = call.x + row * call.x_stride + k;
        (rows > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>)(sums, x, call.x_stride, weights, until - k);
        for (int v = 0; v < 2; v++) {
            const vfloat scale = call.scale(panel, k, v);
            for (int r = 0; r < rows; r++) {
                float* total = totals + r * PANEL + v * VF;
                store(total, multiply_add(load<vfloat>(sums + r * PANEL + v * VF), scale, load<vfloat>(total)));
            }
        }
    }
    finish(call.sums, totals, row, rows, panel, 1, of.k == 0);
}

void run_part(const Fp8Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int group = row_end - row <= 2 * TILE_ROWS ? 1 : panels_in_cache<Bf16>(call.inputs);
    for_decoded_codes(call, panel, panel_end, group, [&](const Block& of) {
        for (int from = row; from < row_end; from += 2 * TILE_ROWS) {
            const int rows = std::min(2 * TILE_ROWS, row_end - from);
            shape_tiles(std::min(rows, TILE_ROWS), rows - TILE_ROWS);
            for (int p = of.panel; p < of.end; p++) run_tiles_of_panel(call, from, rows, of, p);
        }
    });
    _tile_release();
}
#else
void run_part(const Fp8Call<uint16_t>&, int, int, int, int) {}
#endif

template <class T>
struct Fp8Product {
    const Fp8Layer* layer;
    const T* x;
    long x_stride;

    void operator()(int row, int row_end, int panel, int panel_end, const Sums& sums) const {
        const Fp8Call<T> call{{x, x_stride, layer->packed, layer->inputs, sums}, *layer, Parts(*layer)};
        run_part(call, row, row_end, panel, panel_end);
    }
};

// Copies outputs from `first` of [outputs][count] elements to [count][PANEL]. Outputs past the end are zeros.
void interleave(const char* from, char* to, int first, int outputs, long count, long size) {
    for (int i = 0; i < PANEL; i++)
        for (long k = 0; k < count; k++) {
            char* at = to + (k * PANEL + i) * size;
            std::memset(at, 0, size);
            if (first + i < outputs) std::memcpy(at, from + ((first + i) * count + k) * size, size);
        }
}

}  // namespace

QUIRE_API long quire_fp8_bytes(const Fp8Layer* layer) {
    return (layer->outputs + PANEL - 1) / PANEL * Parts(*layer).bytes;
}

// Codes and scales as in ScaledWeight.
QUIRE_API void quire_pack_fp8(const Fp8Layer* layer, const char* codes, const char* scales) {
    char* packed = (char*)layer->packed;
    const Parts parts(*layer);
    parallel_for((layer->outputs + PANEL - 1) / PANEL, max_threads(), [&](int64_t panel) {
        char* to = packed + panel * parts.bytes;
        interleave(codes, to, int(panel) * PANEL, layer->outputs, layer->inputs, 1);
        interleave(scales, to + parts.codes, int(panel) * PANEL, layer->outputs, parts.groups, parts.scale_bytes);
    });
}

// As quire_linear.
QUIRE_API void quire_fp8_linear(const Fp8Layer* layer, const float* x, long x_stride, void* out, int out_is_bf16,
                                int rows) {
    multiply(Fp8Product<float>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// Whether quire_fp8_linear_bf16 can multiply rows by this layer.
QUIRE_API int quire_fp8_takes_bf16(const Fp8Layer* layer) {
    const bool whole = layer->group_size == layer->inputs || layer->group_size % TILE_INPUTS == 0;
    return TILES_COMPILED && whole && layer->inputs % TILE_INPUTS == 0 && may_use_tiles();
}

// As quire_fp8_linear, for bfloat16 rows.
QUIRE_API void quire_fp8_linear_bf16(const Fp8Layer* layer, const uint16_t* x, long x_stride, void* out,
                                     int out_is_bf16, int rows) {
    multiply(Fp8Product<uint16_t>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// Linear layers, y = x W^T + bias, over weights packed in panels of PANEL outputs.
//
// A float32 or float16 panel is [inputs][PANEL]. A bfloat16 panel is [inputs / 2][PANEL] words, each with the weights of
// two neighbouring inputs: a shift and a mask widen two registers, while 16-bit loads would need two more shuffles.
//
// The order of additions is part of the contract. An output is the sum, over blocks of block_inputs inputs, of chains of
// fused multiply-adds in ascending order of the input. This holds for any number of rows, row index, tile and number of
// threads: a row's bits depend on that row alone.
//
// bfloat16 rows are multiplied by bfloat16 or MXFP4 weights with the instructions of AVX-512 for bfloat16, which add two
// products to each sum, or in the tiles of AMX. The operand of both has the order of a bfloat16 panel. For the layout of
// MXFP4 panels see mxfp4.h.
#include "linear/amx.h"
#include "linear/dots.h"
#include "linear/panels.h"
#include "linear/run.h"

using namespace quire;

namespace {

// As in kernels/cpu/linear/linear.py.
enum Kind { FLOAT32, BFLOAT16, FLOAT16, MXFP4 };

long panel_bytes(int kind, long inputs) {
    return kind == BFLOAT16  ? Bf16::panel_bytes(inputs)
           : kind == FLOAT16 ? Float16::panel_bytes(inputs)
           : kind == MXFP4   ? Mxfp4::panel_bytes(inputs)
                             : Float32::panel_bytes(inputs);
}

template <class W, int R, int P>
void run_tile(const Call<float>& call, int row, const Block& of, int panel) {
    Tile<R, P> tile = {};
    block<R, P>(W{}, tile, call.x + row * call.x_stride + of.k, call.x_stride, of.of(panel), of.bytes, of.count);
    static_assert(sizeof tile.sums == R * P * PANEL * 4, "the sums lie as finish reads them");
    finish(call.sums, (const float*)tile.sums, row, R, panel, P, of.k == 0);
}

// Computes rows [row, row_end) of a block.
template <class W>
void run_block(const Call<float>& call, int row, int row_end, const Block& of) {
    for_tiles<W>(row, row_end, of, [&](auto rows, auto panels, int from, int panel) __attribute__((always_inline)) {
        run_tile<W, rows.value, panels.value>(call, from, of, panel);
    });
}

// Computes rows [row, row_end) of panels [panel, panel_end): a group of panels stays in the cache for all rows.
template <class W>
void run_part(const Call<float>& call, int row, int row_end, int panel, int panel_end) {
    const int group = row_end - row <= W::MAX_ROWS ? 4 : panels_in_cache<W>(call.inputs);
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += block_inputs(call.inputs))
            run_block<W>(call, row, row_end, block_of<W>(call, panel, std::min(panel + group, panel_end), k));
}

// As run_part, for weights in MXFP4: each block is decoded once.
void run_decoded(const Call<float>& call, int row, int row_end, int panel, int panel_end) {
    for_decoded_blocks(call, panel, panel_end, panels_in_cache<Bf16>(call.inputs),
                       [&](const Block& decoded) { run_block<Bf16>(call, row, row_end, decoded); });
}

void run_layer(const Layer& layer, const Call<float>& call, int row, int row_end, int panel, int panel_end) {
    const bool in_registers = row_end - row <= Mxfp4::MAX_ROWS;
    (layer.kind == BFLOAT16                  ? run_part<Bf16>
     : layer.kind == FLOAT16                 ? run_part<Float16>
     : layer.kind == MXFP4 && in_registers   ? run_part<Mxfp4>
     : layer.kind == MXFP4                   ? run_decoded
                                             : run_part<Float32>)(call, row, row_end, panel, panel_end);
}

bool fits_tiles(const Layer& layer) { return TILES_COMPILED && layer.inputs % TILE_INPUTS == 0 && may_use_tiles(); }

void run_layer(const Layer& layer, const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    (layer.kind == MXFP4 ? fits_tiles(layer) ? run_tiles_mxfp4 : run_dots_mxfp4
     : fits_tiles(layer) ? run_tiles
                         : run_dots)(call, row, row_end, panel, panel_end);
}

template <class T>
struct LayerProduct {
    const Layer* layer;
    const T* x;
    long x_stride;

    void operator()(int row, int row_end, int panel, int panel_end, const Sums& sums) const {
        const Call<T> call{x, x_stride, layer->packed, layer->inputs, sums};
        run_layer(*layer, call, row, row_end, panel, panel_end);
    }
};

// Rows of several heads, each by its own panels of one layer. An input of the next head is head_stride further on.
template <class T>
struct HeadsProduct {
    const Layer* layer;
    const T* x;
    long x_stride, head_stride;
    int head_panels;

    void operator()(int row, int row_end, int panel, int panel_end, const Sums& sums) const {
        while (panel < panel_end) {
            const int head = panel / head_panels, end = std::min(panel_end, (head + 1) * head_panels);
            const Call<T> call{x + head * head_stride, x_stride, layer->packed, layer->inputs, sums};
            run_layer(*layer, call, row, row_end, panel, end);
            panel = end;
        }
    }
};

}  // namespace

QUIRE_API int quire_has_float16() { return HAS_FLOAT16; }
QUIRE_API int quire_has_bf16() { return DOTS_COMPILED || (TILES_COMPILED && may_use_tiles()); }

QUIRE_API long quire_packed_bytes(int outputs, int inputs, int kind) {
    return (outputs + PANEL - 1) / PANEL * panel_bytes(kind, inputs);
}

// As pack_mxfp4_panel, for all panels.
QUIRE_API void quire_pack_mxfp4(const uint8_t* blocks, const uint8_t* scales, void* packed, int outputs, int inputs) {
    parallel_for((outputs + PANEL - 1) / PANEL, max_threads(), [&](int64_t panel) {
        uint8_t* to = (uint8_t*)packed + panel * Mxfp4::panel_bytes(inputs);
        pack_mxfp4_panel(blocks, scales, to, int(panel) * PANEL, outputs, inputs);
    });
}

// x: [rows][inputs], rows x_stride apart. out: [rows][outputs], contiguous, float32 or bfloat16.
QUIRE_API void quire_linear(const Layer* layer, const float* x, long x_stride, void* out, int out_is_bf16, int rows) {
    multiply(LayerProduct<float>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// Whether quire_linear_bf16 can multiply rows by this layer.
QUIRE_API int quire_takes_bf16(const Layer* layer) {
    return (layer->kind == BFLOAT16 || layer->kind == MXFP4) && (DOTS_COMPILED || fits_tiles(*layer));
}

// As quire_linear, for bfloat16 rows.
QUIRE_API void quire_linear_bf16(const Layer* layer, const uint16_t* x, long x_stride, void* out, int out_is_bf16,
                                 int rows) {
    multiply(LayerProduct<uint16_t>{layer, x, x_stride}, *layer, out, out_is_bf16, rows);
}

// As quire_linear, for a layer with head_panels panels for each head, which multiply that head's inputs.
QUIRE_API void quire_head_products(const Layer* layer, const float* x, long x_stride, long head_stride, int head_panels,
                                   void* out, int out_is_bf16, int rows) {
    multiply(HeadsProduct<float>{layer, x, x_stride, head_stride, head_panels}, *layer, out, out_is_bf16, rows);
}

QUIRE_API void quire_head_products_bf16(const Layer* layer, const uint16_t* x, long x_stride, long head_stride,
                                        int head_panels, void* out, int out_is_bf16, int rows) {
    multiply(HeadsProduct<uint16_t>{layer, x, x_stride, head_stride, head_panels}, *layer, out, out_is_bf16, rows);
}

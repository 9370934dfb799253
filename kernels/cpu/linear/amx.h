// Products of bfloat16 rows in the matrix tiles of a CPU with AMX.
#pragma once

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear/mxfp4.h"

namespace quire {
namespace {

#if defined(__AMX_BF16__) && defined(__linux__)
constexpr bool TILES_COMPILED = VF == 16;  // a panel is two tiles wide
constexpr int TILE_ROWS = 16, TILE_INPUTS = 32;

// As the instruction reads it.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Asks the kernel, once per process, for the registers of the tiles.
inline bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// Tiles 0 to 3: sums of two tiles of rows by the two halves of a panel; 4 and 5: rows; 6 and 7: weights.
inline void shape_tiles(int first, int second) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        const bool low = tile < 2 || tile == 4;
        shapes.rows[tile] = uint8_t(tile > 5 ? TILE_INPUTS / 2 : low ? first : std::max(second, 1));
        shapes.bytes[tile] = 64;
    }
    _tile_loadconfig(&shapes);
}

// Multiplies one or two tiles of rows by `count` inputs of a panel into sums, [rows][PANEL].
template <bool TWO>
QUIRE_INLINE void multiply_tiles(float* sums, const uint16_t* x, long stride, const char* panel, int count) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < count; k += TILE_INPUTS, panel += TILE_INPUTS / 2 * PANEL * 4) {
        for (int line = 0; line < TILE_INPUTS / 2 * PANEL * 4; line += 64) __builtin_prefetch(panel + line + AHEAD);
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, panel, PANEL * 4);
        _tile_loadd(7, panel + 64, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + TILE_ROWS * stride + k, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + PANEL / 2, PANEL * 4);
    if (TWO) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE_ROWS * PANEL + PANEL / 2, PANEL * 4);
    }
}

// Computes rows [row, row_end) of a block.
inline void run_block_tiles(const Call<uint16_t>& call, int row, int row_end, const Block& of) {
    for (int from = row; from < row_end; from += 2 * TILE_ROWS) {
        const int rows = std::min(2 * TILE_ROWS, row_end - from);
        shape_tiles(std::min(rows, TILE_ROWS), rows - TILE_ROWS);
        const uint16_t* x = call.x + from * call.x_stride + of.k;
        for (int p = of.panel; p < of.end; p++) {
            alignas(64) float sums[2 * TILE_ROWS * PANEL];
            (rows > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>)(sums, x, call.x_stride, of.of(p), of.count);
            finish(call.sums, sums, from, rows, p, 1, of.k == 0);
        }
    }
}

// As run_part, in tiles.
inline void run_tiles(const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int group = panels_in_cache<Bf16>(call.inputs);
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += block_inputs(call.inputs))
            run_block_tiles(call, row, row_end, block_of<Bf16>(call, panel, std::min(panel + group, panel_end), k));
    _tile_release();
}

// As run_tiles. Each block is decoded once; for few rows it stays in L1.
inline void run_tiles_mxfp4(const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const int group = row_end - row <= 2 * TILE_ROWS ? 1 : panels_in_cache<Bf16>(call.inputs);
    for_decoded_blocks(call, panel, panel_end, group,
                       [&](const Block& decoded) { run_block_tiles(call, row, row_end, decoded); });
    _tile_release();
}
#else
constexpr bool TILES_COMPILED = false;
constexpr int TILE_INPUTS = 1;
inline bool may_use_tiles() { return false; }
inline void run_tiles(const Call<uint16_t>&, int, int, int, int) {}
inline void run_tiles_mxfp4(const Call<uint16_t>&, int, int, int, int) {}
#endif

}  // namespace
}  // namespace quire

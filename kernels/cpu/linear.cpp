// Linear layers, y = x W^T + bias, over weights packed in panels of PANEL outputs.
//
// A float32 or float16 panel is [inputs][PANEL]. A bfloat16 panel is [inputs / 2][PANEL] words, each with the weights of
// two neighbouring inputs: a shift and a mask widen two registers, while 16-bit loads would need two more shuffles.
//
// The order of additions is part of the contract. An output is the sum, over blocks of K_BLOCK inputs, of chains of
// fused multiply-adds in ascending order of the input. This holds for any number of rows, row index, tile and number of
// threads: a row's bits depend on that row alone.
//
// CPUs with AMX multiply bfloat16 rows by bfloat16 weights in tiles, whose operand has the order of a bfloat16 panel.
#include <algorithm>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "common.h"
#include "pool.h"

using namespace quire;

namespace {

constexpr int PANEL = 2 * VF;                // outputs side by side: two registers
constexpr int K_BLOCK = 512;                 // inputs: a panel's block is 16 KB in bfloat16, half of it a usual L1
constexpr int GROUP_BYTES = 192 * 1024;      // weights that stay in L2 while all rows are computed
constexpr int PARTS_PER_THREAD = 4;          // so that a thread without a core delays only a quarter of its share
constexpr long THREADS_FROM = 1 << 17;       // multiplications: fewer take less time than waiting for other threads
constexpr int AHEAD = 2048;                  // bytes: the hardware prefetcher stops at the end of a 4 KB page

// MAX_ROWS: rows at a time, two sums each, that leave registers for the operands. One more row spills a sum, which
// halves the speed.
struct Bf16 {
    static constexpr int MAX_ROWS = VF == 16 ? 10 : 5;
    static long panel_bytes(long inputs) { return (inputs + 1) / 2 * PANEL * 4; }
};
struct Float32 {
    static constexpr int MAX_ROWS = VF == 16 ? 12 : 6;
    static long panel_bytes(long inputs) { return inputs * PANEL * 4; }
};

struct Float16 {
    static constexpr int MAX_ROWS = Float32::MAX_ROWS;
    static long panel_bytes(long inputs) { return inputs * PANEL * 2; }
};

// As in kernels/cpu/linear.py.
enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

long panel_bytes(int kind, long inputs) {
    return kind == BFLOAT16  ? Bf16::panel_bytes(inputs)
           : kind == FLOAT16 ? Float16::panel_bytes(inputs)
                             : Float32::panel_bytes(inputs);
}

// Converts one register of float16 weights in hardware; the launcher rejects float16 on CPUs without this conversion.
#if defined(__F16C__)
constexpr bool HAS_FLOAT16 = VF >= 8;
QUIRE_INLINE vfloat widen_halves(const char* from) {
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

// As in kernels/cpu/linear.py, which keeps one per layer so that a call has few arguments to convert.
struct Layer {
    const char* packed;
    const float* bias;  // or null
    int32_t outputs, inputs, kind;
};

template <class T>
struct Call {
    const T* x;
    long x_stride;
    const char* packed;
    const float* bias;
    float* out;
    int outputs, inputs;
};

template <int R, int P>
struct Tile {
    vfloat sums[R][P][2];
};

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

// Adds one block's sums, [rows][panels * PANEL], to the output; the first block initialises it.
template <class T>
__attribute__((noinline)) void finish(const Call<T>& call, const float* sums, int row, int rows, int column, int width,
                                      bool first) {
    const int here = std::min(width, call.outputs - column);
    for (int r = 0; r < rows; r++) {
        const float* from = sums + r * width;
        float* to = call.out + long(row + r) * call.outputs + column;
        const float* bias = first && call.bias ? call.bias + column : nullptr;
        for (int i = 0; i < here; i++) {
            const float sum = bias ? from[i] + bias[i] : from[i];
            to[i] = first ? sum : to[i] + sum;
        }
    }
}

template <class W, int R, int P>
void run_tile(const Call<float>& call, int row, int panel, int k, int count) {
    const long bytes = W::panel_bytes(call.inputs);
    Tile<R, P> tile = {};
    block<R, P>(W{}, tile, call.x + row * call.x_stride + k, call.x_stride,
                call.packed + panel * bytes + W::panel_bytes(k), bytes, count);
    static_assert(sizeof tile.sums == R * P * PANEL * 4, "the sums lie as finish reads them");
    finish(call, (const float*)tile.sums, row, R, panel * PANEL, P * PANEL, k == 0);
}

template <class W, int R>
struct Rows {
    // Few rows leave registers free: more panels at a time give more independent sums, and more streams from memory.
    static constexpr int P = R == 1 ? 4 : R == 2 || (R == 3 && VF == 16) ? 2 : 1;
    static void run(const Call<float>& call, int rows, int row, int panel, int end, int k, int count) {
        if (rows != R) return Rows<W, R - 1>::run(call, rows, row, panel, end, k, count);
        for (; panel + P <= end; panel += P) run_tile<W, R, P>(call, row, panel, k, count);
        for (; panel < end; panel++) run_tile<W, R, 1>(call, row, panel, k, count);
    }
};
template <class W>
struct Rows<W, 0> {
    static void run(const Call<float>&, int, int, int, int, int, int) {}
};

// Computes rows [row, row_end) of panels [panel, panel_end): a group of panels stays in the cache for all rows.
template <class W>
void run_part(const Call<float>& call, int row, int row_end, int panel, int panel_end) {
    const int tiles = (row_end - row + W::MAX_ROWS - 1) / W::MAX_ROWS;
    const int depth = std::min(K_BLOCK, call.inputs);
    const int group = tiles == 1 ? 4 : std::max(4, int(GROUP_BYTES / W::panel_bytes(depth)));
    for (; panel < panel_end; panel += group) {
        const int end = std::min(panel + group, panel_end);
        for (int k = 0; k < call.inputs; k += K_BLOCK)
            for (int tile = 0; tile < tiles; tile++) {
                const int from = row + int(long(row_end - row) * tile / tiles);
                const int rows = row + int(long(row_end - row) * (tile + 1) / tiles) - from;
                Rows<W, W::MAX_ROWS>::run(call, rows, from, panel, end, k, std::min(K_BLOCK, call.inputs - k));
            }
    }
}

// Divides the panels among the threads; a narrow layer with many rows is divided along its rows too.
template <class AnyCall, class Part>
void run(const AnyCall& call, int rows, Part run_one) {
    const int panels = (call.outputs + PANEL - 1) / PANEL;
    const int threads = long(rows) * call.outputs * call.inputs > THREADS_FROM ? max_threads() : 1;
    const int row_parts = std::clamp(std::min((rows + 31) / 32, 8 * threads / panels), 1, threads);
    const int panel_parts = threads == 1 ? 1 : std::min(panels, std::max(1, PARTS_PER_THREAD * threads / row_parts));
    parallel_for(row_parts * panel_parts, threads, [&](int64_t part) {
        const long i = part / panel_parts, j = part % panel_parts;
        run_one(call, int(i * rows / row_parts), int((i + 1) * rows / row_parts), int(j * panels / panel_parts),
                int((j + 1) * panels / panel_parts));
    });
}

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
bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// Tiles 0 to 3: sums of two tiles of rows by the two halves of a panel; 4 and 5: rows; 6 and 7: weights.
void shape_tiles(int first, int second) {
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

// As run_part, in tiles.
void run_tiles(const Call<uint16_t>& call, int row, int row_end, int panel, int panel_end) {
    const long bytes = Bf16::panel_bytes(call.inputs);
    const int group = std::max(4, int(GROUP_BYTES / Bf16::panel_bytes(std::min(K_BLOCK, call.inputs))));
    for (; panel < panel_end; panel += group)
        for (int k = 0; k < call.inputs; k += K_BLOCK)
            for (int from = row; from < row_end; from += 2 * TILE_ROWS) {
                const int rows = std::min(2 * TILE_ROWS, row_end - from), count = std::min(K_BLOCK, call.inputs - k);
                shape_tiles(std::min(rows, TILE_ROWS), rows - TILE_ROWS);
                const uint16_t* x = call.x + from * call.x_stride + k;
                for (int p = panel; p < std::min(panel + group, panel_end); p++) {
                    alignas(64) float sums[2 * TILE_ROWS * PANEL];
                    const char* weights = call.packed + p * bytes + Bf16::panel_bytes(k);
                    (rows > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>)(sums, x, call.x_stride, weights,
                                                                                     count);
                    finish(call, sums, from, rows, p * PANEL, PANEL, k == 0);
                }
            }
    _tile_release();
}
#else
constexpr bool TILES_COMPILED = false;
constexpr int TILE_INPUTS = 1;
bool may_use_tiles() { return false; }
void run_tiles(const Call<uint16_t>&, int, int, int, int) {}
#endif

}  // namespace

QUIRE_API int quire_has_float16() { return HAS_FLOAT16; }

QUIRE_API long quire_packed_bytes(int outputs, int inputs, int kind) {
    return (outputs + PANEL - 1) / PANEL * panel_bytes(kind, inputs);
}

// weight: [outputs][inputs] contiguous, with the element type of `packed`. Outputs past the end are zeros.
template <class T>
void pack(const T* weight, char* packed, int outputs, int inputs, int kind) {
    const int panels = (outputs + PANEL - 1) / PANEL;
    const int pair = kind == BFLOAT16 ? 2 : 1;
    const int padded = (inputs + pair - 1) / pair * pair;
    parallel_for(panels, max_threads(), [&](int64_t panel) {
        T* to = (T*)(packed + panel * panel_bytes(kind, inputs));
        for (int i = 0; i < PANEL; i++) {
            const int output = int(panel) * PANEL + i;
            const T* from = weight + long(output) * inputs;
            for (int k = 0; k < padded; k++)
                to[(k / pair * PANEL + i) * pair + k % pair] = output < outputs && k < inputs ? from[k] : T(0);
        }
    });
}

QUIRE_API void quire_pack(const void* weight, void* packed, int outputs, int inputs, int kind) {
#ifdef MADV_HUGEPAGE
    // Every step reads all of it, and page walks with small pages cost bandwidth. A failure of madvise is harmless.
    const uintptr_t page = 1 << 21, start = (uintptr_t(packed) + page - 1) & ~(page - 1);
    const uintptr_t end = (uintptr_t(packed) + quire_packed_bytes(outputs, inputs, kind)) & ~(page - 1);
    if (end > start) madvise((void*)start, end - start, MADV_HUGEPAGE);
#endif
    if (kind == FLOAT32)
        pack((const uint32_t*)weight, (char*)packed, outputs, inputs, kind);
    else
        pack((const uint16_t*)weight, (char*)packed, outputs, inputs, kind);
}

// x: [rows][inputs], rows x_stride apart. out: [rows][outputs], contiguous.
QUIRE_API void quire_linear(const Layer* layer, const float* x, long x_stride, float* out, int rows) {
    const Call<float> call{x, x_stride, layer->packed, layer->bias, out, layer->outputs, layer->inputs};
    if (layer->kind == BFLOAT16)
        run(call, rows, run_part<Bf16>);
    else if (layer->kind == FLOAT16)
        run(call, rows, run_part<Float16>);
    else
        run(call, rows, run_part<Float32>);
}

// Whether quire_linear_bf16 can multiply rows by this layer.
QUIRE_API int quire_takes_bf16(const Layer* layer) {
    return TILES_COMPILED && layer->kind == BFLOAT16 && layer->inputs % TILE_INPUTS == 0 && may_use_tiles();
}

// As quire_linear, for bfloat16 rows.
QUIRE_API void quire_linear_bf16(const Layer* layer, const uint16_t* x, long x_stride, float* out, int rows) {
    run(Call<uint16_t>{x, x_stride, layer->packed, layer->bias, out, layer->outputs, layer->inputs}, rows, run_tiles);
}

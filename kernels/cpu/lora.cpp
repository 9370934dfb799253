// Addends of LoRA adapters: y += scale * (x A^T) B^T, for rows that use different adapters (kernels/lora/lora.py).
//
// A and B are read as they are, row-major with `rank` rows each, so that an adapter is served from where it was loaded.
// The order of additions is part of the contract, in any tile: a number of the shrink is the sum of a register's lanes,
// each of which adds the products of every VF-th input (or pair of inputs) in ascending order; an addend adds its
// products in ascending order of the rank, from zero. A row's bits depend on that row and its adapter alone.
#include <algorithm>
#include <vector>

#include "common.h"
#include "plan.h"

using namespace quire;

namespace {

constexpr int MOST_ROWS = 32;         // of a piece: their inputs stay in L2 while A is read
constexpr int SHRINK_ROWS = 4;        // by four ranks: 16 sums
constexpr int EXPAND_ROWS = 6;        // by EXPAND_VECTORS: sums leave registers for the operands
constexpr int EXPAND_VECTORS = VF == 16 ? 2 : 1;  // each of two registers
constexpr int64_t MOST_AHEAD = 256 * 1024;  // bytes prefetched: they stay in L2

// As `SlotTable.entries` of kernels/lora/lora.py.
struct Part {
    int64_t a, b, rank, first, outputs;
    float scale;
    int32_t padding;
};

struct Tile {  // as `AdapterRows.tiles`
    int32_t slot, first, end;
};

struct Call {
    const Part* parts;  // [slots][max_parts]
    const Tile* tiles;  // [max_tiles]; the first without rows is the end
    const int32_t* order;
    const void* x;
    void* y;
    int64_t x_stride, y_stride, inputs;
    int32_t max_parts, max_tiles, is_bf16;
};

// Products of a register of inputs and one of A: `add` adds them to a sum.
template <class T>
struct Floats {
    typedef T number;
    typedef vfloat reg;
    static constexpr int STEP = VF;
    static QUIRE_INLINE reg at(const T* from) { return load_floats(from); }
    static QUIRE_INLINE reg some(const T* from, int count) { return load_some(from, count); }
    static QUIRE_INLINE vfloat add(vfloat sum, reg x, reg a) { return multiply_add(x, a, sum); }
};

#if defined(__AVX512BF16__) && !defined(QUIRE_VF)
struct Pairs {
    typedef uint16_t number;
    typedef __m512i reg;
    static constexpr int STEP = 2 * VF;
    static QUIRE_INLINE reg at(const uint16_t* from) { return load<reg>(from); }
    static QUIRE_INLINE reg some(const uint16_t* from, int count) {
        return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static QUIRE_INLINE vfloat add(vfloat sum, reg x, reg a) {
        return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a);
    }
};
#else
typedef Floats<uint16_t> Pairs;
#endif

#if defined(__AVX__) && !defined(QUIRE_VF)
QUIRE_INLINE __m128 sum_to_four(vfloat x) {
#if defined(__AVX512F__)
    const __m512 all = (__m512)x;
    const __m256 half = _mm512_castps512_ps256(all) +
                        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
#else
    const __m256 half = (__m256)x;
#endif
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}
// Writes the sums of four registers' lanes.
QUIRE_INLINE void sum_four(const vfloat (&x)[4], float* to) {
    const __m128 low = _mm_hadd_ps(sum_to_four(x[0]), sum_to_four(x[1]));
    const __m128 high = _mm_hadd_ps(sum_to_four(x[2]), sum_to_four(x[3]));
    _mm_storeu_ps(to, _mm_hadd_ps(low, high));
}
#else
QUIRE_INLINE void sum_four(const vfloat (&x)[4], float* to) {
    for (int i = 0; i < 4; i++) to[i] = sum_lanes(x[i]);
}
#endif

// Memory that is read next, prefetched in equal steps into L2 while other memory is computed with.
class Ahead {
  public:
    Ahead(const void* from, int64_t bytes, int64_t steps)
        : at_((const char*)from), due_(at_), step_(std::min(bytes, MOST_AHEAD) / std::max<int64_t>(1, steps) + 1) {}
    QUIRE_INLINE void operator()() {
        for (due_ += step_; at_ < due_; at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    const char *at_, *due_;
    int64_t step_;
};

// Shrinks R rows to K numbers of the rank. a: the first of K rows of A. to: [R], `stride` apart.
template <class D, int R, int K>
QUIRE_INLINE void shrink_tile(const typename D::number* const* x, const typename D::number* a, int64_t inputs,
                              float scale, float* to, int64_t stride, Ahead& ahead) {
    vfloat sums[R][4] = {};
    int64_t k = 0;
    for (; k + D::STEP <= inputs; k += D::STEP) {
        typename D::reg of[K];
        each<K>(QUIRE_EACH(i) { of[i] = D::at(a + i * inputs + k); });
        ahead();
        each<R>(QUIRE_EACH(r) {
            const typename D::reg row = D::at(x[r] + k);
            each<K>(QUIRE_EACH(i) { sums[r][i] = D::add(sums[r][i], row, of[i]); });
        });
    }
    if (k < inputs) {
        const int rest = int(inputs - k);
        typename D::reg of[K];
        each<K>(QUIRE_EACH(i) { of[i] = D::some(a + i * inputs + k, rest); });
        each<R>(QUIRE_EACH(r) {
            const typename D::reg row = D::some(x[r] + k, rest);
            each<K>(QUIRE_EACH(i) { sums[r][i] = D::add(sums[r][i], row, of[i]); });
        });
    }
    each<R>(QUIRE_EACH(r) {
        float four[4];
        sum_four(sums[r], four);
        for (int i = 0; i < K; i++) to[r * stride + i] = four[i] * scale;
    });
}

// Two registers of neighbouring outputs: bfloat16 numbers by even and odd places, which a shift and a mask widen.
struct Both {
    vfloat low, high;
};
QUIRE_INLINE Both load_both(const float* from) { return {load<vfloat>(from), load<vfloat>(from + VF)}; }
QUIRE_INLINE Both load_both(const uint16_t* from) {
    const vuint words = load<vuint>(from);
    return {(vfloat)(words << 16), (vfloat)(words & 0xffff0000u)};
}
QUIRE_INLINE void store_both(float* to, const Both& x) { store(to, x.low), store(to + VF, x.high); }
QUIRE_INLINE void store_both(uint16_t* to, const Both& x) {
#if defined(__AVX512BF16__) && !defined(QUIRE_VF)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.high, (__m512)x.low);
    alignas(64) static constexpr uint16_t PLACES[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    store(to, _mm512_permutexvar_epi16(load<__m512i>(PLACES), halves));
#else
    const auto rounded = [](vfloat x) {
        const vuint bits = (vuint)x;
        return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : vuint{} + 0x7fc00000;
    };
    store(to, rounded(x.low) >> 16 | (rounded(x.high) & 0xffff0000u));
#endif
}

// As load_both and store_both, for fewer outputs.
template <class T>
QUIRE_INLINE Both load_both(const T* from, int count) {
    if (count >= 2 * VF) return load_both(from);
    T all[2 * VF] = {};
    std::memcpy(all, from, size_t(count) * sizeof(T));
    return load_both(all);
}
template <class T>
QUIRE_INLINE void store_both(T* to, const Both& x, int count) {
    if (count >= 2 * VF) return store_both(to, x);
    T all[2 * VF];
    store_both(all, x);
    std::memcpy(to, all, size_t(count) * sizeof(T));
}

// Adds to V times two registers of outputs of R rows, of which only `count` exist. shrunk: [R][rank], `stride` apart.
// b: the first of these outputs.
template <class T, int R, int V>
QUIRE_INLINE void expand_tile(const float* shrunk, int64_t stride, const T* b, int64_t outputs, int64_t rank,
                              T* const* y, int64_t column, int count, Ahead& ahead) {
    Both sums[R][V] = {};
    for (int64_t k = 0; k < rank; k++, b += outputs) {
        Both of[V];
        each<V>(QUIRE_EACH(v) { of[v] = V > 1 ? load_both(b + 2 * v * VF) : load_both(b, count); });
        ahead();
        each<R>(QUIRE_EACH(r) {
            const vfloat value = splat(shrunk[r * stride + k]);
            each<V>(QUIRE_EACH(v) {
                sums[r][v].low = multiply_add(value, of[v].low, sums[r][v].low);
                sums[r][v].high = multiply_add(value, of[v].high, sums[r][v].high);
            });
        });
    }
    each<R>(QUIRE_EACH(r) {
        each<V>(QUIRE_EACH(v) {
            T* const at = y[r] + column + 2 * v * VF;
            const Both before = V > 1 ? load_both(at) : load_both(at, count);
            const Both sum = {before.low + sums[r][v].low, before.high + sums[r][v].high};
            V > 1 ? store_both(at, sum) : store_both(at, sum, count);
        });
    });
}

// Calls run(constant) for a number between 1 and N.
template <int N, class Run>
QUIRE_INLINE void with_constant(int number, const Run& run) {
    if constexpr (N > 1) {
        if (number < N) return with_constant<N - 1>(number, run);
    }
    run(std::integral_constant<int, N>{});
}

// Calls run(count, row) for tiles of nearly equal numbers of rows; the count is a constant.
template <int MOST, class Run>
QUIRE_INLINE void for_tiles(int rows, const Run& run) {
    const int tiles = (rows + MOST - 1) / MOST;
    for (int tile = 0; tile < tiles; tile++) {
        const int row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        with_constant<MOST>(end - row, [&](auto count) __attribute__((always_inline)) { run(count, row); });
    }
}

// Shrinks rows to the numbers [k, k_end) of a part's rank. to: [rows][rank]. next: memory that is read after it.
template <class D>
void shrink(const Part& part, const typename D::number* const* x, int rows, int64_t inputs, int64_t k, int64_t k_end,
            float* to, const void* next, int64_t next_bytes) {
    typedef typename D::number T;
    const int64_t tiles = (k_end - k + 3) / 4 * ((rows + SHRINK_ROWS - 1) / SHRINK_ROWS);
    Ahead ahead(next, next_bytes, tiles * (inputs / D::STEP));
    for (; k < k_end; k += 4)
        with_constant<4>(int(std::min<int64_t>(4, k_end - k)), [&](auto ranks) {
            for_tiles<SHRINK_ROWS>(rows, [&](auto count, int row) __attribute__((always_inline)) {
                shrink_tile<D, count.value, ranks.value>(x + row, (const T*)part.a + k * inputs, inputs, part.scale,
                                                         to + row * part.rank + k, part.rank, ahead);
            });
        });
}

// Adds to the outputs [column, end) of a part. shrunk: [rows][rank]. next: memory that is read after it.
template <class T>
void expand(const Part& part, const float* shrunk, T* const* y, int rows, int64_t column, int64_t end, const void* next,
            int64_t next_bytes) {
    constexpr int WIDE = EXPAND_VECTORS * 2 * VF;
    const int64_t all = ((end - column + WIDE - 1) / WIDE) * ((rows + EXPAND_ROWS - 1) / EXPAND_ROWS);
    Ahead ahead(next, next_bytes, all * part.rank);
    const auto tiles = [&](auto vectors) {
        for_tiles<EXPAND_ROWS>(rows, [&](auto count, int row) __attribute__((always_inline)) {
            expand_tile<T, count.value, vectors.value>(shrunk + row * part.rank, part.rank, (const T*)part.b + column,
                                                       part.outputs, part.rank, y + row, part.first + column,
                                                       int(std::min<int64_t>(2 * VF, end - column)), ahead);
        });
    };
    if (EXPAND_VECTORS > 1)
        for (; column + WIDE <= end; column += WIDE) tiles(std::integral_constant<int, EXPAND_VECTORS>{});
    for (; column < end; column += 2 * VF) tiles(std::integral_constant<int, 1>{});
}

// Rows of one slot.
struct Rows {
    int32_t slot, first, end;
};

class AddAdapters final : public Operation {
  public:
    explicit AddAdapters(const Call& call) : call_(call) {}

    int64_t begin(int stage) override {
        if (stage) return -1;
        pieces_.clear();
        for (int i = 0; i < call_.max_tiles && call_.tiles[i].end; i++) {
            const Tile& tile = call_.tiles[i];
            if (!pieces_.empty() && pieces_.back().slot == tile.slot && tile.end - pieces_.back().first <= MOST_ROWS)
                pieces_.back().end = tile.end;
            else
                pieces_.push_back({tile.slot, tile.first, tile.end});
        }
        return int64_t(pieces_.size());
    }

    void run(int64_t piece) override {
        // This thread's next piece is probably this one.
        const size_t then = size_t(piece) + std::max(1, max_threads());
        const Part* const next = then < pieces_.size() ? call_.parts + pieces_[then].slot * call_.max_parts : nullptr;
        if (call_.is_bf16)
            add<Pairs>(pieces_[piece], next);
        else
            add<Floats<float>>(pieces_[piece], next);
    }

    const char* name() const override { return "adapters"; }

  private:
    template <class D>
    void add(const Rows& of, const Part* next) {
        typedef typename D::number T;
        const T* x[MOST_ROWS];
        T* y[MOST_ROWS];
        const int rows = of.end - of.first;
        for (int i = 0; i < rows; i++) {
            const int64_t row = call_.order[of.first + i];
            x[i] = (const T*)call_.x + row * call_.x_stride, y[i] = (T*)call_.y + row * call_.y_stride;
        }
        static thread_local std::vector<float> shrunk;
        const Part* part = call_.parts + of.slot * call_.max_parts;
        for (const Part* end = part + call_.max_parts; part < end && part->rank; part++) {
            if (int64_t(shrunk.size()) < rows * part->rank) shrunk.resize(rows * part->rank);
            const int64_t bytes = part->rank * int64_t(sizeof(T));
            shrink<D>(*part, x, rows, call_.inputs, 0, part->rank, shrunk.data(), (const void*)part->b,
                      bytes * part->outputs);
            const Part* const then = part + 1 < end && part[1].rank ? part + 1 : next;
            expand(*part, shrunk.data(), y, rows, 0, part->outputs, then ? (const void*)then->a : nullptr,
                   then ? then->rank * call_.inputs * int64_t(sizeof(T)) : 0);
        }
    }

    Call call_;
    std::vector<Rows> pieces_;
};

}  // namespace

// y[row] += the addends of the row's slot.
QUIRE_API void quire_add_adapters(const Part* parts, int max_parts, const Tile* tiles, int max_tiles,
                                  const int32_t* order, const void* x, long x_stride, long inputs, void* y,
                                  long y_stride, int is_bf16) {
    execute(AddAdapters({parts, tiles, order, x, y, x_stride, y_stride, inputs, max_parts, max_tiles, is_bf16}));
}

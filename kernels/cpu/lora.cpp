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
constexpr int FEWEST_ROWS = 8;        // of a piece, if a slot's rows are divided: each reads all of A and B
constexpr int SHRINK_ROWS = 4, SHRINK_RANKS = 4;  // of a tile: 16 sums, which is a sum_four for each row
constexpr int EXPAND_ROWS = 6;                    // by EXPAND_VECTORS: sums leave registers for the operands
constexpr int EXPAND_VECTORS = VF == 16 ? 2 : 1;  // each of two registers
constexpr int WIDE = EXPAND_VECTORS * 2 * VF;     // outputs of a tile
constexpr int64_t MOST_AHEAD = 256 * 1024;        // bytes prefetched: they stay in L2

// In bytes read of A and B. Computing with ROWS_PER_READ rows takes as long as reading.
constexpr double ROWS_PER_READ = 6;
constexpr double THREADS_FROM = 100e3;        // less takes less time than waiting for other threads
constexpr double STAGES_FROM = 1e6;           // less takes less time than one more stage
constexpr int64_t SHARE_BYTES = 64 * 1024;  // of B in a piece of two stages

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
    Ahead() = default;
    Ahead(const void* from, int64_t bytes) : at_((const char*)from), due_(at_), bytes_(std::min(bytes, MOST_AHEAD)) {}
    void divide(int64_t steps) { step_ = bytes_ ? bytes_ / std::max<int64_t>(1, steps) + 1 : 0; }
    QUIRE_INLINE void operator()() {
        for (due_ += step_; at_ < due_; at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    const char *at_ = nullptr, *due_ = nullptr;
    int64_t bytes_ = 0, step_ = 0;
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

// Shrinks rows to the numbers [k, k_end) of a part's rank. to: [rows][rank].
template <class D>
void shrink(const Part& part, const typename D::number* const* x, int rows, int64_t inputs, int64_t k, int64_t k_end,
            float* to, Ahead ahead) {
    typedef typename D::number T;
    const int64_t tiles = (k_end - k + SHRINK_RANKS - 1) / SHRINK_RANKS * ((rows + SHRINK_ROWS - 1) / SHRINK_ROWS);
    ahead.divide(tiles * (inputs / D::STEP));
    for (; k < k_end; k += SHRINK_RANKS)
        with_constant<SHRINK_RANKS>(int(std::min<int64_t>(SHRINK_RANKS, k_end - k)), [&](auto ranks) {
            for_tiles<SHRINK_ROWS>(rows, [&](auto count, int row) __attribute__((always_inline)) {
                shrink_tile<D, count.value, ranks.value>(x + row, (const T*)part.a + k * inputs, inputs, part.scale,
                                                         to + row * part.rank + k, part.rank, ahead);
            });
        });
}

// Adds to the outputs [column, end) of a part. shrunk: [rows][rank].
template <class T>
void expand(const Part& part, const float* shrunk, T* const* y, int rows, int64_t column, int64_t end, Ahead ahead) {
    const int64_t all = ((end - column + WIDE - 1) / WIDE) * ((rows + EXPAND_ROWS - 1) / EXPAND_ROWS);
    ahead.divide(all * part.rank);
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

// Rows of one slot, as indices in `order`.
struct Rows {
    const Part* part;  // of the slot; as many as have a rank, at most max_parts
    int64_t first, end;
};

// A part's numbers of the rank, or its outputs, [from, to) for some rows.
struct Share {
    const Rows* rows;
    const Part* part;
    int64_t from, to, shrunk;  // shrunk: where the part's shrunk rows are
};

class AddAdapters final : public Operation {
  public:
    explicit AddAdapters(const Call& call) : call_(call) {}

    // Either one stage, whose pieces are all addends of some rows, or two, the shrink and the expand, whose pieces are
    // shares of parts. One stage is faster if it has pieces for all threads; each stage takes some microseconds more.
    int64_t begin(int stage) override {
        if (stage == 0) {
            const int threads = max_threads();
            const double bytes = find_rows(threads);
            alone_ = threads == 1 || bytes < THREADS_FROM;
            divided_ = !alone_ && int64_t(rows_.size()) < 2 * threads && bytes >= STAGES_FROM;
            if (!divided_) return alone_ && !rows_.empty() ? 1 : int64_t(rows_.size());
        }
        if (stage > int(divided_)) return -1;
        expanding_ = stage == 1;
        find_shares();
        return int64_t(shares_.size());
    }

    void run(int64_t piece) override { call_.is_bf16 ? run_as<Pairs>(piece) : run_as<Floats<float>>(piece); }

    const char* name() const override { return "adapters"; }

  private:
    // Divides the rows of each slot, and returns the bytes that would take as long to read as all addends take.
    double find_rows(int threads) {
        int64_t count = 0;
        for (int i = 0; i < call_.max_tiles && call_.tiles[i].end; i++) count += call_.tiles[i].end - call_.tiles[i].first;
        const int64_t most = std::clamp<int64_t>(count / (2 * threads), FEWEST_ROWS, MOST_ROWS);
        rows_.clear();
        double bytes = 0;
        for (int i = 0; i < call_.max_tiles && call_.tiles[i].end;) {
            const int slot = call_.tiles[i].slot;
            const int64_t first = call_.tiles[i].first;
            int64_t end = first;
            for (; i < call_.max_tiles && call_.tiles[i].end && call_.tiles[i].slot == slot; i++) end = call_.tiles[i].end;
            const Part* const part = call_.parts + int64_t(slot) * call_.max_parts;
            if (!part->rank) continue;
            const int64_t blocks = (end - first + most - 1) / most;
            for (int64_t j = 0; j < blocks; j++)
                rows_.push_back({part, first + (end - first) * j / blocks, first + (end - first) * (j + 1) / blocks});
            for (const Part* each = part; each < part + call_.max_parts; each++)
                bytes += double(each->rank * (call_.inputs + each->outputs) * number_bytes()) *
                         (1 + double(end - first) / ROWS_PER_READ);
        }
        return bytes;
    }

    void find_shares() {
        shares_.clear();
        int64_t shrunk = 0;
        for (const Rows& rows : rows_)
            for (const Part* part = rows.part; part < rows.part + call_.max_parts && part->rank; part++) {
                const int64_t all = expanding_ ? part->outputs : part->rank;
                const int64_t columns = SHARE_BYTES / (part->rank * number_bytes()) / WIDE * WIDE;
                const int64_t each = expanding_ ? std::max<int64_t>(WIDE, columns) : SHRINK_RANKS;
                for (int64_t from = 0; from < all; from += each)
                    shares_.push_back({&rows, part, from, std::min(all, from + each), shrunk});
                shrunk += (rows.end - rows.first) * part->rank;
            }
        if (int64_t(shrunk_.size()) < shrunk) shrunk_.resize(shrunk);
    }

    template <class D>
    void run_as(int64_t piece) {
        if (divided_) return run_share<D>(shares_[piece]);
        if (!alone_) return add<D>(piece, piece + max_threads());  // this thread's next piece is probably that one
        for (size_t i = 0; i < rows_.size(); i++) add<D>(i, i + 1);
    }

    template <class D>
    void run_share(const Share& of) {
        const Pointers<typename D::number> at(call_, *of.rows);
        float* const shrunk = shrunk_.data() + of.shrunk;
        if (expanding_)
            expand(*of.part, shrunk, at.y, at.count, of.from, of.to, Ahead());
        else
            shrink<D>(*of.part, at.x, at.count, call_.inputs, of.from, of.to, shrunk, Ahead());
    }

    // Adds all addends of some rows. next: index of the rows whose memory is read next.
    template <class D>
    void add(size_t index, size_t next) {
        typedef typename D::number T;
        static thread_local std::vector<float> shrunk;
        const Rows& rows = rows_[index];
        const Pointers<T> at(call_, rows);
        const Part* const end = rows.part + call_.max_parts;
        for (const Part* part = rows.part; part < end && part->rank; part++) {
            if (int64_t(shrunk.size()) < at.count * part->rank) shrunk.resize(at.count * part->rank);
            const int64_t bytes = part->rank * number_bytes();
            shrink<D>(*part, at.x, at.count, call_.inputs, 0, part->rank, shrunk.data(),
                      Ahead((const void*)part->b, bytes * part->outputs));
            const bool more = part + 1 < end && part[1].rank;
            const Part* const then = more ? part + 1 : next < rows_.size() ? rows_[next].part : nullptr;
            expand(*part, shrunk.data(), at.y, at.count, 0, part->outputs,
                   then ? Ahead((const void*)then->a, then->rank * call_.inputs * number_bytes()) : Ahead());
        }
    }

    template <class T>
    struct Pointers {
        const T* x[MOST_ROWS];
        T* y[MOST_ROWS];
        int count;
        Pointers(const Call& call, const Rows& of) : count(int(of.end - of.first)) {
            for (int i = 0; i < count; i++) {
                const int64_t row = call.order[of.first + i];
                x[i] = (const T*)call.x + row * call.x_stride, y[i] = (T*)call.y + row * call.y_stride;
            }
        }
    };

    int64_t number_bytes() const { return call_.is_bf16 ? 2 : 4; }

    Call call_;
    bool alone_ = false, divided_ = false, expanding_ = false;
    std::vector<Rows> rows_;
    std::vector<Share> shares_;
    std::vector<float> shrunk_;  // between two stages
};

}  // namespace

// y[row] += the addends of the row's slot.
QUIRE_API void quire_add_adapters(const Part* parts, int max_parts, const Tile* tiles, int max_tiles,
                                  const int32_t* order, const void* x, long x_stride, long inputs, void* y,
                                  long y_stride, int is_bf16) {
    execute(AddAdapters({parts, tiles, order, x, y, x_stride, y_stride, inputs, max_parts, max_tiles, is_bf16}));
}

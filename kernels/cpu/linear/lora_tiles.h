// Shrink and expand of some rows by one part of an adapter, in tiles: see lora.cpp.
#pragma once

#include <algorithm>

#include "native/common.h"

namespace quire {
namespace {

constexpr int SHRINK_ROWS = 4, SHRINK_RANKS = 4;  // of a tile: 16 sums, which is a sum_four for each row
constexpr int EXPAND_ROWS = 6;                    // by EXPAND_VECTORS: sums leave registers for the operands
constexpr int EXPAND_VECTORS = VF == 16 ? 2 : 1;  // each of two registers
constexpr int WIDE = EXPAND_VECTORS * 2 * VF;     // outputs of a tile

// As `SlotTable.entries` of kernels/lora/lora.py.
struct Part {
    int64_t a, b, rank, first, outputs;
    float scale;
    int32_t padding;
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

// Memory that is read next, rows of which lie `stride` apart: prefetched in equal steps while other memory is computed
// with. A prefetch is dropped if too many are under way.
class Ahead {
  public:
    Ahead() = default;
    Ahead(int64_t from, int64_t rows, int64_t row_bytes, int64_t stride)
        : at_(from), row_end_(from + row_bytes), skip_(stride - row_bytes), stride_(stride), bytes_(rows * row_bytes) {}
    void divide(int64_t steps) { step_ = bytes_ ? int(bytes_ / steps) + 1 : 0; }
    QUIRE_INLINE void operator()() {
        for (due_ += step_; due_ > 0; due_ -= 64) {
            __builtin_prefetch((const void*)at_, 0, 2);
            at_ += 64;
            if (at_ >= row_end_) at_ = row_end_ + skip_, row_end_ += stride_;
        }
    }

  private:
    int64_t at_ = 0, row_end_ = 0, skip_ = 0, stride_ = 0, bytes_ = 0;
    int due_ = 0, step_ = 0;
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
    ahead.divide(std::max<int64_t>(1, tiles * (inputs / D::STEP)));
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

}  // namespace
}  // namespace quire

// A tile: some query rows and up to TILE keys, addressed through the block table.
//
// Query rows are (token, query head) pairs that share one key/value head. They are processed QUERIES at a time, so that
// each loaded key or value is used several times. The grouping of rows does not change a row's bits, because each lane
// of each row is one chain of fused multiply-adds.
#pragma once

#include <algorithm>

#include "attention/vec.h"

namespace quire {

constexpr int TILE = 64;                     // keys
constexpr int QUERIES = VF == 16 ? 4 : 3;    // rows at a time: accumulators of four keys per row fit in the registers
constexpr int LINE = 64;                     // bytes per prefetch

// Memory to prefetch: the row of each key, or null.
struct Ahead {
    const char* const* rows;
    int64_t bytes;
    QUIRE_INLINE Ahead from(int first) const { return Ahead{rows + first, bytes}; }
    QUIRE_INLINE void fetch(int first, int last) const {
        if (rows == nullptr) return;
        for (int i = first; i < last; i++) {
            int64_t at = 0;
            for (; at + 2 * LINE <= bytes; at += 2 * LINE) {
                __builtin_prefetch(rows[i] + at);
                __builtin_prefetch(rows[i] + at + LINE);
            }
            if (at < bytes) __builtin_prefetch(rows[i] + at);
        }
    }
};

// scores[i][key] = query i . key, for groups of four keys. `width`: numbers of a query or, with Words, words.
template <class Format, int N>
void score_rows(const float* query, int64_t width, const typename Format::stored* const* keys, int groups,
                float* scores, Ahead ahead) {
    for (int group = 0; group < groups; group++) {
        const auto *k0 = keys[4 * group], *k1 = keys[4 * group + 1];
        const auto *k2 = keys[4 * group + 2], *k3 = keys[4 * group + 3];
        ahead.fetch(4 * group, 4 * group + 4);
        vfloat acc[N][4] = {};
        for (int64_t d = 0; d < width; d += VF) {
            vfloat q[N];
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) q[i] = in_register(load<vfloat>(query + i * width + d));
            const vfloat a = Format::value(k0 + d);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[i][0] = Format::add(q[i], a, acc[i][0]);
            const vfloat b = Format::value(k1 + d);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[i][1] = Format::add(q[i], b, acc[i][1]);
            const vfloat c = Format::value(k2 + d);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[i][2] = Format::add(q[i], c, acc[i][2]);
            const vfloat e = Format::value(k3 + d);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[i][3] = Format::add(q[i], e, acc[i][3]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
            store(scores + i * TILE + 4 * group, sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
    }
}

// turned[d][key] = keys[key][d], for a tile of keys in float32 or in words.
inline void turn_tile(const float* const* keys, int64_t width, float* turned) {
    for (int key = 0; key < TILE; key += VF)
        for (int64_t d = 0; d < width; d += VF) {
            vfloat lanes[VF];
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++) lanes[i] = load<vfloat>(keys[key + i] + d);
            transpose(lanes);
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++) store(turned + (d + i) * TILE + key, lanes[i]);
        }
}

// As score_rows, for K registers of turned keys: lanes are keys, so no lanes are added. The bits are the same: a sum
// here is what a lane of score_rows is there, and the sums are added in the order of `sums`.
template <class Format, int N, int K>
void score_turned(const float* query, int64_t width, const float* turned, float* scores) {
    constexpr int PAIRS = VF == 16 ? 8 : VF;
    vfloat kept[3][N][K];  // sums of 1, 2 and 4 neighbours that wait for the next ones
    for (int pair = 0; pair < PAIRS; pair++) {
        vfloat acc[N][K];
        for (int lane = pair; lane < VF; lane += PAIRS) {
            vfloat chain[N][K] = {};
            for (int64_t d = lane; d < width; d += VF) {
                vfloat q[N];
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) q[i] = in_register(splat(query[i * width + d]));
#pragma GCC unroll 8
                for (int k = 0; k < K; k++) {
                    const vfloat key = in_register(load<vfloat>(turned + d * TILE + k * VF));
#pragma GCC unroll 8
                    for (int i = 0; i < N; i++) chain[i][k] = Format::add(q[i], key, chain[i][k]);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int k = 0; k < K; k++) acc[i][k] = lane == pair ? chain[i][k] : acc[i][k] + chain[i][k];
        }
        int level = 0;
        for (; pair >> level & 1; level++)
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int k = 0; k < K; k++) acc[i][k] = kept[level][i][k] + acc[i][k];
        if (pair == PAIRS - 1) {
            for (int i = 0; i < N; i++)
                for (int k = 0; k < K; k++) store(scores + i * TILE + k * VF, acc[i][k]);
        } else {
            for (int i = 0; i < N; i++)
                for (int k = 0; k < K; k++) kept[level][i][k] = acc[i][k];
        }
    }
}

// out[i][d] += sum over keys of weights[i][key] * value[key][d], for D registers of d.
template <class Format, int N, int D>
void add_columns(float* out, int64_t width, const float* weights, const typename Format::stored* const* values,
                 int64_t column, int first, int last, Ahead ahead) {
    vfloat acc[N][D];
    for (int i = 0; i < N; i++)
        for (int d = 0; d < D; d++) acc[i][d] = load<vfloat>(out + i * width + d * VF);
    for (int key = first; key < last; key++) {
        const auto* value = values[key] + column;
        ahead.fetch(key, key + 1);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) {
            const vfloat v = Format::value(value + d * VF);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) acc[i][d] = multiply_add(splat(weights[i * TILE + key]), v, acc[i][d]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int d = 0; d < D; d++) store(out + i * width + d * VF, acc[i][d]);
}

template <class Format, int N>
void add_rows(float* out, int64_t width, const float* weights, const typename Format::stored* const* values,
              int first, int last, Ahead ahead) {
    constexpr int D = N == 1 ? 8 : 4;
    int64_t d = 0;
    for (; d + D * VF <= width; d += D * VF) {
        add_columns<Format, N, D>(out + d, width, weights, values, d, first, last, ahead);
        ahead.rows = nullptr;
    }
    for (; d < width; d += VF) add_columns<Format, N, 1>(out + d, width, weights, values, d, first, last, Ahead{});
}

template <class Format>
void score_tile(const float* query, int rows, int64_t width, const typename Format::stored* const* keys, int groups,
                float* scores, Ahead ahead) {
    int row = 0;
    for (; row + QUERIES <= rows; row += QUERIES) {
        score_rows<Format, QUERIES>(query + row * width, width, keys, groups, scores + row * TILE, ahead);
        ahead.rows = nullptr;
    }
    query += row * width, scores += row * TILE;
    if (rows - row == 3) score_rows<Format, 3>(query, width, keys, groups, scores, ahead);
    if (rows - row == 2) score_rows<Format, 2>(query, width, keys, groups, scores, ahead);
    if (rows - row == 1) score_rows<Format, 1>(query, width, keys, groups, scores, ahead);
}

// Calls step(row, count) for QUERIES rows at a time, and prefetches a tile's rows in between: all at once would wait.
template <class Step>
void interleave(int rows, Ahead ahead, Step step) {
    for (int row = 0; row < rows; row += QUERIES) {
        const int count = std::min(QUERIES, rows - row);
        step(row, count);
        ahead.fetch(row * TILE / rows, (row + count) * TILE / rows);
    }
}

template <class Format>
void score_turned_tile(const float* query, int rows, int64_t width, const float* turned, float* scores,
                              Ahead ahead) {
    constexpr int K = 4;
    interleave(rows, ahead, [&](int row, int count) {
        const float* from = query + row * width;
        float* to = scores + row * TILE;
        for (int key = 0; key < TILE; key += K * VF)
            if (count == QUERIES)
                score_turned<Format, QUERIES, K>(from, width, turned + key, to + key);
            else
                for (int i = 0; i < count; i++)
                    score_turned<Format, 1, K>(from + i * width, width, turned + key, to + i * TILE + key);
    });
}

template <class Format>
void add_tile(float* out, int rows, int64_t width, const float* weights, const typename Format::stored* const* values,
              int first, int last, Ahead ahead) {
    int row = 0;
    for (; row + QUERIES <= rows; row += QUERIES) {
        add_rows<Format, QUERIES>(out + row * width, width, weights + row * TILE, values, first, last, ahead);
        ahead.rows = nullptr;
    }
    out += row * width, weights += row * TILE;
    if (rows - row == 3) add_rows<Format, 3>(out, width, weights, values, first, last, ahead);
    if (rows - row == 2) add_rows<Format, 2>(out, width, weights, values, first, last, ahead);
    if (rows - row == 1) add_rows<Format, 1>(out, width, weights, values, first, last, ahead);
}

}  // namespace quire

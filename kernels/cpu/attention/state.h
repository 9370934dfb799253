// Online softmax over keys that are processed tile by tile (Milakov and Gimelshein, arXiv 1805.02867).
#pragma once

#include <limits>

#include "attention/tile.h"

namespace quire {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Accumulated state of one query row; `out` [width] is the sum of exp(score - most) * value.
struct Row {
    float most;
    vfloat sums;  // sum of exp(score - most), per lane
};

// Parameters of the conversion of scores to weights.
struct Scores {
    float factor;     // of all scores
    float soft_cap;   // 0 for none
    int first, last;  // keys of the tile that the query sees
};

// Converts scores to weights in place, and rescales the accumulated state to the new largest score. Vectors [from, to)
// of the tile contain all visible keys; other keys in them get weight 0 with any score.
inline void weigh(const Scores& how, int from, int to, float* scores, Row& row, float* out, int64_t width) {
    vfloat most = splat(NOTHING), lane = {};
    for (int i = 0; i < VF; i++) lane[i] = float(i);
    const bool whole = how.first <= from * VF && how.last >= to * VF;
    for (int v = from; v < to; v++) {
        vfloat s = load<vfloat>(scores + v * VF) * how.factor;
        const vfloat key = lane + float(v * VF);
        if (how.soft_cap != 0.0f) s = hyperbolic_tangent(s / how.soft_cap) * how.soft_cap;
        if (!whole) s = key < float(how.first) ? splat(NOTHING) : key >= float(how.last) ? splat(NOTHING) : s;
        if (!whole || how.soft_cap != 0.0f || how.factor != 1.0f) store(scores + v * VF, s);
        most = s > most ? s : most;
    }
    const float here = largest(most);
    const float now = here > row.most ? here : row.most;
    const float kept = now == row.most ? 1.0f : exponential(splat(row.most - now))[0];
    vfloat sums = {};
    for (int v = from; v < to; v++) {
        const vfloat weight = exponential(load<vfloat>(scores + v * VF) - now);
        store(scores + v * VF, weight);
        sums += weight;
    }
    row.most = now;
    row.sums = multiply_add(row.sums, splat(kept), sums);
    if (kept != 1.0f)
        for (int64_t d = 0; d < width; d += VF) store(out + d, load<vfloat>(out + d) * kept);
}

// Merges a split's sums into those of the splits before it, always in ascending order of the keys. `total` is 0 before
// the first split; `out` is uninitialised then.
inline void join(float& most, float& total, float* out, float split_most, float split_total, const float* split_out,
                 int64_t width) {
    if (split_total == 0.0f) return;  // no key of the split is visible to the query
    if (total == 0.0f) {
        most = split_most, total = split_total;
        std::memcpy(out, split_out, width * sizeof(float));
        return;
    }
    const float now = split_most > most ? split_most : most;
    const float kept = exponential(splat(most - now))[0];
    const float added = exponential(splat(split_most - now))[0];
    most = now;
    total = total * kept + split_total * added;
    for (int64_t d = 0; d < width; d += VF)
        store(out + d, multiply_add(load<vfloat>(out + d), splat(kept), load<vfloat>(split_out + d) * added));
}

}  // namespace quire

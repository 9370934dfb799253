// One pass over a row of logits, from which the best token and the tokens near it are found without another full pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include "native/common.h"

namespace quire {

constexpr float NO_LOGIT = -std::numeric_limits<float>::infinity();

QUIRE_INLINE bool any_lane(vint mask) {
#if defined(__AVX512F__)
    if constexpr (VF == 16) return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
    if constexpr (VF == 8) {
        __m256i bits;
        std::memcpy(&bits, &mask, 32);
        return !_mm256_testz_si256(bits, bits);
    }
#endif
    int32_t found = 0;
    for (int i = 0; i < VF; i++) found |= mask[i];
    return found != 0;
}

// Loads minus infinity past the row's end.
QUIRE_INLINE vfloat load_logits(const float* from, long count) {
    if (count >= VF) return load<vfloat>(from);
    float lanes[VF];
    for (int i = 0; i < VF; i++) lanes[i] = i < count ? from[i] : NO_LOGIT;
    return load<vfloat>(lanes);
}

// A row's best logit, and the maximum of each lane of every block of SPAN vectors. At least k tokens reach the k-th best
// of these maxima, and a block whose maxima are all below a bound need not be read again.
class RowScan {
  public:
    static constexpr long SPAN = 64;
    static constexpr long BLOCK = SPAN * VF;

    void read(const float* row, long vocab) {
        row_ = row, vocab_ = vocab;
        maxima_.resize(size_t((vocab + BLOCK - 1) / BLOCK * VF));
        vint nan{};
        vfloat all = splat(NO_LOGIT);
        for (long start = 0, block = 0; start < vocab; start += BLOCK, block++) {
            vfloat most[4] = {splat(NO_LOGIT), splat(NO_LOGIT), splat(NO_LOGIT), splat(NO_LOGIT)};
            const long end = std::min(start + BLOCK, vocab);
            long i = start;
            for (; i + 4 * VF <= end; i += 4 * VF)
                for (int m = 0; m < 4; m++) take(load<vfloat>(row + i + m * VF), most[m], nan);
            for (; i < end; i += VF) take(load_logits(row + i, end - i), most[0], nan);
            const vfloat own = greater(greater(most[0], most[1]), greater(most[2], most[3]));
            store(maxima_.data() + block * VF, own);
            all = greater(own, all);
        }
        best = NO_LOGIT;
        for (int i = 0; i < VF; i++) best = std::max(best, all[i]);
        has_nan = any_lane(nan);
    }

    // True if the best logit is neither NaN nor infinite.
    bool usable() const { return !has_nan && best - best == 0.f; }

    // The first NaN if there is one, otherwise the first best token.
    long best_token() const {
        if (has_nan) {
            for (long i = 0; i < vocab_; i++)
                if (row_[i] != row_[i]) return i;
        }
        long found = 0;
        for_each_from(best, [&](long i) { return found = i, true; });
        return found;
    }

    // The k-th best of the maxima, or minus infinity if there are fewer.
    float reached_by(long k) {
        if (k > long(maxima_.size())) return NO_LOGIT;
        ranked_ = maxima_;
        std::nth_element(ranked_.begin(), ranked_.begin() + (k - 1), ranked_.end(), std::greater<float>());
        return ranked_[size_t(k - 1)];
    }

    // Calls visit(token) for each token whose logit is at least `bound`, ascending, until it returns true.
    template <class Visit>
    void for_each_from(float bound, Visit&& visit) const {
        for (long start = 0, block = 0; start < vocab_; start += BLOCK, block++) {
            if (!any_lane(load<vfloat>(maxima_.data() + block * VF) >= bound)) continue;
            const long end = std::min(start + BLOCK, vocab_);
            for (long i = start; i < end; i += VF) {
                if (!any_lane(load_logits(row_ + i, end - i) >= bound)) continue;
                for (long t = i; t < std::min(i + VF, end); t++)
                    if (row_[t] >= bound && visit(t)) return;
            }
        }
    }

    float best;
    bool has_nan;

  private:
    static QUIRE_INLINE vfloat greater(vfloat a, vfloat b) { return a > b ? a : b; }

    static QUIRE_INLINE void take(vfloat x, vfloat& most, vint& nan) {
        most = greater(x, most);
        nan |= x != x;
    }

    const float* row_;
    long vocab_;
    std::vector<float> maxima_, ranked_;
};

}  // namespace quire

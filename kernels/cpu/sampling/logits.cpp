// Functions over rows of logits besides sampling: checks for finite logits, and log probabilities.

#include <cmath>

#include "native/common.h"
#include "native/exp.h"
#include "native/pool.h"
#include "sampling/row_scan.h"

using namespace quire;

namespace {

// In logits: with fewer, waking other threads costs more than it saves.
constexpr long SCAN_THREADS_FROM = 1 << 17, LOGPROB_THREADS_FROM = 1 << 15;
constexpr long CHUNK = 1024;  // terms that are added in float32 per lane; chunks are added in float64

template <class Body>
void for_rows(long rows, long width, long threads_from, Body&& body) {
    parallel_runs(rows, rows * width > threads_from ? max_threads() : 1, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) body(row);
    });
}

double log_sum_exp(const float* row, long vocab, float best) {
    double sum = 0;
    for (long start = 0; start < vocab; start += CHUNK) {
        const long end = std::min(start + CHUNK, vocab);
        vfloat lanes{};
        for (long i = start; i < end; i += VF) lanes += exp_of(load_logits(row + i, end - i) - best);
        sum += sum_lanes(lanes);
    }
    return double(best) + std::log(sum);
}

long count_above(const float* row, long vocab, float value) {
    long above = 0;
    for (long start = 0; start < vocab; start += CHUNK) {
        const long end = std::min(start + CHUNK, vocab);
        vint lanes{};
        for (long i = start; i < end; i += VF) lanes -= load_logits(row + i, end - i) > value;
        for (int i = 0; i < VF; i++) above += lanes[i];
    }
    return above;
}

// Ascending order of keys: the higher logit first, of equal ones the lower token.
uint64_t key_of(float x, long token) {
    int32_t bits;
    x += 0.f;  // turns -0 into +0, so that both rank equal
    std::memcpy(&bits, &x, 4);
    const int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    return uint64_t(0x7fffffffu - uint32_t(ordered)) << 32 | uint64_t(token);
}

// Scratch memory of one thread, reused for every row.
struct Ranking {
    RowScan scan;
    std::vector<uint64_t> keys;

    // The `count` best tokens, padded with token 0 if NaNs hide some of them.
    void best(const float* row, long count, int64_t* tokens) {
        keys.clear();
        scan.for_each_from(scan.reached_by(count), [&](long token) {
            keys.push_back(key_of(row[token], token));
            return false;
        });
        const long there = std::min(count, long(keys.size()));
        std::partial_sort(keys.begin(), keys.begin() + there, keys.end());
        for (long i = 0; i < count; i++) tokens[i] = i < there ? int64_t(uint32_t(keys[size_t(i)])) : 0;
    }
};

}  // namespace

// bad[r]: whether row r's best logit is not finite.
QUIRE_API void quire_bad_rows(const float* logits, long stride, long rows, long vocab, uint8_t* bad) {
    for_rows(rows, vocab, SCAN_THREADS_FROM, [&](int64_t row) {
        static thread_local RowScan scan;
        scan.read(logits + row * stride, vocab);
        bad[row] = !scan.usable();
    });
}

// ids and values: [rows][1 + n]: each row's given token, then its n best tokens, n <= vocab. ranks: 1 plus the number of
// logits above the given token's. The value of a given token out of range is NaN.
QUIRE_API void quire_top_logprobs(const float* logits, long stride, long rows, long vocab, const int64_t* given, long n,
                                  int64_t* ids, float* values, int64_t* ranks) {
    for_rows(rows, vocab, LOGPROB_THREADS_FROM, [&](int64_t r) {
        static thread_local Ranking ranking;
        const float* row = logits + r * stride;
        int64_t* own_ids = ids + r * (n + 1);
        ranking.scan.read(row, vocab);
        own_ids[0] = given[r];
        if (n > 0) ranking.best(row, n, own_ids + 1);
        const double all = log_sum_exp(row, vocab, ranking.scan.best);
        const bool exists = given[r] >= 0 && given[r] < vocab;
        const float own = exists ? row[given[r]] : std::numeric_limits<float>::quiet_NaN();
        values[r * (n + 1)] = float(double(own) - all);
        for (long i = 1; i <= n; i++) values[r * (n + 1) + i] = float(double(row[own_ids[i]]) - all);
        ranks[r] = 1 + count_above(row, vocab, own);
    });
}

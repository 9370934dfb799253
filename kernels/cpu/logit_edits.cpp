// Edits of logits in place: penalties and bitmasks. One pass per row, rows shared among threads; a row's bits depend on
// that row alone.

#include <limits>
#include <vector>

#include "common.h"
#include "pool.h"
#include "row_scan.h"

using namespace quire;

namespace {

// Logits; with fewer, waking the other threads costs more than they save.
constexpr long EDIT_THREADS_FROM = 1 << 17;
constexpr int32_t PROMPT_BIT = 1 << 30, COUNT_MASK = PROMPT_BIT - 1;  // as in kernels/penalties.py

template <class Body>
void for_rows(long rows, long width, Body&& body) {
    parallel_runs(rows, rows * width > EDIT_THREADS_FROM ? max_threads() : 1, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) body(row);
    });
}

struct Penalty {
    float repetition, frequency, presence;

    QUIRE_INLINE float operator()(float x, int32_t held, int32_t more) const {
        const int32_t answer = (held & COUNT_MASK) + more;
        if ((held & PROMPT_BIT) || answer > 0) x = x > 0.f ? x / repetition : x * repetition;
        return answer > 0 ? x - (frequency * float(answer) + presence) : x;
    }
};

// Most counts are 0: their logits are not even read.
void penalise(float* logits, const int32_t* counts, long vocab, const Penalty& penalty) {
    constexpr long BLOCK = 4 * VF;
    long i = 0;
    for (; i + BLOCK <= vocab; i += BLOCK) {
        vint found{};
        for (int v = 0; v < 4; v++) found |= load<vint>(counts + i + v * VF);
        if (!any_lane(found)) continue;
        for (long t = i; t < i + BLOCK; t++)
            if (counts[t] != 0) logits[t] = penalty(logits[t], counts[t], 0);
    }
    for (; i < vocab; i++) logits[i] = penalty(logits[i], counts[i], 0);
}

// Drafts before this position are part of its answer, though not counted yet: their logits are worked out apart.
void penalise_after(float* logits, const int32_t* counts, long vocab, const Penalty& penalty, const int64_t* drafts,
                    long num_drafts) {
    std::vector<float> originals;
    for (long d = 0; d < num_drafts; d++)
        originals.push_back(drafts[d] >= 0 && drafts[d] < vocab ? logits[drafts[d]] : 0.f);
    penalise(logits, counts, vocab, penalty);
    for (long d = 0; d < num_drafts; d++) {
        if (drafts[d] < 0 || drafts[d] >= vocab) continue;
        int32_t more = 0;
        for (long other = 0; other < num_drafts; other++) more += drafts[other] == drafts[d];
        logits[drafts[d]] = penalty(originals[d], counts[drafts[d]], more);
    }
}

// The 32 tokens of one word, or as many as the vocabulary has.
QUIRE_INLINE void mask_word(float* logits, uint32_t word, long count) {
    constexpr float FORBIDDEN = -std::numeric_limits<float>::infinity();
    if (word == 0xffffffffu) return;
    if (count < 32) {
        for (long t = 0; t < count; t++)
            if (!(word >> t & 1)) logits[t] = FORBIDDEN;
        return;
    }
    vuint shifts;
    for (int lane = 0; lane < VF; lane++) shifts[lane] = lane;
    for (int t = 0; t < 32; t += VF) {
        const vuint bit = ((vuint{} + word) >> (shifts + uint32_t(t))) & 1u;
        store(logits + t, bit != 0u ? load<vfloat>(logits + t) : splat(FORBIDDEN));
    }
}

}  // namespace

struct PenaltyCall {
    float* logits;
    long logits_stride;
    const int64_t* slots;
    const int32_t* counts;
    long counts_stride, num_slots;
    const float *repetition, *frequency, *presence;
    const int64_t *offsets, *drafts;
    long num_positions, vocab;
};

QUIRE_API void quire_penalties(const PenaltyCall* given) {
    const PenaltyCall call = *given;
    for_rows(call.num_positions, call.vocab, [&](int64_t p) {
        const int64_t slot = call.slots[p];
        if (slot < 0 || slot >= call.num_slots) return;
        const Penalty penalty{call.repetition[p], call.frequency[p], call.presence[p]};
        float* logits = call.logits + p * call.logits_stride;
        const int32_t* counts = call.counts + slot * call.counts_stride;
        const int64_t before = call.offsets[p];
        if (before > 0)
            penalise_after(logits, counts, call.vocab, penalty, call.drafts + p - before, before);
        else
            penalise(logits, counts, call.vocab, penalty);
    });
}

// words: [num_masks][num_words]; rows[m] is the row of logits that mask m is for.
QUIRE_API void quire_bitmask(float* logits, long stride, long num_rows, long vocab, const int64_t* rows,
                             const uint32_t* words, long words_stride, long num_words, long num_masks) {
    for_rows(num_masks, vocab, [&](int64_t m) {
        if (rows[m] < 0 || rows[m] >= num_rows) return;
        float* own = logits + rows[m] * stride;
        for (long word = 0; word * 32 < vocab; word++) {
            const uint32_t bits = word < num_words ? words[m * words_stride + word] : 0;
            mask_word(own + word * 32, bits, vocab - word * 32);
        }
    });
}

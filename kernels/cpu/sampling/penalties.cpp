// Penalties from lists of counts: a row's cost follows its number of distinct tokens, not the vocabulary size. Rows are
// divided among threads; a row's bits depend on that row alone.

#include <vector>

#include "native/common.h"
#include "native/pool.h"

using namespace quire;

namespace {

// In listed tokens: with fewer, waking other threads costs more than it saves.
constexpr long PENALTY_THREADS_FROM = 1 << 13;
constexpr int32_t PROMPT_BIT = 1 << 30, COUNT_MASK = PROMPT_BIT - 1;  // as in kernels/sampling/penalties.py

// As ListedCounts in penalties.py.
struct Counts {
    int32_t* lengths;          // [num_slots]
    int32_t *tokens, *held;    // [num_slots][room]: the first `length` elements are valid, in order of insertion
    int32_t* places;           // [num_slots][vocab]: 1 + the token's index in the list, or 0
    long num_slots, room, vocab;

    bool has(int64_t slot) const { return slot >= 0 && slot < num_slots; }
    bool knows(int64_t token) const { return token >= 0 && token < vocab; }

    // Reference to the token's count; appends the token to the list if necessary.
    int32_t& listed(int64_t slot, int64_t token) {
        int32_t& place = places[slot * vocab + token];
        if (place == 0) {
            const int32_t last = lengths[slot]++;
            tokens[slot * room + last] = int32_t(token);
            held[slot * room + last] = 0;
            place = last + 1;
        }
        return held[slot * room + place - 1];
    }

    int32_t held_of(int64_t slot, int64_t token) const {
        const int32_t place = places[slot * vocab + token];
        return place == 0 ? 0 : held[slot * room + place - 1];
    }
};

struct Penalty {
    float repetition, frequency, presence;

    // No branches: the sign of a logit is unpredictable, and a misprediction waits for memory.
    QUIRE_INLINE vfloat operator()(vfloat x, vint held, vint more) const {
        const vint answer = (held & COUNT_MASK) + more;
        const vfloat repeated = x > 0.f ? x / repetition : x * repetition;
        const vint in_prompt = held & PROMPT_BIT;
        x = (in_prompt | answer) != 0 ? repeated : x;
        return answer > 0 ? x - (frequency * __builtin_convertvector(answer, vfloat) + presence) : x;
    }
};

// Penalises the logits of `count` listed tokens, at most VF, at arbitrary addresses.
QUIRE_INLINE void penalise_some(float* logits, const int32_t* tokens, const int32_t* held, long count,
                                const Penalty& penalty) {
    float lanes[VF] = {};
    int32_t own[VF] = {};
    for (long lane = 0; lane < count; lane++) lanes[lane] = logits[tokens[lane]], own[lane] = held[lane];
    store(lanes, penalty(load<vfloat>(lanes), load<vint>(own), vint{}));
    for (long lane = 0; lane < count; lane++) logits[tokens[lane]] = lanes[lane];
}

void penalise(float* logits, const Counts& counts, int64_t slot, const Penalty& penalty) {
    const int32_t *tokens = counts.tokens + slot * counts.room, *held = counts.held + slot * counts.room;
    const long length = counts.lengths[slot];
    long i = 0;
    for (; i + VF <= length; i += VF) penalise_some(logits, tokens + i, held + i, VF, penalty);
    penalise_some(logits, tokens + i, held + i, length - i, penalty);
}

// Drafts before this position belong to its output but are not counted yet: their logits are computed separately.
void penalise_after(float* logits, const Counts& counts, int64_t slot, const Penalty& penalty, const int64_t* drafts,
                    long num_drafts) {
    std::vector<float> originals;
    for (long d = 0; d < num_drafts; d++) originals.push_back(counts.knows(drafts[d]) ? logits[drafts[d]] : 0.f);
    penalise(logits, counts, slot, penalty);
    for (long d = 0; d < num_drafts; d++) {
        if (!counts.knows(drafts[d])) continue;
        int32_t more = 0;
        for (long other = 0; other < num_drafts; other++) more += drafts[other] == drafts[d];
        const vint held = vint{} + counts.held_of(slot, drafts[d]);
        logits[drafts[d]] = penalty(splat(originals[size_t(d)]), held, vint{} + more)[0];
    }
}

}  // namespace

// Sequential, because a token may occur several times. The lists must have room for all tokens.
QUIRE_API void quire_count_tokens(Counts* given, const int64_t* slots, const int64_t* tokens, long num_tokens,
                                  int are_of_prompt) {
    Counts& counts = *given;
    for (long i = 0; i < num_tokens; i++) {
        if (!counts.has(slots[i]) || !counts.knows(tokens[i])) continue;
        int32_t& held = counts.listed(slots[i], tokens[i]);
        held = are_of_prompt ? held | PROMPT_BIT : held + 1;
    }
}

struct PenaltyCall {
    const Counts* counts;
    float* logits;
    long logits_stride;
    const int64_t* slots;
    const float *repetition, *frequency, *presence;
    const int64_t *offsets, *drafts;
    long num_positions;
};

QUIRE_API void quire_penalties(const PenaltyCall* given) {
    const PenaltyCall call = *given;
    const Counts counts = *call.counts;
    long num_listed = 0;
    for (long p = 0; p < call.num_positions; p++)
        if (counts.has(call.slots[p])) num_listed += counts.lengths[call.slots[p]];
    const int threads = num_listed > PENALTY_THREADS_FROM ? max_threads() : 1;
    parallel_runs(call.num_positions, threads, [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; p++) {
            const int64_t slot = call.slots[p], before = call.offsets[p];
            if (!counts.has(slot)) continue;
            const Penalty penalty{call.repetition[p], call.frequency[p], call.presence[p]};
            float* logits = call.logits + p * call.logits_stride;
            if (before > 0)
                penalise_after(logits, counts, slot, penalty, call.drafts + p - before, before);
            else
                penalise(logits, counts, slot, penalty);
        }
    });
}

// Applies bitmasks to logits in place: one pass per row, rows divided among threads. A row's bits depend on it alone.

#include <limits>

#include "native/common.h"
#include "native/pool.h"

using namespace quire;

namespace {

// In logits: with fewer, waking other threads costs more than it saves.
constexpr long EDIT_THREADS_FROM = 1 << 17;

template <class Body>
void for_rows(long rows, long width, Body&& body) {
    parallel_runs(rows, rows * width > EDIT_THREADS_FROM ? max_threads() : 1, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) body(row);
    });
}

// Applies one word to its 32 tokens, or as many as the vocabulary has.
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

// words: [num_masks][num_words]; rows[m] is the row of logits of mask m.
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

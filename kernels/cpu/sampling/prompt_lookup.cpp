// Finds an earlier match of a text's last tokens, and the tokens after it.

#include <algorithm>

#include "native/common.h"
#include "native/pool.h"

using namespace quire;

namespace {

constexpr long BLOCK = 64;  // tokens that are compared at a time: most blocks have no candidate
constexpr long THREADS_FROM = 1 << 18;

// Number of tokens before index `end` that equal the text's last tokens, at most `most`.
long matched(const int32_t* text, long length, long end, long most) {
    long count = 0;
    most = std::min(most, end);
    while (count < most && text[end - 1 - count] == text[length - 1 - count]) count++;
    return count;
}

// Index after the latest of the longest earlier runs of the `least` to `most` last tokens, or 0 without a match.
long newest_longest(const int32_t* text, long length, long least, long most) {
    const int32_t last = text[length - 1];
    long found = 0, best = least - 1;
    for (long high = length - 1; high > 0 && best < most; high -= BLOCK) {
        const long low = std::max(high - BLOCK, 0L);
        int any = 0;
        for (long i = low; i < high; i++) any |= text[i] == last;
        if (!any) continue;
        for (long end = high; end > low && best < most; end--) {
            if (text[end - 1] != last) continue;
            const long count = matched(text, length, end, most);
            if (count > best) best = count, found = end;
        }
    }
    return found;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void quire_prompt_lookup(
    const int32_t* texts, long stride, const int32_t* lengths, const int64_t* rows, long num_rows, long least,
    long most, long num_drafts, int32_t* drafts, bool* found) {
    const bool many = num_rows > 1 && num_rows * stride > THREADS_FROM;
    parallel_runs(num_rows, many ? max_threads() : 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int32_t* text = texts + rows[i] * stride;
            const long length = lengths[rows[i]];
            const long place = newest_longest(text, length, least, most);
            found[i] = place > 0;
            for (long j = 0; j < num_drafts && place; j++)
                drafts[i * num_drafts + j] = text[place + j % (length - place)];
        }
    });
}

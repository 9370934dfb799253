// Pages of KV blocks: their header, and the copy of a block with its tag, which is computed as the bytes pass.
#pragma once

#include <algorithm>
#include <cstddef>

#include "native/common.h"
#include "pages/xxh3.h"

namespace quire::pages {

// The parts of a block in the tensors of its KV group: part i of block b is at bases[i] + b * span.
struct Group {
    char* const* bases;
    int64_t count, span;
    uint8_t layout[16];
};

struct Header {
    char magic[8];
    uint8_t layout[16];
    int64_t bytes, generation;
    int32_t key_bytes;
    uint8_t key[196];
    uint8_t tag[16];
};
constexpr int64_t HEADER = sizeof(Header), TAGGED = offsetof(Header, tag);
static_assert(HEADER == 256 && TAGGED == 240);
constexpr char MAGIC[] = {'Q', 'U', 'I', 'R', 'E', 'K', 'V', '1'};

// As in page_moves.py. The last three: pages that memory or the file does not have.
enum Outcome : uint8_t {
    DONE,
    NO_PAGE,
    OTHER_LAYOUT,
    OTHER_GENERATION,
    OTHER_KEY,
    OTHER_TAG,
    NO_MEMORY,
    FILE_ENDS,
    FILE_ERROR
};

// Whether another thread has set the flag, if there is one.
inline bool stops(const int64_t* flag) { return flag && __atomic_load_n(flag, __ATOMIC_RELAXED); }

constexpr int64_t MEMORY_PAGE = 4096;

// Spans of whole stripes: from register to register.
template <bool Load, bool Streamed, bool Tagged>
void copy_spans(xxh3::Tag<Tagged>& tag, const Group& group, int64_t block, char* page) {
    for (int64_t i = 0; i < group.count; i++) {
        char *span = group.bases[i] + block * group.span, *part = page + i * group.span;
        char* next = i + 1 < group.count ? group.bases[i + 1] + block * group.span : span;
        for (int64_t at = 0; at < group.span; at += MEMORY_PAGE) {  // translates the addresses of the next span
            __builtin_prefetch(next + at);
            __builtin_prefetch(part + group.span + at);
        }
        char *to = Load ? span : part, *from = Load ? part : span;
        tag.template copy<Streamed>(to, from, group.span, Load ? part + group.span : next);
    }
}

// Copies between a buffer and the bytes from `at` on of all spans in a row.
template <bool ToSpans>
void spread(const Group& group, int64_t block, int64_t at, char* buffer, int64_t bytes) {
    while (bytes) {
        const int64_t inside = at % group.span, some = std::min(bytes, group.span - inside);
        char* span = group.bases[at / group.span] + block * group.span + inside;
        std::memcpy(ToSpans ? span : buffer, ToSpans ? buffer : span, some);
        buffer += some, at += some, bytes -= some;
    }
}

// Spans of any length: a stripe may lie in several. Writes the last bytes, fewer than a stripe, to `rest` too.
template <bool Load, bool Tagged>
int64_t copy_pieces(xxh3::Tag<Tagged>& tag, const Group& group, int64_t block, char* page, char* rest) {
    const int64_t total = group.count * group.span, whole = total / xxh3::STRIPE * xxh3::STRIPE, left = total - whole;
    char buffer[xxh3::BLOCK];
    for (int64_t at = 0; at < whole; at += xxh3::BLOCK) {
        const int64_t bytes = std::min(whole - at, xxh3::BLOCK);
        if (!Load) spread<false>(group, block, at, buffer, bytes);
        char *to = Load ? buffer : page + at, *from = Load ? page + at : buffer;
        tag.template copy<false>(to, from, bytes, Load ? from + bytes : buffer);
        if (Load) spread<true>(group, block, at, buffer, bytes);
    }
    if (Load) {
        std::memcpy(rest, page + whole, left);
        asm volatile("" : : : "memory");  // loaded once, like the stripes
        spread<true>(group, block, whole, rest, left);
    } else {
        spread<false>(group, block, whole, rest, left);
        std::memcpy(page + whole, rest, left);
    }
    return left;
}

// Copies a block's bytes, and computes the tag of these bytes followed by the header; if not `Tagged`, only copies.
// `Cached`: the copy is read soon.
template <bool Load, bool Tagged = true, bool Cached = false>
void copy(const Group& group, int64_t block, char* page, const Header& header, uint8_t computed[16]) {
    xxh3::Tag<Tagged> tag;
    char last[xxh3::STRIPE + TAGGED];
    int64_t rest = 0;
    bool aligned = !Cached && (Load || uintptr_t(page) % xxh3::WIDTH == 0);
    for (int64_t i = 0; Load && i < group.count; i++) aligned &= uintptr_t(group.bases[i]) % xxh3::WIDTH == 0;
    if (group.span % xxh3::STRIPE)
        rest = copy_pieces<Load, Tagged>(tag, group, block, page, last);
    else if (aligned)
        copy_spans<Load, true, Tagged>(tag, group, block, page);
    else
        copy_spans<Load, false, Tagged>(tag, group, block, page);
    if (!Tagged) return;
    std::memcpy(last + rest, &header, TAGGED);
    tag.finish(last, rest + TAGGED, computed);
}

inline Outcome compare(const Header& found, const Header& wanted) {
    if (std::memcmp(found.magic, wanted.magic, sizeof found.magic)) return NO_PAGE;
    if (std::memcmp(found.layout, wanted.layout, sizeof found.layout) || found.bytes != wanted.bytes)
        return OTHER_LAYOUT;
    if (found.generation != wanted.generation) return OTHER_GENERATION;
    if (found.key_bytes != wanted.key_bytes || std::memcmp(found.key, wanted.key, sizeof found.key)) return OTHER_KEY;
    return DONE;
}

inline Header header_of(const Group& group, int64_t generation, const uint8_t* key, int64_t key_bytes) {
    Header header = {};
    std::memcpy(header.magic, MAGIC, sizeof MAGIC);
    std::memcpy(header.layout, group.layout, sizeof header.layout);
    header.bytes = group.count * group.span;
    header.generation = generation, header.key_bytes = int32_t(key_bytes);
    std::memcpy(header.key, key, key_bytes);
    return header;
}

// Copies a page to a block of `group`; `found` is its header. If not `tagged`, does not compare the tag.
template <bool Cached = false>
Outcome load(const Group& group, int64_t block, char* page, Header wanted, bool tagged, Header& found) {
    std::memcpy(&found, page, HEADER);
    asm volatile("" : : : "memory");  // loaded once, like the data
    const Outcome outcome = compare(found, wanted);
    if (outcome != DONE) return outcome;
    if (!tagged) {
        copy<true, false, Cached>(group, block, page + HEADER, wanted, wanted.tag);
        return DONE;
    }
    copy<true, true, Cached>(group, block, page + HEADER, wanted, wanted.tag);
    return std::memcmp(found.tag, wanted.tag, sizeof found.tag) ? OTHER_TAG : DONE;
}

template <bool Cached = false>
void store(const Group& group, int64_t block, char* page, Header header) {
    copy<false, true, Cached>(group, block, page + HEADER, header, header.tag);
    xxh3::fence();  // a page is complete when its header is
    std::memcpy(page, &header, HEADER);
}

}  // namespace quire::pages

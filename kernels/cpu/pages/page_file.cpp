// Copies KV blocks, and pages of host memory, to pages of a file, and pages of a file to blocks.
//
// A page is read or written as a whole, in memory of the calling thread that suits direct I/O. Threads that share a
// call's work claim its pages one by one.

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "pages/page_moves.h"

using namespace quire;
using namespace quire::pages;

namespace {

// Work that threads share: `claimed` is the index of the next page that no thread has claimed.
struct Work {
    const int32_t *blocks, *pages;
    const int64_t* generations;
    const int32_t* group_of;
    const uint8_t* keys;
    int64_t key_bytes, count;
    int64_t* claimed;
    uint8_t* outcomes;
    int32_t* errors;  // errno of a FILE_ERROR
};

enum Kind : int64_t { STORE, LOAD, DEMOTE };  // as in MoveKind

constexpr int64_t SECTOR = 4096;

// Relaxed, because threads only need different pages: the pages themselves are ready before the threads start.
int64_t next(int64_t* claimed) { return __atomic_fetch_add(claimed, 1, __ATOMIC_RELAXED); }

// Bytes of a group's page that have a meaning, in whole sectors.
int64_t used_bytes(const Group& group) { return (HEADER + group.count * group.span + SECTOR - 1) / SECTOR * SECTOR; }

// Reads or writes all bytes.
template <bool Read>
Outcome transfer(int fd, char* memory, int64_t bytes, int64_t offset, int32_t& error) {
    if (!Read) {  // would otherwise extend a file that was truncated
        struct stat found;
        if (!fstat(fd, &found) && found.st_size < offset + bytes) return FILE_ENDS;
    }
    for (int64_t done = 0; done < bytes;) {
        const int64_t some = Read ? pread(fd, memory + done, bytes - done, offset + done)
                                  : pwrite(fd, memory + done, bytes - done, offset + done);
        if (some < 0 && errno == EINTR) continue;
        if (some < 0) {
            error = errno;
            return FILE_ERROR;
        }
        done += some;
        if (done < bytes && (!some || done % SECTOR)) return FILE_ENDS;
    }
    return DONE;
}

// An access to blocks and memory: not allowed after guard[0] was set. guard[1] counts the threads that have one.
struct Access {
    int64_t* guard;
    explicit Access(int64_t* guard) : guard(guard) { __atomic_fetch_add(guard + 1, 1, __ATOMIC_SEQ_CST); }
    ~Access() { __atomic_fetch_sub(guard + 1, 1, __ATOMIC_SEQ_CST); }
    bool allowed() const { return !__atomic_load_n(guard, __ATOMIC_SEQ_CST); }
};

// Copies a block or a page of memory to `staging`.
Outcome fill(Kind kind, const Group& group, int64_t block, const Header& wanted, bool tagged, const char* memory,
             int64_t page_bytes, int64_t memory_pages, char* staging, int64_t* guard) {
    const Access access(guard);
    if (!access.allowed()) return FILE_ERROR;
    if (kind == STORE) {
        store<true>(group, block, staging, wanted);
    } else {
        Header found;
        if (block >= memory_pages) return NO_MEMORY;
        char* data = staging + HEADER;
        Group copied = {&data, 1, group.count * group.span, {}};
        std::memcpy(copied.layout, group.layout, sizeof group.layout);
        char* page = const_cast<char*>(memory) + block * page_bytes;
        const Outcome outcome = load<true>(copied, 0, page, wanted, tagged, found);
        if (outcome != DONE) return outcome;
        std::memcpy(staging, &found, HEADER);
    }
    return DONE;
}

Outcome move(Kind kind, const Group& group, int64_t block, const Header& wanted, bool tagged, int fd, int64_t offset,
             const char* memory, int64_t page_bytes, int64_t memory_pages, char* staging, int64_t* guard,
             int32_t& error) {
    const int64_t bytes = used_bytes(group);
    if (kind == LOAD) {
        const Outcome outcome = transfer<true>(fd, staging, bytes, offset, error);
        const Access access(guard);
        if (outcome != DONE || !access.allowed()) return outcome == DONE ? FILE_ERROR : outcome;
        Header found;
        // The tag is compared in any case: a write may have been interrupted before this process began.
        return load(group, block, staging, wanted, true, found);
    }
    const Outcome outcome =
        fill(kind, group, block, wanted, tagged, memory, page_bytes, memory_pages, staging, guard);
    if (outcome != DONE) return outcome;
    const int64_t meant = HEADER + group.count * group.span;
    std::memset(staging + meant, 0, bytes - meant);
    xxh3::fence();
    return transfer<false>(fd, staging, bytes, offset, error);
}

}  // namespace

// Moves pages that no thread has claimed, until none is left or another thread sets `stop`. `memory`: host memory with `memory_pages` pages, the sources
// of demotions, whose tags are compared if `tagged`. `staging`: room for a page, aligned to a sector. `guard`: as in
// Access; pages without it fail.
QUIRE_API void quire_move_file(int64_t kind, const Group* groups, const Work* work, const int64_t* stop, int64_t fd,
                               int64_t page_bytes, const char* memory, int64_t memory_pages, int64_t tagged,
                               char* staging, int64_t* guard) {
    for (int64_t i; !stops(stop) && (i = next(work->claimed)) < work->count;) {
        const Group& group = groups[work->group_of[i]];
        const Header wanted =
            header_of(group, work->generations[i], work->keys + i * work->key_bytes, work->key_bytes);
        work->outcomes[i] = move(Kind(kind), group, work->blocks[i], wanted, tagged, int(fd),
                                 work->pages[i] * page_bytes, memory, page_bytes, memory_pages, staging,
                                 guard, work->errors[i]);
    }
    xxh3::fence();
}

// Reads the headers of the pages that no thread has claimed. `group_of`: the group of a page whose layout is that of a
// group, with a key of `key_bytes` and a generation above `forgotten`; others are not changed. `staging`: a sector.
QUIRE_API void quire_scan_file(const Group* groups, int64_t num_groups, int64_t fd, int64_t page_bytes, int64_t count,
                               int64_t* claimed, int64_t key_bytes, int64_t forgotten, int32_t* group_of,
                               int64_t* generations, uint8_t* keys, char* staging) {
    for (int64_t page; (page = next(claimed)) < count;) {
        int32_t error;
        if (transfer<true>(int(fd), staging, SECTOR, page * page_bytes, error) != DONE) continue;
        Header found;
        std::memcpy(&found, staging, HEADER);
        if (found.generation <= forgotten || found.key_bytes != key_bytes) continue;
        for (int64_t group = 0; group < num_groups; group++) {
            const Header wanted = header_of(groups[group], found.generation, found.key, key_bytes);
            if (compare(found, wanted) != DONE) continue;
            group_of[page] = int32_t(group), generations[page] = found.generation;
            std::memcpy(keys + page * key_bytes, found.key, key_bytes);
            break;
        }
    }
}

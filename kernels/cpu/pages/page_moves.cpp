// Copies KV blocks to pages of host memory and back.
//
// A call computes in the caller's thread, beside the threads of the forward pass.

#include "pages/page_moves.h"

using namespace quire;

// `tagged`: loads compare the tag. `group_of`, `outcomes`: one per block; `keys`: `key_bytes` per block. Returns the
// number of blocks that were moved: fewer than `count` when another thread has set `stop`.
QUIRE_API int64_t quire_move_blocks(int64_t is_load, int64_t tagged, const int64_t* stop, const pages::Group* groups, char* memory,
                                 int64_t page_bytes, int64_t count, const int32_t* blocks, const int32_t* page_ids,
                                 const int64_t* generations, const int32_t* group_of, const uint8_t* keys,
                                 int64_t key_bytes, uint8_t* outcomes) {
    int64_t i = 0;
    for (; i < count && !pages::stops(stop); i++) {
        const pages::Group& group = groups[group_of[i]];
        char* page = memory + page_ids[i] * page_bytes;
        const pages::Header header = pages::header_of(group, generations[i], keys + i * key_bytes, key_bytes);
        pages::Header found;
        outcomes[i] = pages::DONE;
        if (is_load)
            outcomes[i] = pages::load(group, blocks[i], page, header, tagged, found);
        else
            pages::store(group, blocks[i], page, header);
    }
    xxh3::fence();
    return i;
}

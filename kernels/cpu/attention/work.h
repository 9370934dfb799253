// How the attention of a step is divided into items, which threads take one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/structs.h"
#include "attention/tile.h"

namespace quire {

constexpr int64_t SPLIT = 4 * TILE;      // keys that are never divided among items
constexpr int64_t BLOCK_ROWS = 64;       // approximate query rows of an item
constexpr int64_t SHARED_ROWS = 256;     // the same of an item over a shared prefix: its keys are prepared once for more
constexpr int64_t ITEMS_PER_THREAD = 4;  // minimum, if there are enough keys: balances rows of different length

// Some tokens and the keys of one head, or only some splits of these keys. In the latter case `partial` is the index of
// the result to be merged.
struct Item {
    int64_t row, token, count, position, head;
    int64_t first_split, last_split, partial;
    bool shared;    // over the keys before `position` that several rows share; `token` is an index into Call::sharing
    int64_t state;  // index into Call::sharing of the first token, whose queries' sums a shared item keeps; -1: none
};

struct Call {
    char* out;
    const char* query;
    int64_t token_stride, head_stride;  // query strides, in elements
    const char* cache;
    const QuireStep* step;
    const QuireLayer* layer;
    std::vector<int32_t> sharing;   // tokens of shared items
    float* states = nullptr;        // merged sums of their queries over the shared keys: [sharing, num_heads, out_width + 2]
    std::atomic<int64_t> error{0};

    int64_t group() const { return layer->num_heads / layer->num_kv_heads; }
    int64_t width() const { return padded(layer->key_dim); }
    int64_t value_dim() const { return layer->value_dim ? layer->value_dim : layer->head_dim; }
    int64_t out_width() const { return padded(value_dim()); }
    int64_t block_tokens() const { return std::max<int64_t>(1, BLOCK_ROWS / group()); }
    // Tokens of an item over a shared prefix: fewer if threads would wait for others.
    int64_t shared_tokens(int threads) const {
        const int64_t fair = step->num_tokens * layer->num_kv_heads / (threads * ITEMS_PER_THREAD);
        return std::clamp(fair, block_tokens(), std::max<int64_t>(1, SHARED_ROWS / group()));
    }
    // First key visible to a query.
    int64_t first_key(int64_t position) const {
        if (step->chunk) return position / step->chunk * step->chunk;
        return step->window ? std::max<int64_t>(position - step->window + 1, 0) : 0;
    }
    // Last key visible to a token of the step.
    int64_t last_key(int64_t token, int64_t position) const { return step->last_keys ? step->last_keys[token] : position; }
    // Splits that a row shares with others; the rest of a prefix is computed with the row's own keys. Rows that fill an
    // item alone share nothing: they would gain nothing, and each token's state needs memory.
    int64_t shared_splits(int64_t row) const {
        if (step->num_prefixes == 0 || step->prefix_of_row[row] < 0) return 0;
        if (step->query_start_loc[row + 1] - step->query_start_loc[row] >= block_tokens()) return 0;
        return step->prefix_lens[step->prefix_of_row[row]] / SPLIT;
    }
};

// Items that can be computed at the same time. Items whose keys are divided among several are also in `joints`.
struct Work {
    std::vector<Item> items, joints;
    int64_t partials = 0, block = 0;  // partial results; most tokens of an item

    // Each row's tokens over its own keys: all that it sees, less the shared ones. `states`: from plan_prefixes.
    void plan_rows(Call& call, int threads, const std::vector<int64_t>& states) {
        const QuireStep& step = *call.step;
        whole_.clear(), block = call.block_tokens();
        for (int64_t row = 0; row < step.num_rows; row++) {
            const int64_t start = step.query_start_loc[row], end = step.query_start_loc[row + 1];
            const int64_t length = step.seq_lens[row], context = length - (end - start);
            const int64_t shared = call.shared_splits(row);
            if (context < shared * SPLIT || length > step.table_width * step.block_size || end > step.num_tokens ||
                (end > start && call.last_key(end - 1, length - 1) >= length)) {
                call.error = BAD_LENGTH;
                continue;
            }
            add(call, Item{row, start, 0, context, 0, shared, 0, -1, false, shared ? states[row] : -1}, end - start);
        }
        divide(threads);
    }

    // The tokens of all rows that share a prefix, over its keys; fills Call::sharing, and each row's place in it.
    void plan_prefixes(Call& call, int threads, std::vector<int64_t>& states) {
        const QuireStep& step = *call.step;
        std::vector<int32_t>& sharing = call.sharing;
        whole_.clear(), sharing.clear(), block = call.shared_tokens(threads), states.resize(step.num_rows);
        for (int64_t prefix = 0; prefix < step.num_prefixes; prefix++) {
            const int64_t first = int64_t(sharing.size());
            int64_t reader = -1;
            for (int64_t row = 0; row < step.num_rows; row++) {
                if (step.prefix_of_row[row] != prefix || call.shared_splits(row) == 0) continue;
                states[row] = int64_t(sharing.size());
                for (int32_t token = step.query_start_loc[row]; token < step.query_start_loc[row + 1]; token++)
                    sharing.push_back(token);
                reader = row;
            }
            const int64_t splits = reader < 0 ? 0 : call.shared_splits(reader);
            const Item item{reader, first, 0, splits * SPLIT, 0, 0, splits, -1, true, first};
            add(call, item, int64_t(sharing.size()) - first);
        }
        divide(threads);
    }

  private:
    // Adds the item of each head and of each block of the `count` tokens that begin at the one of `item`.
    void add(const Call& call, const Item& item, int64_t count) {
        for (int64_t at = 0; at < count; at += block)
            for (int64_t head = 0; head < call.layer->num_kv_heads; head++) {
                Item part = item;
                part.token += at, part.count = std::min(block, count - at), part.head = head;
                if (item.state >= 0) part.state += at;
                if (!item.shared) {
                    part.position += at;
                    part.first_split = std::max(item.first_split, call.first_key(part.position) / SPLIT);
                    part.last_split = call.last_key(part.token + part.count - 1, part.position + part.count - 1) / SPLIT + 1;
                }
                whole_.push_back(part);
            }
    }

    void divide(int threads) {
        items.clear(), joints.clear(), partials = 0;
        int64_t splits = 0;
        for (const Item& item : whole_) splits += item.last_split - item.first_split;
        const int64_t most = std::max<int64_t>(1, splits / (threads * ITEMS_PER_THREAD));
        for (Item& item : whole_) {
            const int64_t count = item.last_split - item.first_split;
            if (threads == 1 || count <= most) {
                items.push_back(item);
                continue;
            }
            item.partial = partials;
            joints.push_back(item);
            const int64_t pieces = (count + most - 1) / most;
            for (int64_t piece = 0; piece < pieces; piece++) {
                Item part = item;
                part.first_split = item.first_split + count * piece / pieces;
                part.last_split = item.first_split + count * (piece + 1) / pieces;
                part.partial = partials + part.first_split - item.first_split;
                items.push_back(part);
            }
            partials += count;
        }
    }

    std::vector<Item> whole_;
};

}  // namespace quire

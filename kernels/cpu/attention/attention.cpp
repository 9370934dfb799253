// Causal attention over a paged cache, read in place through its block table.
//
// Cache of one layer: [2, num_blocks, num_kv_heads, block_size, head_dim], keys then values; blocks may be further apart
// than their size, because other layers lie between them. Latents have keys only, whose last numbers are the values
// (value_dim). The work is divided into items of (a few tokens of a row, one key/value head, a range of keys), which
// threads take one after the other.
//
// The order of every sum is part of the contract: tiles of TILE keys and splits of SPLIT keys are at absolute positions,
// each split has its own sums, and splits are merged in ascending order. So a query's result depends only on its query,
// keys and values, not on the batch, the prefill chunks or the number of threads. Nor does it depend on whether the
// splits that several rows share are computed for all of them at once: their merged sums are kept per query, and the
// row's own splits are merged into these.
#include <memory>
#include <mutex>
#include <utility>

#include "attention/rows.h"
#include "attention/state.h"
#include "attention/work.h"
#include "attention/write.h"
#include "native/plan.h"

using namespace quire;

namespace {

constexpr int64_t ONE_THREAD_MACS = 1 << 18;  // tens of microseconds: less than waking other threads may cost

constexpr int64_t STAGED_FROM = 4 * QUERIES;  // query rows; measured: with fewer, widening again costs less than copies

// Scratch memory of a thread, which is kept between calls.
struct Workspace {
    std::vector<float> memory;
    std::vector<Row> rows;
    float *query, *out, *joined, *most, *total, *scores, *keys, *values;

    void fit(int64_t count, int64_t width) {
        const int64_t needed = count * (3 * width + TILE + 2 * VF) + 2 * TILE * width + LINE / 4;
        if (int64_t(memory.size()) < needed) memory.resize(needed);
        if (int64_t(rows.size()) < count) rows.resize(count);
        float* at = (float*)((uintptr_t(memory.data()) + LINE - 1) / LINE * LINE);  // registers lie in one line each
        auto take = [&at](int64_t floats) { return std::exchange(at, at + floats); };
        query = take(count * width), out = take(count * width), joined = take(count * width);
        scores = take(count * TILE), keys = take(TILE * width), values = take(TILE * width);
        most = take(count * VF), total = take(count * VF);
    }
};

// Pointers to the keys (or values) of a tile; outside [first, last) the pointer of the nearest key.
template <class T>
void locate(Call& call, const Item& item, int64_t tile, int64_t first, int64_t last, bool values, const T** rows) {
    const QuireLayer& layer = *call.layer;
    const int64_t size = call.step->block_size, dim = layer.head_dim, base = tile * TILE;
    const int32_t* table = call.step->block_table + item.row * call.step->table_stride;
    const T* cache = reinterpret_cast<const T*>(call.cache);
    first = std::max(first, base), last = std::min(last, base + TILE);
    int64_t block = first / size, offset = first - block * size;
    for (int64_t key = first; key < last; block++, offset = 0) {
        int64_t id = table[block];
        if (id < 0 || id >= layer.num_blocks) call.error = BAD_BLOCK, id = 0;
        const T* at = cache + (values && !layer.value_dim ? layer.values_from : 0) + id * layer.block_stride;
        at += (item.head * size + offset) * dim + (values ? dim - call.value_dim() : 0);
        const int64_t end = std::min(last, key + size - offset);
        for (; key < end; key++, at += dim) rows[key - base] = at;
    }
    for (int64_t i = 0; i < first - base; i++) rows[i] = rows[first - base];
    for (int64_t i = last - base; i < TILE; i++) rows[i] = rows[last - base - 1];
}

// Computes one item, over a cache of one format.
template <class F>
class Attend {
    typedef typename F::stored T;

  public:
    Attend(Call& call, const Item& item, Workspace& work)
        : call_(call), item_(item), work_(work), width_(call.width()), out_width_(call.out_width()),
          rows_(item.count * call.group()) {
        first_ = call.first_key(item.position);
        last_ = item.position;
        if (!item.shared) last_ = call.last_key(item.token + item.count - 1, item.position + item.count - 1) + 1;
        work.fit(rows_, std::max(width_, out_width_));
        const QuireLayer& layer = *call.layer;
        within_ = layer.value_dim && layer.key_dim + layer.value_dim > layer.head_dim;
        words_ = Words::COMPILED && layer.query_format == BFLOAT16 && layer.cache_format == BFLOAT16 &&
                 layer.key_dim % (2 * VF) == 0;
        const bool many = rows_ > STAGED_FROM;
        // Lanes that are keys need no sums of lanes. Widened keys of a prefill do not gain: their first and last tiles are
        // computed whole.
        turned_ = many && (item.shared || words_);
        // Widened copies pay off if several passes would widen the same numbers, or if rows do not fill registers.
        staged_ = turned_ || width_ != layer.key_dim || out_width_ != call.value_dim() || (sizeof(T) < 4 && many);
    }

    void run(float* partials, int64_t partial_size) {
        const int64_t first_tile = std::max(first_, item_.first_split * SPLIT) / TILE;
        locate(call_, item_, first_tile, first_, last_, false, keys_);
        Ahead{reinterpret_cast<const char* const*>(keys_), key_bytes()}.fetch(0, TILE);
        load_query();
        begin();
        for (int64_t split = item_.first_split; split < item_.last_split; split++) {
            run_split(split);
            if (item_.partial < 0)
                join_split();
            else
                keep_split(partials + (item_.partial + split - item_.first_split) * partial_size);
        }
        if (item_.partial < 0) end();
    }

    // Merges [count] partial results of other items.
    void join_kept(const float* partials, int64_t partial_size, int64_t count) {
        begin();
        for (int64_t i = 0; i < count; i++, partials += partial_size)
            for (int64_t row = 0; row < rows_; row++) {
                const float* kept = partials + row * (out_width_ + 2);
                float* joined = work_.joined + row * out_width_;
                join(work_.most[row], work_.total[row], joined, kept[0], kept[1], kept + 2, out_width_);
            }
        end();
    }

  private:
    // Index of a query row's token in the step.
    int64_t token_of(int64_t row) const {
        const int64_t token = item_.token + row / call_.group();
        return item_.shared ? call_.sharing[token] : token;
    }

    float* state_of(int64_t row) const {
        const int64_t group = call_.group(), head = item_.head * group + row % group;
        return call_.states + ((item_.state + row / group) * call_.layer->num_heads + head) * (out_width_ + 2);
    }

    void begin() {
        if (item_.shared || item_.state < 0) return std::fill(work_.total, work_.total + rows_, 0.0f);
        for (int64_t row = 0; row < rows_; row++) {
            const float* state = state_of(row);
            work_.most[row] = state[0], work_.total[row] = state[1];
            std::memcpy(work_.joined + row * out_width_, state + 2, out_width_ * sizeof(float));
        }
    }

    void end() {
        if (!item_.shared) return finish();
        for (int64_t row = 0; row < rows_; row++) {
            float* state = state_of(row);
            state[0] = work_.most[row], state[1] = work_.total[row];
            std::memcpy(state + 2, work_.joined + row * out_width_, out_width_ * sizeof(float));
        }
    }

    void load_query() {
        const QuireLayer& layer = *call_.layer;
        const float factor = float(layer.scale) * head_scale(layer.k_scale, item_.head) * F::FACTOR;
        const int64_t group = call_.group(), bytes = format_bytes(layer.query_format);
        factor_ = words_ ? factor : 1.0f;
        for (int64_t row = 0; row < rows_; row++) {
            const int64_t token = token_of(row), head = item_.head * group + row % group;
            const char* from = call_.query + (token * call_.token_stride + head * call_.head_stride) * bytes;
            if (words_)
                std::memcpy(work_.query + row * width_ / 2, from, layer.key_dim * bytes);
            else
                widen_row(layer.query_format, from, layer.key_dim, factor, work_.query + row * width_);
        }
    }

    void run_split(int64_t split) {
        for (int64_t row = 0; row < rows_; row++) work_.rows[row] = Row{NOTHING, vfloat{}};
        std::fill(work_.out, work_.out + rows_ * out_width_, 0.0f);
        const int64_t first = std::max(first_, split * SPLIT), last = std::min(last_, (split + 1) * SPLIT);
        for (int64_t tile = first / TILE; tile * TILE < last; tile++) run_tile(tile);
    }

    void run_tile(int64_t tile) {
        const int64_t base = tile * TILE;
        const int first = int(std::max<int64_t>(first_ - base, 0)), last = int(std::min<int64_t>(last_ - base, TILE));
        locate(call_, item_, tile, first_, last_, true, values_);
        const int from = first / 4 * 4, groups = (last - from + 3) / 4;
        const Ahead value_rows{within_ ? nullptr : reinterpret_cast<const char* const*>(values_), value_bytes()};
        if (words_) {
            score<Words>(reinterpret_cast<const float* const*>(keys_), width_ / 2, from, groups, value_rows);
        } else if (staged_) {
            score<Float32>(widen(keys_, turned_ ? 0 : from, turned_ ? TILE : from + 4 * groups,
                                 turned_ ? work_.values : work_.keys),
                           width_, from, groups, value_rows);
        } else {
            score_tile<F>(work_.query, rows_, width_, keys_ + from, groups, work_.scores + from, value_rows.from(from));
        }
        weigh_rows(base, first, last);

        const bool more = base + TILE < last_ && base + TILE < item_.last_split * SPLIT;
        if (more) locate(call_, item_, tile + 1, first_, last_, false, keys_);
        const Ahead next{more ? reinterpret_cast<const char* const*>(keys_) : nullptr, key_bytes()};
        if (staged_) {
            const float* const* values = within_ && !words_ ? from_keys(first, last) : widen_values(first, last);
            interleave(rows_, next, [&](int row, int count) {
                const float* weights = work_.scores + row * TILE;
                float* const out = work_.out + row * out_width_;
                add_tile<Float32>(out, count, out_width_, weights, values, first, last, Ahead{});
            });
        } else {
            add_tile<F>(work_.out, rows_, out_width_, work_.scores, values_, first, last, next);
        }
    }

    // Scores of keys that are not widened any more, each of `width` floats or words.
    template <class Format>
    void score(const float* const* keys, int64_t width, int from, int groups, Ahead ahead) {
        if (turned_) {
            turn_tile(keys, width, work_.keys);
            score_turned_tile<Format>(work_.query, rows_, width, work_.keys, work_.scores, ahead);
        } else {
            float* const scores = work_.scores + from;
            score_tile<Format>(work_.query, rows_, width, keys + from, groups, scores, ahead.from(from));
        }
    }

    void weigh_rows(int64_t base, int first, int last) {
        const int from = first / VF, to = (last + VF - 1) / VF;
        const int64_t group = call_.group();
        for (int64_t row = 0; row < rows_; row++) {
            const int64_t position = item_.position + row / group;
            Scores how;
            how.factor = factor_;
            how.soft_cap = float(call_.layer->soft_cap);
            how.first = int(std::clamp<int64_t>(call_.first_key(position) - base, 0, TILE));
            how.last = int(std::clamp<int64_t>(call_.last_key(token_of(row), position) + 1 - base, 0, TILE));
            float* scores = work_.scores + row * TILE;
            if (how.first < how.last)
                weigh(how, from, to, scores, work_.rows[row], work_.out + row * out_width_, out_width_);
            else
                std::fill(scores + from * VF, scores + to * VF, 0.0f);
        }
    }

    // Rows [first, last) of a tile in float32, and pointers to them.
    const float* const* widen(const T* const* rows, int first, int last, float* to) {
        return widen(rows, first, last, to, call_.layer->key_dim, width_);
    }

    const float* const* widen_values(int first, int last) {
        return widen(values_, first, last, work_.values, call_.value_dim(), out_width_);
    }

    const float* const* widen(const T* const* rows, int first, int last, float* to, int64_t dim, int64_t width) {
        for (int i = first; i < last; i++) {
            widen_row<F>(rows[i], dim, 1.0f, to + i * width);
            widened_[i] = to + i * width;
        }
        return widened_;
    }

    // The values of latents whose keys are widened already. The last register of a value that does not fill it has
    // numbers of the next key, which reach only the end of a row's sums that is not read.
    const float* const* from_keys(int first, int last) {
        const int64_t offset = call_.layer->head_dim - call_.value_dim();
        float* const keys = turned_ ? work_.values : work_.keys;
        for (int i = first; i < last; i++) widened_[i] = keys + i * width_ + offset;
        return widened_;
    }

    void join_split() {
        for (int64_t row = 0; row < rows_; row++)
            join(work_.most[row], work_.total[row], work_.joined + row * out_width_, work_.rows[row].most,
                 sum(work_.rows[row].sums), work_.out + row * out_width_, out_width_);
    }

    void keep_split(float* partial) {
        for (int64_t row = 0; row < rows_; row++, partial += out_width_ + 2) {
            partial[0] = work_.rows[row].most;
            partial[1] = sum(work_.rows[row].sums);
            std::memcpy(partial + 2, work_.out + row * out_width_, out_width_ * sizeof(float));
        }
    }

    void finish() {
        const QuireLayer& layer = *call_.layer;
        const int64_t group = call_.group(), bytes = format_bytes(layer.query_format);
        for (int64_t row = 0; row < rows_; row++) {
            const int64_t token = token_of(row), head = item_.head * group + row % group;
            float* out = work_.joined + row * out_width_;
            if (layer.sinks) {
                std::fill(work_.out, work_.out + out_width_, 0.0f);
                join(work_.most[row], work_.total[row], out, layer.sinks[head], 1.0f, work_.out, out_width_);
            }
            const float factor = head_scale(layer.v_scale, item_.head) * F::FACTOR / work_.total[row];
            for (int64_t d = 0; d < out_width_; d += VF) store(out + d, load<vfloat>(out + d) * factor);
            narrow_row(layer.query_format, out, call_.value_dim(), 1.0f,
                       call_.out + (token * layer.num_heads + head) * call_.value_dim() * bytes);
        }
    }

    int64_t key_bytes() const { return call_.layer->key_dim * int64_t(sizeof(T)); }
    int64_t value_bytes() const { return call_.value_dim() * int64_t(sizeof(T)); }

    Call& call_;
    const Item& item_;
    Workspace& work_;
    int64_t width_, out_width_, rows_, first_, last_;
    bool within_, words_, turned_, staged_;  // within_: values are numbers of the keys, and are read with them
    float factor_ = 1;  // of the scores, unless the queries contain it
    const T* keys_[TILE];
    const T* values_[TILE];
    const float* widened_[TILE];
};

Workspace& own_workspace() {
    static thread_local Workspace workspace;
    return workspace;
}

// Memory of one operation while it runs. It is kept for later ones: fresh pages would cost more than the arithmetic.
struct Memory {
    Call call;
    Work shared, own;
    std::vector<int64_t> place;
    std::vector<float> states, partials;
};

class FreeMemory {
  public:
    Memory* take() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) return new Memory;
        Memory* const memory = free_.back();
        free_.pop_back();
        return memory;
    }

    void put(Memory* memory) {
        std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(memory);
    }

  private:
    std::mutex mutex_;
    std::vector<Memory*> free_;
};

FreeMemory& free_memory() {
    static FreeMemory* const memory = new FreeMemory;  // never destroyed: other threads may still run at exit
    return *memory;
}

// Items over shared prefixes, their joints, each row's own items, their joints.
class AttentionOperation final : public Operation {
  public:
    AttentionOperation(char* out, const char* query, int64_t token_stride, int64_t head_stride, const char* cache,
                       const QuireStep* step, const QuireLayer& layer)
        : out_(out), query_(query), token_stride_(token_stride), head_stride_(head_stride), cache_(cache), step_(step),
          layer_(layer) {}

    int64_t begin(int stage) override {
        if (stage == 0) prepare();
        stage_ = stage;
        error_ = memory_->call.error;
        if (stage == 4 || error_) {
            free_memory().put(memory_);
            return -1;
        }
        return int64_t((is_joints() ? work().joints : work().items).size());
    }

    void run(int64_t piece) override {
        switch (layer_.cache_format) {
            case FLOAT32: return run<Float32>(piece);
            case BFLOAT16: return run<BFloat16>(piece);
            case FLOAT16: return run<Float16>(piece);
            case FLOAT8_E4M3: return run<Float8E4M3>(piece);
            default: return run<Float8E5M2>(piece);
        }
    }

    const char* name() const override { return "attention"; }
    int64_t error() const override { return error_; }

  private:
    bool is_joints() const { return stage_ % 2; }
    const Work& work() const { return stage_ < 2 ? memory_->shared : memory_->own; }
    int64_t partial_size() const { return work().block * memory_->call.group() * (memory_->call.out_width() + 2); }

    void prepare() {
        const QuireStep& step = *step_;
        memory_ = free_memory().take();
        Call& call = memory_->call;
        call.out = out_, call.query = query_, call.token_stride = token_stride_, call.head_stride = head_stride_;
        call.cache = cache_, call.step = step_, call.layer = &layer_, call.error = 0;
        const int64_t used = std::min<int64_t>(step.query_start_loc[step.num_rows], step.num_tokens);
        const int64_t token_bytes = layer_.num_heads * call.value_dim() * format_bytes(layer_.query_format);
        std::memset(out_ + used * token_bytes, 0, (step.num_tokens - used) * token_bytes);
        int64_t macs = 0;
        for (int64_t i = 0; i < step.num_rows; i++)
            macs += int64_t(step.seq_lens[i]) * (step.query_start_loc[i + 1] - step.query_start_loc[i]);
        macs *= layer_.num_heads * layer_.key_dim;
        const int threads = macs < ONE_THREAD_MACS ? 1 : max_threads();
        memory_->shared.plan_prefixes(call, threads, memory_->place);
        memory_->own.plan_rows(call, threads, memory_->place);
        const size_t states = call.sharing.size() * layer_.num_heads * (call.out_width() + 2);
        if (memory_->states.size() < states) memory_->states.resize(states);
        call.states = memory_->states.data();
        for (stage_ = 0; stage_ < 4; stage_ += 2) {
            const size_t partials = work().partials * partial_size();
            if (memory_->partials.size() < partials) memory_->partials.resize(partials);
        }
    }

    template <class F>
    void run(int64_t piece) {
        const Item& item = (is_joints() ? work().joints : work().items)[piece];
        Attend<F> attend(memory_->call, item, own_workspace());
        float* const partials = memory_->partials.data();
        if (is_joints())
            attend.join_kept(partials + item.partial * partial_size(), partial_size(), item.last_split - item.first_split);
        else
            attend.run(partials, partial_size());
    }

    char* out_;
    const char* query_;
    int64_t token_stride_, head_stride_;
    const char* cache_;
    const QuireStep* step_;
    QuireLayer layer_;
    Memory* memory_ = nullptr;
    int stage_ = 0;
    int64_t error_ = 0;
};

}  // namespace

// Computes attention into `out`, contiguous [num_tokens, num_heads, value_dim]; tokens after the last row's become zero.
// Returns 0 or an error code (structs.h), with undefined results. Each run of a plan reads the step; its
// number of tokens must not change.
QUIRE_API int64_t quire_attention(void* out, const void* query, int64_t token_stride, int64_t head_stride,
                                  const void* cache, const QuireStep* step, const QuireLayer* layer) {
    return execute(AttentionOperation(static_cast<char*>(out), static_cast<const char*>(query), token_stride,
                                      head_stride, static_cast<const char*>(cache), step, *layer));
}

// Writes a layer's projected keys and values to the cache, and normalises and rotates queries in place. As in
// quire_attention, each run of a plan reads the step.
QUIRE_API int64_t quire_attention_prologue(const QuireTokens* tokens, void* cache, const QuireStep* step,
                                           const QuireLayer* layer) {
    return execute(PrologueOperation(*tokens, static_cast<char*>(cache), step, *layer));
}

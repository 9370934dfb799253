// Bidirectional attention within rows of tokens, without a cache: an encoder's.
//
// A piece is one head of one row. Its keys and values are packed into panels as weights of two products: scores are
// queries by keys, outputs are probabilities by values. A row's bits depend on that row alone.
#include <vector>

#include "linear/panels.h"
#include "native/exp.h"
#include "native/plan.h"

using namespace quire;

namespace {

constexpr int QUERIES = 24;              // at a time: their scores for 512 keys take 48 KB
constexpr long THREADS_FROM = 1 << 14;  // tokens times width: fewer take less time than waiting for other threads

// As in kernels/cpu/attention/row_attention.py.
struct Rows {
    const void* qkv;        // [tokens][3 * heads * head_dim], rows stride apart: queries, keys, values
    void* out;              // [tokens][heads * head_dim]
    const int32_t* starts;  // [rows + 1]: first token of each row
    const float* rotary;    // [2][positions][rotary_dim]: cosines, and sines whose first half is negated; or null
    int64_t stride, positions;
    int32_t rows, heads, head_dim, rotary_dim;
    int32_t reach;  // tokens on each side that a token attends to; 0: all
    int32_t is_bf16;
    float scale;
};

// Memory of a thread, which grows to what its longest row needs.
float* scratch(size_t count) {
    thread_local std::vector<float> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

// Sums of rows [0, rows) of x by panels [0, panels): inputs of a panel are `bytes` apart from those of the next.
void multiply(const float* x, long x_stride, int rows, const float* weights, long bytes, int panels, int inputs,
              float* out) {
    const Sums sums{out, long(panels) * PANEL, 0, 0};
    const int most = block_inputs(inputs);
    for (int k = 0; k < inputs; k += most) {
        const Block of{(const char*)(weights + long(k) * PANEL), bytes, 0, panels, k, std::min(most, inputs - k)};
        for_tiles<Float32>(0, rows, of, [&](auto of_rows, auto of_panels, int row, int panel)
                                            __attribute__((always_inline)) {
            constexpr int R = of_rows.value, P = of_panels.value;
            Tile<R, P> tile = {};
            block<R, P>(Float32{}, tile, x + row * x_stride + k, x_stride, of.of(panel), of.bytes, of.count);
            finish(sums, (const float*)tile.sums, row, R, panel, P, k == 0);
        });
    }
}

// Replaces scores [0, width), of which [first, last) count, by powers of e; returns their sum.
float exponentials(float* scores, int width, int first, int last) {
    const float none = -__builtin_inff();
    for (int i = 0; i < first; i++) scores[i] = none;
    for (int i = last; i < width; i++) scores[i] = none;
    vfloat most = splat(none);
    for (int i = 0; i < width; i += VF) {
        const vfloat x = load<vfloat>(scores + i);
        most = x > most ? x : most;
    }
    float highest = most[0];
    for (int lane = 1; lane < VF; lane++) highest = std::max(highest, most[lane]);
    vfloat sum = {};
    for (int i = 0; i < width; i += VF) {
        const vfloat x = exp_of(load<vfloat>(scores + i) - highest);
        store(scores + i, x);
        sum += x;
    }
    return sum_lanes(sum);
}

template <class T>
class Piece {
  public:
    Piece(const Rows& call, int row, int head)
        : call_(call),
          head_(head),
          first_(call.starts[row]),
          length_(call.starts[row + 1] - call.starts[row]),
          dim_(call.head_dim),
          key_panels_((length_ + PANEL - 1) / PANEL),
          value_panels_((dim_ + PANEL - 1) / PANEL) {}

    void run() {
        const size_t all_keys = size_t(key_panels_) * dim_ * PANEL, all_values = size_t(value_panels_) * length_ * PANEL;
        const size_t some_queries = size_t(QUERIES) * dim_, some_scores = size_t(QUERIES) * key_panels_ * PANEL;
        const size_t outputs = size_t(QUERIES) * value_panels_ * PANEL;
        keys_ = scratch(all_keys + all_values + some_queries + some_scores + outputs + dim_);
        values_ = keys_ + all_keys, queries_ = values_ + all_values, scores_ = queries_ + some_queries;
        outputs_ = scores_ + some_scores, one_ = outputs_ + outputs;
        pack();
        for (int query = 0; query < length_; query += QUERIES) attend(query, std::min(QUERIES, length_ - query));
    }

  private:
    const T* at(int token, int part) const {
        return (const T*)call_.qkv + (first_ + token) * call_.stride + (long(part) * call_.heads + head_) * dim_;
    }

    // Writes a query or key, rotated.
    void load_head(int token, int part, float* to) const {
        const T* from = at(token, part);
        for (int i = 0; i < dim_; i++) to[i] = to_float(from[i]);
        if (!call_.rotary) return;
        const int half = call_.rotary_dim / 2;
        const float* cosines = call_.rotary + long(token) * call_.rotary_dim;
        const float* sines = cosines + call_.positions * call_.rotary_dim;
        for (int i = 0; i < half; i++) {
            const float low = to[i], high = to[half + i];
            to[i] = low * cosines[i] + high * sines[i];
            to[half + i] = high * cosines[half + i] + low * sines[half + i];
        }
    }

    void pack() {
        for (int token = 0; token < key_panels_ * PANEL; token++) {
            float* to = keys_ + long(token / PANEL) * dim_ * PANEL + token % PANEL;
            if (token < length_)
                load_head(token, 1, one_);
            else
                std::fill_n(one_, dim_, 0.f);
            for (int i = 0; i < dim_; i++) to[i * PANEL] = one_[i];
        }
        for (int token = 0; token < length_; token++) {
            const T* from = at(token, 2);
            for (int panel = 0; panel < value_panels_; panel++) {
                float* to = values_ + (long(panel) * length_ + token) * PANEL;
                for (int i = 0; i < PANEL; i += VF) {
                    const int column = panel * PANEL + i;
                    store(to + i, column < dim_ ? load_some(from + column, dim_ - column) : vfloat{});
                }
            }
        }
    }

    // Computes the outputs of some queries, which see keys of a range of panels.
    void attend(int query, int count) {
        const bool all = call_.reach == 0;
        const int low = all ? 0 : std::max(0, query - call_.reach);
        const int high = all ? length_ : int(std::min<long>(length_, long(query) + count + call_.reach));
        const int panel = low / PANEL, panels = (high + PANEL - 1) / PANEL - panel, begin = panel * PANEL;
        for (int i = 0; i < count; i++) {
            float* to = queries_ + i * dim_;
            load_head(query + i, 0, to);
            for (int j = 0; j < dim_; j++) to[j] *= call_.scale;
        }
        const int width = panels * PANEL, inputs = std::min(begin + width, length_) - begin;
        const long key_bytes = long(dim_) * PANEL * 4, value_bytes = long(length_) * PANEL * 4;
        multiply(queries_, dim_, count, keys_ + long(panel) * dim_ * PANEL, key_bytes, panels, dim_, scores_);
        float sums[QUERIES];
        for (int i = 0; i < count; i++) {
            const int first = all ? 0 : std::max(0, query + i - call_.reach);
            const int last = all ? length_ : int(std::min<long>(length_, long(query) + i + 1 + call_.reach));
            sums[i] = exponentials(scores_ + long(i) * width, width, first - begin, last - begin);
        }
        multiply(scores_, width, count, values_ + long(begin) * PANEL, value_bytes, value_panels_, inputs, outputs_);
        for (int i = 0; i < count; i++) {
            const float* from = outputs_ + long(i) * value_panels_ * PANEL;
            T* to = (T*)call_.out + (long(first_ + query + i) * call_.heads + head_) * dim_;
            const float scale = 1.f / sums[i];
            for (int j = 0; j < dim_; j += VF) store_some(to + j, load<vfloat>(from + j) * scale, dim_ - j);
        }
    }

    const Rows& call_;
    const int head_;
    const long first_;
    const int length_, dim_, key_panels_, value_panels_;
    float *keys_, *values_, *queries_, *scores_, *outputs_, *one_;
};

class RowAttention final : public Operation {
  public:
    explicit RowAttention(const Rows& call) : call_(call) {
        const long tokens = call.starts[call.rows];
        many_ = tokens * call.heads * call.head_dim > THREADS_FROM;
    }
    int64_t begin(int stage) override {
        pieces_ = many_ ? int64_t(call_.rows) * call_.heads : 1;
        return stage ? -1 : pieces_;
    }
    void run(int64_t piece) override {
        const int64_t all = int64_t(call_.rows) * call_.heads;
        for (int64_t i = piece * all / pieces_; i < (piece + 1) * all / pieces_; i++) {
            const int row = int(i / call_.heads), head = int(i % call_.heads);
            call_.is_bf16 ? Piece<uint16_t>(call_, row, head).run() : Piece<float>(call_, row, head).run();
        }
    }
    const char* name() const override { return "attention"; }

  private:
    Rows call_;
    bool many_;
    int64_t pieces_ = 1;
};

}  // namespace

QUIRE_API void quire_attend_rows(const Rows* call) { execute(RowAttention(*call)); }

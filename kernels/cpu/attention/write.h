// Preparation of queries, and writing of keys and values to the cache: head norms, rotation, conversion.
#pragma once

#include <atomic>
#include <vector>

#include "attention/rows.h"
#include "attention/structs.h"
#include "native/plan.h"

namespace quire {

constexpr int64_t ONE_THREAD_NUMBERS = 1 << 15;

// Rotates dimension i with dimension i + rotary_dim / 2; the table's sines include the sign.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cosine[i] + high * sine[i];
        x[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

// One thread's view of a step's tokens.
class Preparer {
  public:
    Preparer(const QuireTokens& tokens, char* cache, const QuireStep& step, const QuireLayer& layer)
        : tokens_(tokens), cache_(cache), step_(step), layer_(layer), width_(padded(layer.head_dim)) {
        memory_.resize(3 * width_ + 2 * padded(tokens.rotary_dim));
        x_ = memory_.data(), q_norm_ = x_ + width_, k_norm_ = q_norm_ + width_;
        cosine_ = k_norm_ + width_, sine_ = cosine_ + padded(tokens.rotary_dim);
        if (tokens.q_norm) widen_row(layer.query_format, tokens.q_norm, layer.head_dim, 1.0f, q_norm_);
        if (tokens.k_norm) widen_row(layer.query_format, tokens.k_norm, layer.head_dim, 1.0f, k_norm_);
    }

    int64_t token(int64_t token) {
        if (tokens_.table && !load_angles(tokens_.positions[token])) return BAD_POSITION;
        const int64_t bytes = format_bytes(layer_.query_format);
        const int64_t offset = token * tokens_.token_stride * bytes, step = tokens_.head_stride * bytes;
        if (tokens_.query) {
            char* query = static_cast<char*>(tokens_.query) + offset;
            for (int64_t head = 0; head < layer_.num_heads; head++, query += step) {
                prepare(query, tokens_.q_norm ? q_norm_ : nullptr);
                narrow_row(layer_.query_format, x_, layer_.head_dim, 1.0f, query);
            }
        }
        const int64_t slot = step_.slot_mapping[token];
        if (!tokens_.key || slot < 0) return 0;
        if (slot >= layer_.num_blocks * step_.block_size) return BAD_SLOT;
        const char* key = static_cast<const char*>(tokens_.key) + offset;
        const char* value = layer_.value_dim ? nullptr : static_cast<const char*>(tokens_.value) + token * tokens_.value_token_stride * bytes;
        for (int64_t head = 0; head < layer_.num_kv_heads; head++) {
            prepare(key + head * step, tokens_.k_norm ? k_norm_ : nullptr);
            narrow_row(layer_.cache_format, x_, layer_.head_dim, head_scale(layer_.k_scale, head), place(0, slot, head));
            if (layer_.value_dim) continue;
            widen_row(layer_.query_format, value + head * tokens_.value_head_stride * bytes, layer_.head_dim, 1.0f, x_);
            narrow_row(layer_.cache_format, x_, layer_.head_dim, head_scale(layer_.v_scale, head), place(1, slot, head));
        }
        return 0;
    }

  private:
    bool load_angles(int64_t position) {
        if (position < 0 || position >= tokens_.max_position) return false;
        const int64_t bytes = format_bytes(tokens_.table_format) * tokens_.rotary_dim;
        const char* cosines = static_cast<const char*>(tokens_.table) + position * bytes;
        widen_row(tokens_.table_format, cosines, tokens_.rotary_dim, 1.0f, cosine_);
        widen_row(tokens_.table_format, cosines + tokens_.max_position * bytes, tokens_.rotary_dim, 1.0f, sine_);
        return true;
    }

    void prepare(const char* head, const float* norm) {
        widen_row(layer_.query_format, head, layer_.head_dim, 1.0f, x_);
        if (norm) normalise(norm);
        if (tokens_.table) rotate(x_, cosine_, sine_, tokens_.rotary_dim);
    }

    // x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).
    void normalise(const float* norm) {
        vfloat squares = {};
        for (int64_t i = 0; i < width_; i += VF) squares = multiply_add(load<vfloat>(x_ + i), load<vfloat>(x_ + i), squares);
        const float mean = sum(squares) / float(layer_.head_dim);
        const float factor = 1.0f / __builtin_sqrtf(mean + float(tokens_.norm_eps));
        for (int64_t i = 0; i < width_; i += VF) store(x_ + i, load<vfloat>(x_ + i) * factor * load<vfloat>(norm + i));
    }

    // Address of a token's head in the cache; half is 0 for keys, 1 for values.
    char* place(int64_t half, int64_t slot, int64_t head) {
        const int64_t block = half * layer_.values_from + slot / step_.block_size * layer_.block_stride;
        const int64_t row = head * step_.block_size + slot % step_.block_size;
        return cache_ + (block + row * layer_.head_dim) * format_bytes(layer_.cache_format);
    }

    const QuireTokens& tokens_;
    char* cache_;
    const QuireStep& step_;
    const QuireLayer& layer_;
    int64_t width_;
    std::vector<float> memory_;
    float *x_, *q_norm_, *k_norm_, *cosine_, *sine_;
};

class PrologueOperation final : public RowOperation {
  public:
    PrologueOperation(const QuireTokens& tokens, char* cache, const QuireStep* step, const QuireLayer& layer)
        : RowOperation(step->num_tokens, numbers(*step, layer) >= ONE_THREAD_NUMBERS),
          tokens_(tokens), cache_(cache), step_(step), layer_(layer) {}
    PrologueOperation(const PrologueOperation& other) = default;
    const char* name() const override { return "cache_write"; }
    int64_t error() const override { return error_.value; }

  private:
    // The last error of any thread; a copy starts without one.
    struct Error {
        std::atomic<int64_t> value{0};
        Error() = default;
        Error(const Error&) {}
    };

    static int64_t numbers(const QuireStep& step, const QuireLayer& layer) {
        return step.num_tokens * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
    }

    void start() override { error_.value = 0; }

    void run_rows(int64_t first, int64_t last) override {
        Preparer preparer(tokens_, cache_, *step_, layer_);
        for (int64_t token = first; token < last; token++) {
            const int64_t wrong = preparer.token(token);
            if (wrong) error_.value = wrong;
        }
    }

    QuireTokens tokens_;
    char* cache_;
    const QuireStep* step_;
    QuireLayer layer_;
    Error error_;
};

}  // namespace quire

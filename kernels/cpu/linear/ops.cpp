// Steps between a model's matrix products: norms, gates, and outputs of two layers side by side. A row's bits depend on
// that row alone.

#include "linear/activations.h"
#include "native/plan.h"

using namespace quire;

namespace {

// In elements: with fewer, waiting for other threads costs more than it saves. A gate's element takes ten times as long.
constexpr long NORM_THREADS_FROM = 1 << 16, GATE_THREADS_FROM = 1 << 14;
constexpr long COPY_THREADS_FROM = 1 << 19;  // bytes

// gpt-oss's activation: gate and up, each clamped; NaN stays NaN.
QUIRE_INLINE vfloat swiglu_oai(vfloat gate, vfloat up) {
    const vfloat limit = splat(7.f);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + 1.f) * (gate / (exp_of(gate * -1.702f) + 1.f));
}

struct Gate {
    const void* from;  // [rows][2 * width], rows stride apart: gate, then up; interleaved for SWIGLU_OAI
    long stride;
    void* out;  // [rows][width]
    int rows, width, is_bf16, activation;
};

template <class T>
void gate_oai(const T* from, T* out, int width) {
    for (int i = 0; i < width; i += VF) {
        float gates[VF] = {}, ups[VF] = {};
        for (int lane = 0; lane < VF && i + lane < width; lane++) {
            gates[lane] = to_float(from[2 * (i + lane)]);
            ups[lane] = to_float(from[2 * (i + lane) + 1]);
        }
        store_some(out + i, swiglu_oai(load<vfloat>(gates), load<vfloat>(ups)), width - i);
    }
}

template <int A, class T>
void gate_row(const T* gates, T* out, int width) {
    const T* ups = gates + width;
    for (int i = 0; i < width; i += VF)
        store_some(out + i, activate<A>(load_some(gates + i, width - i)) * load_some(ups + i, width - i), width - i);
}

template <class T>
void gate_row(const Gate& call, int64_t row) {
    const T* from = (const T*)call.from + row * call.stride;
    T* out = (T*)call.out + row * call.width;
    if (call.activation == SWIGLU_OAI) return gate_oai(from, out, call.width);
    with_activation(call.activation,
                    [&](auto of) __attribute__((always_inline)) { gate_row<of.value>(from, out, call.width); });
}

class GateOperation final : public RowOperation {
  public:
    explicit GateOperation(const Gate& call)
        : RowOperation(call.rows, long(call.rows) * call.width > GATE_THREADS_FROM), call_(call) {}
    const char* name() const override { return "gates"; }

  private:
    void run_rows(int64_t first, int64_t last) override {
        for (int64_t row = first; row < last; row++) call_.is_bf16 ? gate_row<uint16_t>(call_, row) : gate_row<float>(call_, row);
    }

    Gate call_;
};

// Four independent sums hide the latency of additions.
template <class T>
QUIRE_INLINE float sum_of_squares(const T* from, int width) {
    vfloat sums[4] = {};
    int i = 0;
    for (; i + 4 * VF <= width; i += 4 * VF)
        for (int s = 0; s < 4; s++) {
            const vfloat x = load_floats(from + i + s * VF);
            sums[s] = multiply_add(x, x, sums[s]);
        }
    for (; i < width; i += VF) {
        const vfloat x = load_some(from + i, width - i);
        sums[0] = multiply_add(x, x, sums[0]);
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T, class W>
QUIRE_INLINE void norm_row(const T* from, const W* weight, T* to, int width, float eps) {
    const float scale = 1.f / __builtin_sqrtf(sum_of_squares(from, width) / float(width) + eps);
    for (int i = 0; i < width; i += VF) {
        vfloat x = load_some(from + i, width - i) * scale;
        if (weight) x *= load_some(weight + i, width - i);
        store_some(to + i, x, width - i);
    }
}

struct Norm {
    const void* x;
    long outer_stride, inner_stride;
    int rows, inner;  // row r is at r / inner and r % inner
    void* residual;   // [rows][width], changed; or null
    const void* weight;
    void* out;  // [rows][width]
    int width;
    float eps;
    int is_bf16, weight_is_bf16;
};

template <class T, class W>
void norm(const Norm& call, int64_t row) {
    const int width = call.width;
    const T* from = (const T*)call.x + row / call.inner * call.outer_stride + row % call.inner * call.inner_stride;
    T* to = (T*)call.out + row * width;
    if (call.residual) {
        T* sum = (T*)call.residual + row * width;
        for (int i = 0; i < width; i += VF)
            store_some(sum + i, load_some(sum + i, width - i) + load_some(from + i, width - i), width - i);
        from = sum;
    }
    norm_row(from, (const W*)call.weight, to, width, call.eps);
}

class NormOperation final : public RowOperation {
  public:
    explicit NormOperation(const Norm& call)
        : RowOperation(call.rows, long(call.rows) * call.width > NORM_THREADS_FROM), call_(call) {}
    const char* name() const override { return "norms"; }

  private:
    void run_rows(int64_t first, int64_t last) override {
        const auto one = call_.is_bf16 ? call_.weight_is_bf16 ? norm<uint16_t, uint16_t> : norm<uint16_t, float>
                         : call_.weight_is_bf16 ? norm<float, uint16_t>
                                                : norm<float, float>;
        for (int64_t row = first; row < last; row++) one(call_, row);
    }

    Norm call_;
};

struct LayerNorm {
    const void* x;  // [rows][width], rows stride apart
    long stride;
    void* residual;  // [rows][width]: added to x; or null
    int keeps_sum;   // whether residual becomes the sum
    const void *weight, *bias;  // of the dtype of the rows; bias may be null
    void* out;                  // [rows][width]
    int rows, width;
    float eps;
    int is_bf16;
};

// Four independent sums of term(x), as in sum_of_squares.
template <class T, class Term>
QUIRE_INLINE float sum_of(const T* from, int width, const Term& term) {
    vfloat sums[4] = {};
    int i = 0;
    for (; i + 4 * VF <= width; i += 4 * VF)
        for (int s = 0; s < 4; s++) sums[s] += term(load_floats(from + i + s * VF));
    for (; i + VF <= width; i += VF) sums[0] += term(load_floats(from + i));
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) sum += term(splat(to_float(from[i])))[0];
    return sum;
}

template <class T>
void layer_norm(const LayerNorm& call, int64_t row) {
    const int width = call.width;
    const T* from = (const T*)call.x + row * call.stride;
    T* to = (T*)call.out + row * width;
    if (call.residual) {
        T* residual = (T*)call.residual + row * width;
        T* sum = call.keeps_sum ? residual : to;
        for (int i = 0; i < width; i += VF)
            store_some(sum + i, load_some(residual + i, width - i) + load_some(from + i, width - i), width - i);
        from = sum;
    }
    const vfloat mean = splat(sum_of(from, width, [](vfloat x) { return x; }) / float(width));
    const float squares = sum_of(from, width, [&](vfloat x) { return (x - mean) * (x - mean); });
    const float scale = 1.f / __builtin_sqrtf(squares / float(width) + call.eps);
    const T *weight = (const T*)call.weight, *bias = (const T*)call.bias;
    for (int i = 0; i < width; i += VF) {
        vfloat x = (load_some(from + i, width - i) - mean) * scale * load_some(weight + i, width - i);
        if (bias) x += load_some(bias + i, width - i);
        store_some(to + i, x, width - i);
    }
}

class LayerNormOperation final : public RowOperation {
  public:
    explicit LayerNormOperation(const LayerNorm& call)
        : RowOperation(call.rows, long(call.rows) * call.width > NORM_THREADS_FROM), call_(call) {}
    const char* name() const override { return "norms"; }

  private:
    void run_rows(int64_t first, int64_t last) override {
        for (int64_t row = first; row < last; row++)
            call_.is_bf16 ? layer_norm<uint16_t>(call_, row) : layer_norm<float>(call_, row);
    }

    LayerNorm call_;
};

struct Copy {
    const char* from;
    char* to;
    long from_stride, to_stride;  // bytes from row to row
    int rows, bytes;
};

class CopyOperation final : public RowOperation {
  public:
    explicit CopyOperation(const Copy& call)
        : RowOperation(call.rows, long(call.rows) * call.bytes > COPY_THREADS_FROM), call_(call) {}
    const char* name() const override { return "copies"; }

  private:
    void run_rows(int64_t first, int64_t last) override {
        for (int64_t row = first; row < last; row++)
            std::memcpy(call_.to + row * call_.to_stride, call_.from + row * call_.from_stride, size_t(call_.bytes));
    }

    Copy call_;
};

}  // namespace

QUIRE_API int quire_vector_floats() { return VF; }

QUIRE_API void quire_gate(const void* from, long stride, void* out, int rows, int width, int is_bf16, int activation) {
    execute(GateOperation({from, stride, out, rows, width, is_bf16, activation}));
}

QUIRE_API void quire_rms_norm(const void* x, long outer_stride, long inner_stride, int rows, int inner, void* residual,
                              const void* weight, void* out, int width, float eps, int is_bf16, int weight_is_bf16) {
    execute(NormOperation(
        {x, outer_stride, inner_stride, rows, inner, residual, weight, out, width, eps, is_bf16, weight_is_bf16}));
}

QUIRE_API void quire_layer_norm(const void* x, long stride, void* residual, int keeps_sum, const void* weight,
                                const void* bias, void* out, int rows, int width, float eps, int is_bf16) {
    execute(LayerNormOperation({x, stride, residual, keeps_sum, weight, bias, out, rows, width, eps, is_bf16}));
}

QUIRE_API void quire_copy_rows(const void* from, long from_stride, void* to, long to_stride, int rows, int bytes) {
    execute(CopyOperation({(const char*)from, (char*)to, from_stride, to_stride, rows, bytes}));
}

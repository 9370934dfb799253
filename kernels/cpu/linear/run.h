// What all products share: the operation, and its division among threads.
#pragma once

#include <type_traits>

#include "linear/activations.h"
#include "linear/panels.h"
#include "native/plan.h"

namespace quire {
namespace {

constexpr long THREADS_FROM = 1 << 17;  // multiplications: fewer take less time than waiting for other threads
constexpr int PIECES_PER_THREAD = 8;    // so that a thread without a core delays only an eighth of its share
constexpr int SUMS_BYTES = 64 * 1024;   // of a piece: they stay in L2 beside the weights
constexpr int MOST_ROWS = 128;          // of a piece: more rows do not read the weights more rarely than L2 allows
constexpr int FEWEST_ROWS = 24;         // of a piece, if rows are divided: each part of the rows reads all weights

// The result of a product: rows of `outputs` numbers, contiguous, rounded once from the activation of sum + bias.
struct Output {
    void* at;
    const float* bias;  // or null
    int outputs;
    bool is_bf16;
    int activation;  // negative: none
};

template <class AnyLayer>
int activation_of(const AnyLayer&) {
    return -1;
}
inline int activation_of(const Layer& layer) { return layer.activation; }

template <class T>
void store_activated(const Output& output, T* to, const float* from, int column, int count) {
    const float* bias = output.bias ? output.bias + column : nullptr;
    with_activation(output.activation, [&](auto of) __attribute__((always_inline)) {
        for (int i = 0; i < count; i += VF) {
            vfloat sum = load_some(from + i, count - i);
            if (bias) sum += load_some(bias + i, count - i);
            store_some(to + i, activate<of.value>(sum), count - i);
        }
    });
}

template <class T>
void store_sums(const Output& output, T* to, const float* from, int column, int count) {
    if (output.activation >= 0) return store_activated(output, to, from, column, count);
    const float* bias = output.bias ? output.bias + column : nullptr;
    int i = 0;
    for (; i + VF <= count; i += VF) {
        const vfloat sum = load<vfloat>(from + i);
        store_floats(to + i, bias ? sum + load<vfloat>(bias + i) : sum);
    }
    for (; i < count; i++) store_float(to + i, bias ? from[i] + bias[i] : from[i]);
}

// Whether a kernel has `prepare`.
template <class Kernel, class = void>
struct PreparesRows : std::false_type {};
template <class Kernel>
struct PreparesRows<Kernel, std::void_t<decltype(std::declval<Kernel&>().prepare(0, 0))>> : std::true_type {};

// A product of `rows` rows by a layer. A piece is some rows by some panels, and its sums fit in SUMS_BYTES, so that the
// piece of a late thread can be repeated.
//
// Kernel: a copyable struct of arguments, called as kernel(row, row_end, panel, panel_end, sums) to write the sums of
// all inputs of these rows and panels. A kernel that prepares its rows (rounds them) has `prepare(row, row_end)`, which
// is called for all rows first, and memory for the result that lasts as long as the kernel.
template <class Kernel>
class Product final : public Operation {
  public:
    Product(Kernel kernel, const Output& output, int inputs, int rows)
        : kernel_(std::move(kernel)), output_(output), rows_(rows), panels_((output.outputs + PANEL - 1) / PANEL) {
        threads_ = long(rows) * output.outputs * inputs > THREADS_FROM ? max_threads() : 1;
        const int wanted = threads_ > 1 ? PIECES_PER_THREAD * threads_ : 1;
        row_parts_ = (rows + MOST_ROWS - 1) / MOST_ROWS;
        const int rows_each = row_parts_ ? (rows + row_parts_ - 1) / row_parts_ : 1;
        const int most_panels = std::max(1, SUMS_BYTES / (PANEL * 4) / rows_each);
        const int parts = std::max((panels_ + most_panels - 1) / most_panels, wanted / std::max(1, row_parts_));
        panel_parts_ = std::min(panels_, std::max(1, parts));
        // A narrow layer is divided further along its rows.
        const int row_wanted = std::min((rows + FEWEST_ROWS - 1) / FEWEST_ROWS, wanted / panel_parts_);
        row_parts_ = std::max(row_parts_, row_wanted);
    }

    int64_t begin(int stage) override {
        if constexpr (PreparesRows<Kernel>::value) {
            preparing_ = stage == 0;
            prepare_parts_ = std::min(rows_, threads_ > 1 && rows_ >= FEWEST_ROWS ? 4 * threads_ : 1);
            if (preparing_) return prepare_parts_;
            stage--;
        }
        return stage == 0 ? int64_t(row_parts_) * panel_parts_ : -1;
    }

    void run(int64_t piece) override {
        if constexpr (PreparesRows<Kernel>::value)
            if (preparing_) {
                const long parts = prepare_parts_;
                return kernel_.prepare(int(piece * rows_ / parts), int((piece + 1) * rows_ / parts));
            }
        alignas(64) char scratch[SUMS_BYTES];
        compute(piece, scratch);
        commit(piece, scratch);
    }

    const char* name() const override { return "products"; }

    int64_t scratch_bytes() const override { return preparing_ ? 0 : SUMS_BYTES; }

    void compute(int64_t piece, char* scratch) override {
        const Part part(*this, piece);
        kernel_(part.row, part.row_end, part.panel, part.panel_end,
                Sums{(float*)scratch, part.width(), part.row, part.panel});
    }

    void commit(int64_t piece, const char* scratch) override {
        const Part part(*this, piece);
        const int column = part.panel * PANEL, count = int(std::min(part.width(), long(output_.outputs - column)));
        for (int row = part.row; row < part.row_end; row++) {
            const float* from = (const float*)scratch + (row - part.row) * part.width();
            const long to = long(row) * output_.outputs + column;
            if (output_.is_bf16)
                store_sums(output_, (uint16_t*)output_.at + to, from, column, count);
            else
                store_sums(output_, (float*)output_.at + to, from, column, count);
        }
    }

  private:
    struct Part {
        int row, row_end, panel, panel_end;
        Part(const Product& of, int64_t piece) {
            const long i = piece / of.panel_parts_, j = piece % of.panel_parts_;
            row = int(i * of.rows_ / of.row_parts_), row_end = int((i + 1) * of.rows_ / of.row_parts_);
            panel = int(j * of.panels_ / of.panel_parts_), panel_end = int((j + 1) * of.panels_ / of.panel_parts_);
        }
        long width() const { return long(panel_end - panel) * PANEL; }
    };

    Kernel kernel_;
    Output output_;
    int rows_, panels_, threads_, row_parts_, panel_parts_, prepare_parts_ = 1;
    bool preparing_ = false;
};

// Multiplies rows by a layer, which must outlive a plan that is being recorded.
template <class Kernel, class AnyLayer>
void multiply(Kernel kernel, const AnyLayer& layer, void* out, bool is_bf16, int rows) {
    const Output output{out, layer.bias, layer.outputs, is_bf16, activation_of(layer)};
    execute(Product<Kernel>(std::move(kernel), output, layer.inputs, rows));
}

}  // namespace
}  // namespace quire

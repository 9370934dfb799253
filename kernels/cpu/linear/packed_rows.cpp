// Rows of packed weights: written as they are read from a checkpoint, and gathered as embeddings.
//
// For the layout of panels see linear.cpp. Both directions work on words: one input in float32 and float16, two
// neighbouring ones in bfloat16.
#include <atomic>
#include <type_traits>

#include "linear/code_panels.h"
#include "linear/run.h"

using namespace quire;

namespace {

// As in kernels/cpu/linear/linear.py.
enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

constexpr long GATHER_THREADS_FROM = 1 << 15;  // numbers: for fewer, waiting for other threads takes longer

long words_of(int kind, long inputs) { return kind == BFLOAT16 ? (inputs + 1) / 2 : inputs; }

// Bits of a word's exponents, and what added to them overflows to the sign of a number that is not finite.
template <class Word>
struct Finite {
    Word exponents, step, signs;
};
constexpr Finite<uint32_t> FINITE_FLOAT32 = {0x7f800000u, 0x00800000u, 0x80000000u};
constexpr Finite<uint32_t> FINITE_BFLOAT16 = {0x7f807f80u, 0x00800080u, 0x80008000u};
constexpr Finite<uint16_t> FINITE_FLOAT16 = {0x7c00, 0x0400, 0x8000};

// Writes `count` rows, `stride` bytes apart, to the lanes of a panel. Returns whether all their numbers are finite. The
// rows are read a few cache lines at a time, so that the lines of the panel that are written stay in L1.
template <class Word>
bool pack_lanes(const char* rows, long stride, long row_bytes, Word* panel, int count, const Finite<Word>& finite) {
    constexpr int LINE = 64 / sizeof(Word);
    constexpr long TOGETHER = 4 * 64;  // bytes
    Word bits = 0;
    for (long start = 0; start < row_bytes; start += TOGETHER)
        for (int i = 0; i < count; i++)
            for (long at = start; at < std::min(start + TOGETHER, row_bytes); at += 64) {
                Word line[LINE] = {};
                Word* const to = panel + at / long(sizeof(Word)) * PANEL + i;
                const long bytes = std::min<long>(64, row_bytes - at);
                if (bytes == 64)
                    std::memcpy(line, rows + i * stride + at, 64);
                else
                    std::memcpy(line, rows + i * stride + at, bytes);
                for (int j = 0; j < LINE; j++) bits |= Word((line[j] & finite.exponents) + finite.step);
                const int words = int((bytes + long(sizeof(Word)) - 1) / long(sizeof(Word)));
                if (words == LINE)
                    for (int j = 0; j < LINE; j++) to[j * PANEL] = line[j];
                else
                    for (int j = 0; j < words; j++) to[j * PANEL] = line[j];
            }
    return !(bits & finite.signs);
}

template <class Word>
bool pack_rows(const char* rows, long stride, char* packed, int outputs, int inputs, int kind, int first, int count,
               const Finite<Word>& finite) {
    const long row_bytes = long(inputs) * (kind == FLOAT32 ? 4 : 2), words = words_of(kind, inputs);
    const int begin = first / PANEL, end = (first + count + PANEL - 1) / PANEL;
    std::atomic<bool> all_finite{true};
    parallel_for(end - begin, max_threads(), [&](int64_t index) {
        const int panel = begin + int(index), start = panel * PANEL;
        const int from = std::max(start, first), to = std::min(start + PANEL, first + count);
        Word* const lanes = (Word*)packed + panel * words * PANEL;
        if (!pack_lanes(rows + (from - first) * stride, stride, row_bytes, lanes + (from - start), to - from, finite))
            all_finite.store(false, std::memory_order_relaxed);
        if (to == outputs)  // the rest of the last panel
            for (long word = 0; word < words; word++)
                for (int lane = to - start; lane < PANEL; lane++) lanes[word * PANEL + lane] = 0;
    });
    return all_finite.load();
}

float half_to_float(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
    if ((bits & 0x7c00) == 0x7c00) {
        const uint32_t special = sign | magnitude | 0x7f800000u;
        return load<float>(&special);
    }
    // The exponent's bias grows from 15 to 127; subnormal numbers become normal ones in the product.
    return load<float>(&magnitude) * 0x1p112f * (sign ? -1.f : 1.f);
}

// Rows of a weight matrix: row i is that of id `first` + i. As in kernels/cpu/linear/packed_rows.py.
struct Table {
    const char* weights;
    const CodesLayer* codes;  // of packed codes; or null
    int64_t stride;           // bytes between plain rows; 0: the rows are packed
    int64_t first, count;
    int32_t inputs, kind;
    float factor;
};

// Calls put(index, number) for all inputs of an output whose codes are integers.
template <int KIND, class Put>
void decode_output(const CodesLayer& layer, const Layout& layout, int64_t output, Put&& put) {
    const char* panel = layer.packed + output / PANEL * layout.panel_bytes;
    const int in_panel = int(output % PANEL), v = in_panel / VF, lane = in_panel % VF;
    for (int block = 0; block < layout.blocks; block++) {
        const char* at = panel + layout.of(block);
        const Scales by = scales_of(layer, layout, panel + layout.head_of(block), at, v);
        const float scale = by.scale[lane], min = by.min[lane];
        const int zero = layer.offset + (layer.has_zeros ? int8_t(at[layout.zeros + in_panel]) : 0);
        const int first = block * layer.block, words = std::min(layer.block, layer.packed_inputs - first) / WORD;
        for (int word = 0; word < words; word++) {
            vint pairs[4];
            for (int j = 0; j < 4; j++) pairs[j] = decode_pair<KIND>(at + layout.codes, word, j, v);
            for (int j = 0; j < WORD; j++) {
                const int code = j < 4 ? int16_t(pairs[j][lane]) : pairs[j - 4][lane] >> 16;
                const int packed = first + word * WORD + j, input = layer.order ? layer.order[packed] : packed;
                if (input >= 0 && input < layer.inputs) put(input, float(code - zero) * scale + min);
            }
        }
    }
}

class Gather final : public Operation {
  public:
    Gather(const Table& table, const int64_t* ids, void* out, int64_t rows, bool is_bf16)
        : table_(table), layout_(table.codes ? Layout(*table.codes) : Layout()), ids_(ids), out_(out), rows_(rows),
          is_bf16_(is_bf16) {
        pieces_ = rows * table.inputs > GATHER_THREADS_FROM ? std::min<int64_t>(rows, 4 * max_threads()) : 1;
    }

    int64_t begin(int stage) override { return stage == 0 ? (rows_ > 0 ? pieces_ : 0) : -1; }

    void run(int64_t piece) override {
        for (int64_t row = piece * rows_ / pieces_; row < (piece + 1) * rows_ / pieces_; row++)
            if (is_bf16_)
                write((uint16_t*)out_ + row * table_.inputs, ids_[row] - table_.first);
            else
                write((float*)out_ + row * table_.inputs, ids_[row] - table_.first);
    }

  private:
    template <class T>
    void write(T* to, int64_t row) const {
        if (row < 0 || row >= table_.count) return void(std::memset(to, 0, table_.inputs * sizeof(T)));
        if (table_.codes) return decode(to, row);
        if (table_.kind == FLOAT32) return copy<float>(to, row, [](const float* at) { return *at; });
        if (table_.kind == FLOAT16) return copy<uint16_t>(to, row, [](const uint16_t* at) { return half_to_float(*at); });
        copy<uint16_t>(to, row, [](const uint16_t* at) { return to_float(*at); });
    }

    // Calls widen(address) for each of the row's numbers.
    template <class Number, class T, class Widen>
    void copy(T* to, int64_t row, Widen&& widen) const {
        const float factor = table_.factor;
        if (table_.stride) {
            const Number* from = (const Number*)(table_.weights + row * table_.stride);
            for (int i = 0; i < table_.inputs; i++) store_float(to + i, widen(from + i) * factor);
            return;
        }
        const int pair = table_.kind == BFLOAT16 ? 2 : 1;
        const long words = words_of(table_.kind, table_.inputs);
        const Number* from = (const Number*)table_.weights + (row / PANEL * words * PANEL + row % PANEL) * pair;
        for (int i = 0; i < table_.inputs; i++)
            store_float(to + i, widen(from + i / pair * PANEL * pair + i % pair) * factor);
    }

    template <class T>
    void decode(T* to, int64_t row) const {
        const CodesLayer& codes = *table_.codes;
        const auto put = [&](int input, float number) { store_float(to + input, number * table_.factor); };
        switch (codes.kind) {
            case CODES_8: return decode_output<CODES_8>(codes, layout_, row, put);
            case CODES_4: return decode_output<CODES_4>(codes, layout_, row, put);
            case CODES_5: return decode_output<CODES_5>(codes, layout_, row, put);
            case CODES_6: return decode_output<CODES_6>(codes, layout_, row, put);
            default: return decode_output<CODES_FP4>(codes, layout_, row, put);
        }
    }

    Table table_;
    Layout layout_;
    const int64_t* ids_;
    void* out_;
    int64_t rows_, pieces_;
    bool is_bf16_;
};

}  // namespace

// Writes rows [first, first + count), `stride` bytes apart, in the element type of `packed`. Returns whether all their
// numbers are finite. With the last row, outputs past the end become zeros.
QUIRE_API int quire_pack_rows(const char* rows, long stride, char* packed, int outputs, int inputs, int kind, int first,
                              int count) {
    if (kind == FLOAT16)
        return pack_rows(rows, stride, packed, outputs, inputs, kind, first, count, FINITE_FLOAT16);
    const Finite<uint32_t>& finite = kind == BFLOAT16 ? FINITE_BFLOAT16 : FINITE_FLOAT32;
    return pack_rows(rows, stride, packed, outputs, inputs, kind, first, count, finite);
}

// Writes the row of each id, times the table's factor, to out: [rows][inputs], float32 or bfloat16. Ids of other rows
// give zeros.
QUIRE_API void quire_gather(const Table* table, const int64_t* ids, void* out, long rows, int out_is_bf16) {
    execute(Gather(*table, ids, out, rows, out_is_bf16));
}

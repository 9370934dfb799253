// Addends of LoRA adapters: y += scale * (x A^T) B^T, for rows that use different adapters (kernels/lora/lora.py).
//
// A and B are read as they are, row-major with `rank` rows each, so that an adapter is served from where it was loaded.
// The order of additions is part of the contract, in any tile: a number of the shrink is the sum of a register's lanes,
// each of which adds the products of every VF-th input (or pair of inputs) in ascending order; an addend adds its
// products in ascending order of the rank, from zero. A row's bits depend on that row and its adapter alone.
#include <algorithm>
#include <vector>

#include "linear/lora_tiles.h"
#include "native/plan.h"

using namespace quire;

namespace {

constexpr int MOST_ROWS = 32;   // of a piece: their inputs stay in L2 while A is read
constexpr int FEWEST_ROWS = 8;  // of a piece, if a slot's rows are divided: each piece reads all of A and B
constexpr int64_t SHARE_BYTES = 16 * 1024;  // of A or B: the next ones are prefetched while some are computed with

// In bytes read of A and B. Computing with ROWS_PER_READ rows takes as long as reading.
constexpr double ROWS_PER_READ = 6;
constexpr double THREADS_FROM = 100e3;  // less takes less time than waiting for other threads
constexpr double STAGES_FROM = 1e6;     // less takes less time than one more stage

struct Tile {  // as `AdapterRows.tiles`
    int32_t slot, first, end;
};

struct Call {
    const Part* parts;  // [slots][max_parts]
    const Tile* tiles;  // [max_tiles]; the first without rows is the end
    const int32_t* order;
    const void* x;
    void* y;
    int64_t x_stride, y_stride, inputs;
    int32_t max_parts, max_tiles, is_bf16;
};

// Rows of one slot, as indices in `order`.
struct Rows {
    const Part* part;  // of the slot; as many as have a rank, at most max_parts
    int64_t first, end;
};

// A share of the work for some rows: numbers of a part's rank, or outputs of a part, [from, to).
struct Share {
    const Part* part;  // null: none
    bool expands;
    int64_t from, to;
};

class AddAdapters final : public Operation {
  public:
    explicit AddAdapters(const Call& call) : call_(call) {}

    // Either one stage, whose pieces are all addends of some rows, or two, the shrink and the expand, whose pieces are
    // shares of parts. One stage is faster if it has pieces for all threads; each stage takes some microseconds more.
    int64_t begin(int stage) override {
        if (stage == 0) {
            const int threads = max_threads();
            const double bytes = find_rows(threads);
            alone_ = threads == 1 || bytes < THREADS_FROM;
            divided_ = !alone_ && int64_t(rows_.size()) < 2 * threads && bytes >= STAGES_FROM;
            if (!divided_) return alone_ && !rows_.empty() ? 1 : int64_t(rows_.size());
        }
        if (stage > int(divided_)) return -1;
        expanding_ = stage == 1;
        find_shares();
        return int64_t(shares_.size());
    }

    void run(int64_t piece) override { call_.is_bf16 ? run_as<Pairs>(piece) : run_as<Floats<float>>(piece); }

    const char* name() const override { return "adapters"; }

  private:
    // Divides the rows of each slot, and returns the bytes that would take as long to read as all addends take.
    double find_rows(int threads) {
        const Tile *tile = call_.tiles, *tiles_end = tile;
        while (tiles_end < call_.tiles + call_.max_tiles && tiles_end->end) tiles_end++;
        const int64_t count = tile < tiles_end ? tiles_end[-1].end : 0;
        const int64_t most = std::clamp<int64_t>(count / (2 * threads), FEWEST_ROWS, MOST_ROWS);
        rows_.clear();
        double bytes = 0;
        while (tile < tiles_end) {
            const int64_t slot = tile->slot, first = tile->first;
            while (tile < tiles_end && tile->slot == slot) tile++;
            const int64_t end = tile[-1].end;
            const Part* const part = call_.parts + slot * call_.max_parts;
            if (!part->rank) continue;
            const int64_t blocks = (end - first + most - 1) / most;
            for (int64_t j = 0; j < blocks; j++)
                rows_.push_back({part, first + (end - first) * j / blocks, first + (end - first) * (j + 1) / blocks});
            for (const Part* each = part; each < part + call_.max_parts; each++)
                bytes += double(each->rank * (call_.inputs + each->outputs) * number_bytes()) *
                         (1 + double(end - first) / ROWS_PER_READ);
        }
        return bytes;
    }

    // A share that is read in about SHARE_BYTES, from a number of the rank or an output.
    Share share(const Part* part, bool expands, int64_t from) const {
        const int64_t all = expands ? part->outputs : part->rank, unit = expands ? WIDE : SHRINK_RANKS;
        const int64_t bytes = number_bytes() * (expands ? part->rank : call_.inputs);
        const int64_t shares = std::max<int64_t>(1, (all * bytes + SHARE_BYTES - 1) / SHARE_BYTES);
        const int64_t each = (all + shares * unit - 1) / (shares * unit) * unit;
        return {part, expands, from, std::min(all, from + each)};
    }
    Share first_share(const Rows& rows) const { return share(rows.part, false, 0); }
    Share share_after(const Rows& rows, const Share& of) const {
        if (of.to < (of.expands ? of.part->outputs : of.part->rank)) return share(of.part, of.expands, of.to);
        if (!of.expands) return share(of.part, true, 0);
        const Part* const next = of.part + 1;
        return next < rows.part + call_.max_parts && next->rank ? share(next, false, 0) : Share{};
    }
    Ahead memory(const Share& of) const {
        if (!of.part) return Ahead();
        const int64_t size = number_bytes(), a_row = call_.inputs * size, b_row = of.part->outputs * size;
        return of.expands ? Ahead(of.part->b + of.from * size, of.part->rank, (of.to - of.from) * size, b_row)
                          : Ahead(of.part->a + of.from * a_row, of.to - of.from, a_row, a_row);
    }

    void find_shares() {
        shares_.clear();
        int64_t shrunk = 0;
        for (const Rows& rows : rows_) {
            for (Share next = first_share(rows); next.part; next = share_after(rows, next)) {
                if (next.expands == expanding_) shares_.push_back({&rows, next, shrunk});
                if (next.expands && next.to == next.part->outputs) shrunk += (rows.end - rows.first) * next.part->rank;
            }
        }
        if (int64_t(shrunk_.size()) < shrunk) shrunk_.resize(shrunk);
    }

    template <class D>
    void run_as(int64_t piece) {
        if (divided_) {
            const Placed& of = shares_[piece];
            return run_share<D>(of.share, Pointers<typename D::number>(call_, *of.rows), shrunk_.data() + of.shrunk,
                                Ahead());
        }
        if (!alone_) return add<D>(piece, piece + max_threads());  // this thread's next piece is probably that one
        for (size_t i = 0; i < rows_.size(); i++) add<D>(i, i + 1);
    }

    // Adds all addends of some rows. next: index of the rows whose memory is read next.
    template <class D>
    void add(size_t index, size_t next) {
        static thread_local std::vector<float> shrunk;
        const Rows& rows = rows_[index];
        const Pointers<typename D::number> at(call_, rows);
        for (Share now = first_share(rows); now.part;) {
            const size_t numbers = size_t(at.count * now.part->rank);
            if (shrunk.size() < numbers) shrunk.resize(numbers);
            const Share then = share_after(rows, now);
            const bool last = !then.part && next < rows_.size();
            run_share<D>(now, at, shrunk.data(), memory(last ? first_share(rows_[next]) : then));
            now = then;
        }
    }

    template <class D, class Pointers>
    void run_share(const Share& of, const Pointers& at, float* shrunk, const Ahead& ahead) {
        if (of.expands)
            expand(*of.part, shrunk, at.y, at.count, of.from, of.to, ahead);
        else
            shrink<D>(*of.part, at.x, at.count, call_.inputs, of.from, of.to, shrunk, ahead);
    }

    template <class T>
    struct Pointers {
        const T* x[MOST_ROWS];
        T* y[MOST_ROWS];
        int count;
        Pointers(const Call& call, const Rows& of) : count(int(of.end - of.first)) {
            for (int i = 0; i < count; i++) {
                const int64_t row = call.order[of.first + i];
                x[i] = (const T*)call.x + row * call.x_stride, y[i] = (T*)call.y + row * call.y_stride;
            }
        }
    };

    int64_t number_bytes() const { return call_.is_bf16 ? 2 : 4; }

    Call call_;
    bool alone_ = false, divided_ = false, expanding_ = false;
    std::vector<Rows> rows_;
    struct Placed {
        const Rows* rows;
        Share share;
        int64_t shrunk;  // where the part's shrunk rows are in shrunk_
    };
    std::vector<Placed> shares_;  // of a stage, if there are two
    std::vector<float> shrunk_;
};

}  // namespace

// y[row] += the addends of the row's slot.
QUIRE_API void quire_add_adapters(const Part* parts, int max_parts, const Tile* tiles, int max_tiles,
                                  const int32_t* order, const void* x, long x_stride, long inputs, void* y,
                                  long y_stride, int is_bf16) {
    execute(AddAdapters({parts, tiles, order, x, y, x_stride, y_stride, inputs, max_parts, max_tiles, is_bf16}));
}

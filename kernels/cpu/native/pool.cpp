// Implementation of pool.h.
//
// A stage of an operation is a *turn*. One word holds the number of the turn and the next piece, so that taking a piece
// proves that what was read of the turn before is still valid. The thread that completes the last piece of a turn begins
// the next one, whichever thread it is: the work needs no thread but those that have a core.
#include "native/pool.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "native/common.h"

namespace quire {
namespace {

constexpr int PIECE_BITS = 24;
constexpr uint64_t CLOSED = (1 << PIECE_BITS) - 1;  // in place of a piece: the turn's data is being replaced
constexpr int MOST_THREADS = 256;
constexpr int SPINS = 4000;         // about 0.1 ms: longer than the pause between two layers, shorter than between steps
constexpr int REPEAT_AFTER = 300;   // about 8 us without a piece to take: the piece of a late thread is repeated

QUIRE_INLINE void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits a little; after many waits, gives the core to a thread that may need it.
QUIRE_INLINE void wait(int& waits) {
    if (waits++ < SPINS)
        pause();
    else
        sched_yield();
}

uint64_t piece_of(uint64_t word) { return word & CLOSED; }
uint64_t turn_of(uint64_t word) { return word >> PIECE_BITS; }

char* own_scratch(int64_t bytes) {
    static thread_local std::vector<char> memory;
    if (int64_t(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

class Pool {
  public:
    int64_t run(Operation* const* operations, int64_t count, int threads, bool kept) {
        if (threads <= 1 || !serving_.try_lock()) return run_alone(operations, count);
        threads = std::min(threads, MOST_THREADS);
        for (; threads_ < threads; threads_++) std::thread(&Pool::help, this, threads_).detach();
        allowed_.store(threads, std::memory_order_relaxed);
        operations_ = operations, num_operations_ = count, kept_ = kept;
        at_ = 0, stage_ = -1, over_.store(false), error_ = 0;
        begin_next();
        if (!over_.load() && sleeping_.load() > 0) {
            // A helper that counted itself as sleeping may not wait yet. It holds the mutex until it does, so that
            // taking the mutex once is enough for it not to miss the call.
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        for (int waits = 0; !over_.load(std::memory_order_acquire);)
            if (work(0, waits))
                waits = 0;
            else
                wait(waits);
        const int64_t error = error_;
        serving_.unlock();
        return error;
    }

    void wait_for_late_threads() {
        std::lock_guard<std::mutex> lock(serving_);
        for (const Flag& late : late_)
            for (int waits = 0; late.set.load();) wait(waits);
    }

  private:
    // What a thread reads of a turn, valid if the word is unchanged afterwards.
    struct Turn {
        uint64_t word;
        Operation* operation;
        uint64_t count;
        int64_t scratch;  // not 0: pieces may be repeated
    };

    static int64_t run_alone(Operation* const* operations, int64_t count) {
        int64_t error = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t pieces;
            for (int stage = 0; (pieces = operations[i]->begin(stage)) >= 0; stage++)
                for (int64_t piece = 0; piece < pieces; piece++) operations[i]->run(piece);
            if (!error) error = operations[i]->error();
        }
        return error;
    }

    // Begins the next turn. Only the thread that ended the one before calls it. Turns of one piece run here at once: to
    // hand them over would take longer than most of them.
    void begin_next() {
        const uint64_t turn = turn_of(next_.load(std::memory_order_relaxed)) + 1;
        // First, before the turn's data is replaced: no thread may take a piece that is not ready.
        next_.store(turn << PIECE_BITS | CLOSED);
        for (;;) {
            if (at_ == num_operations_) return over_.store(true, std::memory_order_release);
            Operation* const operation = operations_[at_];
            const int64_t pieces = operation->begin(++stage_);
            if (pieces < 0) {
                if (!error_) error_ = operation->error();
                at_++, stage_ = -1;
            } else if (pieces == 1) {
                operation->run(0);
            } else if (pieces > 1) {
                const int64_t scratch = kept_ && pieces <= MOST_REPEATABLE ? operation->scratch_bytes() : 0;
                operation_.store(operation, std::memory_order_release);
                count_.store(uint64_t(pieces), std::memory_order_release);
                scratch_.store(scratch, std::memory_order_release);
                done_.store(0, std::memory_order_release);
                // Last: a thread that takes a piece of this turn has read all of the above.
                next_.store((turn + 1) << PIECE_BITS);
                return;
            }
        }
    }

    Turn read_turn() const {
        Turn turn;
        turn.word = next_.load();
        turn.operation = operation_.load(std::memory_order_acquire);
        turn.count = count_.load(std::memory_order_acquire);
        turn.scratch = scratch_.load(std::memory_order_acquire);
        return turn;
    }

    // Computes one piece, if there is one to take, or after some waits to compute again.
    bool work(int id, int waits) {
        late_[id].set.store(true);  // first: wait_for_late_threads then sees any thread that uses a turn of its plan
        const Turn turn = read_turn();
        bool worked = false;
        if (piece_of(turn.word) < turn.count)
            worked = take(turn);
        else if (waits >= REPEAT_AFTER && turn.scratch && piece_of(turn.word) != CLOSED)
            worked = repeat(turn, id);
        late_[id].set.store(false);
        return worked;
    }

    bool take(const Turn& turn) {
        uint64_t word = turn.word;
        if (!next_.compare_exchange_strong(word, word + 1)) return true;  // another thread took it: there may be more
        const int64_t piece = int64_t(piece_of(turn.word));
        if (turn.scratch) {
            compute_and_commit(turn, piece);
        } else {
            turn.operation->run(piece);
            count_done(turn);
        }
        return true;
    }

    bool repeat(const Turn& turn, int id) {
        if (next_.load() != turn.word) return true;
        for (uint64_t i = 0; i < turn.count; i++) {
            // Begins at its own number, so that several waiting threads repeat different pieces.
            const int64_t piece = int64_t((i + id) % turn.count);
            if (committed_[piece].load() < turn_of(turn.word)) return compute_and_commit(turn, piece);
        }
        return false;
    }

    bool compute_and_commit(const Turn& turn, int64_t piece) {
        char* const scratch = own_scratch(turn.scratch);
        turn.operation->compute(piece, scratch);
        const uint64_t number = turn_of(turn.word);
        uint64_t last = committed_[piece].load();
        // One thread alone gets past this and writes the output. It counts the piece only afterwards, so that the next
        // turn, which begins at the last count, reads complete outputs.
        if (last >= number || !committed_[piece].compare_exchange_strong(last, number)) return false;
        turn.operation->commit(piece, scratch);
        count_done(turn);
        return true;
    }

    void count_done(const Turn& turn) {
        if (done_.fetch_add(1) + 1 == turn.count) begin_next();
    }

    bool may_work(int id) const { return !over_.load() && id < allowed_.load(); }

    [[noreturn]] void help(int id) {
        for (;;) {
            for (int waits = 0; waits < SPINS || may_work(id);)
                if (may_work(id) && work(id, waits))
                    waits = 0;
                else
                    wait(waits);
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_++;
            wake_.wait(lock, [&] { return may_work(id); });
            sleeping_--;
        }
    }

    alignas(64) std::atomic<uint64_t> next_{CLOSED};
    alignas(64) std::atomic<uint64_t> done_{0};
    // The turn.
    alignas(64) std::atomic<Operation*> operation_{nullptr};
    std::atomic<uint64_t> count_{0};
    std::atomic<int64_t> scratch_{0};
    // For each piece the last turn in which it was committed; turns of plans only.
    std::atomic<uint64_t> committed_[MOST_REPEATABLE] = {};
    // The run: written by the thread that begins a turn.
    Operation* const* operations_ = nullptr;
    int64_t num_operations_ = 0, at_ = 0, error_ = 0;
    int stage_ = -1;
    bool kept_ = false;
    std::atomic<bool> over_{true};
    std::atomic<int> allowed_{0}, sleeping_{0};
    std::mutex mutex_, serving_;
    std::condition_variable wake_;
    int threads_ = 1;  // guarded by serving_; the caller is thread 0
    // For each thread whether it may use a turn, also one that is over.
    struct alignas(64) Flag {
        std::atomic<bool> set{false};
    };
    Flag late_[MOST_THREADS];
};

// Never destroyed: its threads run until the process exits. A forked child inherits none of them and starts its own.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    Pool* found = pool.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    (void)registered;
    Pool* made = new Pool;
    if (pool.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

}  // namespace

int max_threads() { return omp_get_max_threads(); }

int64_t run_operations(Operation* const* operations, int64_t count, int threads, bool kept) {
    return the_pool().run(operations, count, threads, kept);
}

void wait_for_late_threads() { the_pool().wait_for_late_threads(); }

}  // namespace quire

// Number of threads of a call, for the test that torch's setting controls it.
QUIRE_API int quire_threads() { return quire::max_threads(); }

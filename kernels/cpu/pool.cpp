// Implementation of pool.h.
#include "pool.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common.h"

namespace quire {
namespace {

constexpr uint32_t CLOSED = 0xffffffffu;
constexpr int SPINS = 4000;  // about 0.1 ms: longer than the pause between two layers, shorter than between two steps

QUIRE_INLINE void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    void run(int64_t count, int threads, Task task, void* context) {
        if (count >= CLOSED || !serving_.try_lock()) {
            for (int64_t i = 0; i < count; i++) task(context, i);
            return;
        }
        while (helpers_ < threads - 1) std::thread(&Pool::help, this, helpers_++).detach();
        task_.store(task, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        allowed_.store(threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const uint64_t round = (next_.load(std::memory_order_relaxed) >> 32) + 1;
        next_.store(round << 32);
        if (sleeping_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work();
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS)
                pause();
            else
                sched_yield();  // the thread with the last piece may be waiting for this core
        }
        // First, before this round's data is overwritten: no thread may take a piece that is not ready.
        next_.store(round << 32 | CLOSED);
        serving_.unlock();
    }

  private:
    // One word holds the next piece's number and the round's number. So taking a piece proves that the round's data that
    // was read before is still valid.
    bool take(Task& task, void*& context, uint32_t& index) {
        uint64_t now = next_.load(std::memory_order_acquire);
        for (;;) {
            index = uint32_t(now);
            task = task_.load(std::memory_order_relaxed);
            context = context_.load(std::memory_order_relaxed);
            if (index == CLOSED || index >= count_.load(std::memory_order_relaxed)) return false;
            if (next_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
        }
    }

    bool work() {
        Task task;
        void* context;
        uint32_t index;
        bool worked = false;
        while (take(task, context, index)) {
            task(context, index);
            done_.fetch_add(1, std::memory_order_release);
            worked = true;
        }
        return worked;
    }

    bool open(int id) const {
        const uint64_t now = next_.load();
        return uint32_t(now) != CLOSED && uint32_t(now) < count_.load() && id < allowed_.load();
    }

    [[noreturn]] void help(int id) {
        for (;;) {
            for (int spins = 0; spins < SPINS; spins++) {
                if (open(id) && work()) spins = 0;
                pause();
            }
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_++;
            wake_.wait(lock, [&] { return open(id); });
            sleeping_--;
        }
    }

    alignas(64) std::atomic<uint64_t> next_{CLOSED};
    alignas(64) std::atomic<int64_t> done_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> count_{0};
    std::atomic<int> allowed_{0}, sleeping_{0};
    std::mutex mutex_, serving_;
    std::condition_variable wake_;
    int helpers_ = 0;  // guarded by serving_
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

void run_pieces(int64_t count, int threads, Task task, void* context) { the_pool().run(count, threads, task, context); }

}  // namespace quire

// Number of threads of a call, for the test that torch's setting controls it.
QUIRE_API int quire_threads() { return quire::max_threads(); }

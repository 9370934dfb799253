// The library's threads, and operations whose pieces they compute. torch's setting (omp_get_max_threads) is the number
// of threads.
//
// An OpenMP region ends when all its threads have reached its end. If other processes use the cores too (the scheduler,
// the front end, a client), a thread may get no core for milliseconds, and each of a step's hundreds of regions would
// wait for a thread that has nothing to do. Here each running thread takes the next piece, whichever thread has computed
// the last piece of an operation begins the next one, and a piece of a thread that has lost its core is repeated by
// another thread, if the operation allows it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

int max_threads();

// One call of a kernel: stages that follow each other, each divided into pieces that may be computed at the same time.
class Operation {
  public:
    virtual ~Operation() = default;

    // Prepares a stage, counted from 0, and returns its number of pieces; negative after the last stage. One thread
    // calls it, when all pieces of the stage before are done.
    virtual int64_t begin(int stage) = 0;

    // Computes a piece of the stage.
    virtual void run(int64_t piece) = 0;

    // Bytes of a thread's memory in which a piece's result fits. Not 0: the stage may be computed piece by piece with
    // `compute` and `commit` instead of `run`. Several threads may then compute a piece, and one of them commits it. A
    // late thread may still compute, from inputs that have been overwritten, after the operation is complete: it reads
    // only memory that belongs to the plan or to a layer, and writes only to `scratch`.
    virtual int64_t scratch_bytes() const { return 0; }
    virtual void compute(int64_t, char* /* scratch */) {}
    virtual void commit(int64_t, const char* /* scratch */) {}

    // What it computes, for a profile of a plan.
    virtual const char* name() const { return "other"; }

    // 0, or what was wrong with the arguments, as an error code of the operation.
    virtual int64_t error() const { return 0; }
};

constexpr int64_t MOST_REPEATABLE = 256;  // pieces of a stage that is computed with `compute` and `commit`

// Runs operations one after the other on up to `threads` threads, including the caller. While one call uses the threads,
// other callers run their operations alone. Returns the first error; later operations run all the same.
//
// kept: the operations belong to a plan, which waits for late threads before it frees them (wait_for_late_threads).
int64_t run_operations(Operation* const* operations, int64_t count, int threads, bool kept);
void wait_for_late_threads();

// A few runs per thread, so that the wait for the last run is short.
inline int64_t runs_of(int64_t count, int threads) {
    return threads <= 1 ? std::min<int64_t>(count, 1) : std::min<int64_t>(count, 4 * int64_t(threads));
}

// An operation of one stage over `count` rows, which are independent of each other.
class RowOperation : public Operation {
  public:
    // many: whether there is more work than waiting for other threads would cost.
    RowOperation(int64_t count, bool many) : count_(count), many_(many) {}
    int64_t begin(int stage) final {
        if (stage) return -1;
        start();
        return runs_ = runs_of(count_, many_ ? max_threads() : 1);
    }
    void run(int64_t piece) final { run_rows(piece * count_ / runs_, (piece + 1) * count_ / runs_); }

  protected:
    virtual void start() {}
    virtual void run_rows(int64_t first, int64_t last) = 0;

  private:
    int64_t count_, runs_ = 1;
    bool many_;
};

// Notes that this thread did work which a plan would not repeat (plan.h).
void note_unrecorded();

template <class Body>
class Pieces final : public Operation {
  public:
    Pieces(int64_t count, Body& body) : count_(count), body_(body) {}
    int64_t begin(int stage) override { return stage == 0 ? count_ : -1; }
    void run(int64_t piece) override { body_(piece); }

  private:
    int64_t count_;
    Body& body_;
};

// Runs body(i) for every i in [0, count), outside plans. Returns when all are done.
template <class Body>
inline void parallel_for(int64_t count, int threads, Body&& body) {
    note_unrecorded();
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    Pieces<Body> pieces(count, body);
    Operation* const operation = &pieces;
    run_operations(&operation, 1, threads, false);
}

// Runs body(first, last) over [0, count) in runs_of(count, threads) runs.
template <class Body>
inline void parallel_runs(int64_t count, int threads, Body&& body) {
    const int64_t runs = runs_of(count, threads);
    parallel_for(runs, threads, [&](int64_t i) { body(i * count / runs, (i + 1) * count / runs); });
}

}  // namespace quire

// A thread pool of the library. torch's setting (omp_get_max_threads) is the number of threads.
//
// An OpenMP region ends when all its threads have reached its end. If other processes use the cores too (the scheduler,
// the front end, a client), a thread may get no core for milliseconds. Each of a step's hundreds of regions would then
// wait for a thread that has nothing to do. In this pool each running thread takes the next piece, and a call waits only
// for pieces that have started.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

int max_threads();

typedef void (*Task)(void* context, int64_t index);

// Runs task(context, i) for every i in [0, count) on up to `threads` threads, including the caller. Returns when all
// are done. While one call uses the pool, other callers run their tasks alone.
void run_pieces(int64_t count, int threads, Task task, void* context);

template <class Body>
inline void parallel_for(int64_t count, int threads, Body&& body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_pieces(count, threads, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Runs body(first, last) over [0, count) in a few runs per thread, so that the wait for the last run is short.
template <class Body>
inline void parallel_runs(int64_t count, int threads, Body&& body) {
    const int64_t runs = std::min<int64_t>(count, 4 * int64_t(threads));
    if (threads <= 1 || runs <= 1) return body(int64_t(0), count);
    parallel_for(runs, threads, [&](int64_t i) { body(i * count / runs, (i + 1) * count / runs); });
}

}  // namespace quire

// Work shared among threads. torch's setting says how many (omp_get_max_threads); the threads are our own.
//
// OpenMP's regions end when every thread has come to their end. Where other processes want the cores too (the scheduler,
// the front end, a client), a thread may get none for milliseconds: each of a step's hundreds of regions then waits
// for one that has nothing to do. Here whoever runs takes the next piece, and only pieces that were begun are waited for.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

int max_threads();

typedef void (*Task)(void* context, int64_t index);

// task(context, i) for every i in [0, count), by up to `threads` threads, of which the caller is one. Returns when all
// are done. Callers that come while another is served do their work alone.
void run_pieces(int64_t count, int threads, Task task, void* context);

template <class Body>
inline void parallel_for(int64_t count, int threads, Body&& body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_pieces(count, threads, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// body(first, last) over [0, count) in runs: a few per thread, so that nobody waits long for the last one.
template <class Body>
inline void parallel_runs(int64_t count, int threads, Body&& body) {
    const int64_t runs = std::min<int64_t>(count, 4 * int64_t(threads));
    if (threads <= 1 || runs <= 1) return body(int64_t(0), count);
    parallel_for(runs, threads, [&](int64_t i) { body(i * count / runs, (i + 1) * count / runs); });
}

}  // namespace quire

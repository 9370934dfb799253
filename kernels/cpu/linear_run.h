// What all products share: the division among threads, and the memory of packed weights.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "linear_panels.h"
#include "pool.h"

namespace quire {
namespace {

// Divides the panels among the threads; a narrow layer with many rows is divided along its rows too.
template <class AnyCall, class Part>
void run(const AnyCall& call, int rows, Part run_one) {
    const int panels = (call.outputs + PANEL - 1) / PANEL;
    const int threads = long(rows) * call.outputs * call.inputs > THREADS_FROM ? max_threads() : 1;
    const int row_parts = std::clamp(std::min((rows + 31) / 32, 8 * threads / panels), 1, threads);
    const int panel_parts = threads == 1 ? 1 : std::min(panels, std::max(1, PARTS_PER_THREAD * threads / row_parts));
    parallel_for(row_parts * panel_parts, threads, [&](int64_t part) {
        const long i = part / panel_parts, j = part % panel_parts;
        run_one(call, int(i * rows / row_parts), int((i + 1) * rows / row_parts), int(j * panels / panel_parts),
                int((j + 1) * panels / panel_parts));
    });
}

// Every step reads all of it, and page walks with small pages cost bandwidth. A failure of madvise is harmless.
void prefer_huge_pages([[maybe_unused]] void* packed, [[maybe_unused]] long bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21, start = (uintptr_t(packed) + page - 1) & ~(page - 1);
    const uintptr_t end = (uintptr_t(packed) + bytes) & ~(page - 1);
    if (end > start) madvise((void*)start, end - start, MADV_HUGEPAGE);
#endif
}

}  // namespace
}  // namespace quire

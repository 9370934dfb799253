// Implementation of plan.h, and its functions for Python (recorded_plan.py).
#include "native/plan.h"

#include <algorithm>
#include <chrono>

#include "native/common.h"

namespace quire {
namespace {

thread_local Plan* recording = nullptr;

}  // namespace

int64_t Plan::add_and_run(std::unique_ptr<Operation> operation) {
    owned_.push_back(std::move(operation));
    operations_.push_back(owned_.back().get());
    return run_operations(&operations_.back(), 1, max_threads(), false);
}

int64_t Plan::run() const { return run_operations(operations_.data(), int64_t(operations_.size()), max_threads(), true); }

void note_unrecorded() {
    if (recording) recording->complete = false;
}

int64_t Plan::profile(const char** names, double* seconds, int64_t most) const {
    int64_t count = 0;
    for (Operation* const operation : operations_) {
        const auto began = std::chrono::steady_clock::now();
        run_operations(&operation, 1, max_threads(), true);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        const int64_t at = std::find(names, names + count, operation->name()) - names;
        if (at == most) continue;
        if (at == count) names[count] = operation->name(), seconds[count++] = 0;
        seconds[at] += took.count();
    }
    return count;
}

Plan* recorded_plan() { return recording; }

}  // namespace quire

// Starts to record this thread's operations; the plan before, if it is still recorded, is dropped.
QUIRE_API void quire_plan_begin() {
    delete quire::recording;
    quire::recording = new quire::Plan;
}

// Returns the recorded plan, which belongs to the caller; null if it is not complete.
QUIRE_API void* quire_plan_end() {
    quire::Plan* plan = quire::recording;
    quire::recording = nullptr;
    if (!plan->complete) delete plan, plan = nullptr;
    return plan;
}

// Runs a plan; returns the first error of its operations.
QUIRE_API int64_t quire_plan_run(const void* plan) { return static_cast<const quire::Plan*>(plan)->run(); }

// As Plan::profile.
QUIRE_API int64_t quire_plan_profile(const void* plan, const char** names, double* seconds, int64_t most) {
    return static_cast<const quire::Plan*>(plan)->profile(names, seconds, most);
}

QUIRE_API void quire_plan_free(void* plan) { delete static_cast<quire::Plan*>(plan); }

// Implementation of plan.h, and its functions for Python (recorded_plan.py).
#include "plan.h"

#include "common.h"

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

QUIRE_API void quire_plan_free(void* plan) { delete static_cast<quire::Plan*>(plan); }

// A recorded plan: the operations of one pass through a model, which run again without their callers.
//
// Between quire_plan_begin and quire_plan_end, every operation that `execute` runs in that thread is also kept. All
// memory that it reads or writes must stay in place; what changes between two runs is written there before the second.
#pragma once

#include <memory>
#include <vector>

#include "native/pool.h"

namespace quire {

class Plan {
  public:
    ~Plan() { wait_for_late_threads(); }
    int64_t add_and_run(std::unique_ptr<Operation> operation);
    int64_t run() const;
    // Runs each operation alone, and adds its seconds to those of its name, in order of first use; returns their number.
    int64_t profile(const char** names, double* seconds, int64_t most) const;
    bool complete = true;  // whether everything that the thread did meanwhile is an operation of the plan

  private:
    std::vector<std::unique_ptr<Operation>> owned_;
    std::vector<Operation*> operations_;
};

// The plan that this thread records, or null.
Plan* recorded_plan();

// Runs an operation; while a plan is recorded, also keeps a copy of it there. Returns its error.
template <class Op>
inline int64_t execute(const Op& operation, int threads = max_threads()) {
    if (Plan* plan = recorded_plan()) return plan->add_and_run(std::make_unique<Op>(operation));
    Op once = operation;
    Operation* const alone = &once;
    return run_operations(&alone, 1, threads, false);
}

}  // namespace quire

"""Scenarios that once failed, reduced to the part that causes the failure, each with its cause."""

import pytest
from sim_run import play
from sim_scenario import Fault, Scenario, SimRequest
from tiers import thinned

LATER = Fault(9.0, "clock_jump")
"""Extends a run, so that armed damage to frames is still applied."""

KEPT = {
    # A duplicate result read the time of a step that did not exist: IndexError, and the scheduler died.
    "duplicate result": Scenario(
        6,
        (SimRequest(3.0, "a", 0, (0, 8), (1, 5), 20), SimRequest(3.0, "b", 0, (0, 8), (2, 5), 20)),
        (Fault(3.3, "twice"), Fault(4.5, "twice"), Fault(6.0, "twice")),
    ),
    # The last message to a front end was lost, and no message followed it: its client waited forever.
    "last message lost": Scenario(
        2,
        (SimRequest(3.0, "a", 0, (0, 8), (1, 5), 1),),
        (Fault(3.0, "to_front drop"), Fault(3.0, "to_front drop"), LATER),
    ),
    # A scheduler that could not answer a front end's Hello dropped it, and the front end did not retry.
    "Hello without an answer": Scenario(
        51,
        tuple(SimRequest(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(6)),
        (Fault(3.0, "not_reading", 1), Fault(3.05, "scheduler_dies")),
    ),
    # Hello or Ready of a worker was lost: both sides waited for each other, with requests in the queue.
    "worker's Hello lost": Scenario(
        17,
        tuple(SimRequest(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(4)),
        (Fault(3.0, "die_now"), Fault(3.01, "from_worker drop"), LATER),
    ),
    "a worker's configuration is lost": Scenario(
        17,
        tuple(SimRequest(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(4)),
        (Fault(3.0, "die_now"), Fault(3.01, "to_worker drop"), Fault(3.02, "to_worker drop"), LATER),
    ),
    # A request resubmitted to a new scheduler found a full queue and was rejected in the middle of its answer.
    "a full queue after a death": Scenario(
        47,
        tuple(SimRequest(2.6 + i / 200, f"r{i}", 0, (0, 0), (i, 9), 25) for i in range(14)),
        (Fault(3.4, "scheduler_dies"), Fault(5.0, "scheduler_dies")),
    ),
    # Steps after the workers ran out of memory read blocks that were never written. This is harmless, because their
    # results are stale; the case is kept for the code path.
    "out of memory while a prefix is shared": Scenario(
        67,
        (
            SimRequest(34.944, "r47", 0, (2, 24), (216, 7), 2, priority=1, salt="salt"),
            SimRequest(34.971, "r48", 4, (0, 0), (686, 7), 8, priority=5, then=("leave_at", 14), prompt_logprobs=2),
        ),
        (Fault(7.979, "front_dies"), Fault(35.032, "to_front replay", 3), Fault(35.076, "oom", 2)),
    ),
    # The first step after the last request ended hung: the step deadline must apply to it too.
    "a hang that nobody waits for": Scenario(
        226,
        (SimRequest(12.339, "r59", 0, (1, 5), (882, 4), 1, ignore_eos=False, salt="salt", then=("stop", 0)),),
        (Fault(3.545, "hang", 2), Fault(14.308, "front_dies", 1)),
    ),
    # The next scheduler could not start its trace, and the engine gave up with all its requests.
    "full disk and another scheduler": Scenario(
        11,
        (SimRequest(3.0, "a", 0, (0, 8), (1, 5), 20), SimRequest(3.0, "b", 1, (0, 8), (2, 5), 20)),
        (Fault(3.0, "trace_full"), Fault(3.3, "scheduler_dies")),
    ),
    # A front end's first messages were damaged five times in a row, and it reported an engine failure to its clients.
    "five damaged Hellos": Scenario(
        404997,
        (SimRequest(8.848, "r22", 3, (2, 0), (111, 4), 1, True, priority=1, logprobs=0),),
        tuple(Fault(7.2 + i / 100, "from_front flip") for i in range(7)),
    ),
    # The slots of drafts were not counted for a window: a preempted request waited forever, with the whole pool free.
    "pool of the exact size": Scenario(
        406999,
        (
            SimRequest(4.128, "r22", 2, (0, 24), (509, 11), 8, False, priority=5, even=True),
            SimRequest(6.484, "r34", 2, (0, 0), (183, 3), 2, False, priority=5, logprobs=0),
            SimRequest(9.29, "r43", 4, (2, 8), (790, 9), 2, True, priority=5, then=("stop", 2), logprobs=2),
        ),
        (Fault(4.551, "scheduler_dies_twice"),),
    ),
}


@pytest.mark.parametrize("name", thinned(KEPT, keep=2))
def test_kept_scenario_passes(name: str) -> None:
    outcome = play(KEPT[name])
    assert not outcome.failure
    assert outcome.faults, "none of its faults happened"

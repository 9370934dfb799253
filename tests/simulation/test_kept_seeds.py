"""Scenarios in which the simulation once found a defect, cut down to what it takes; each with what it was."""

import pytest
from sim_run import play
from sim_scenario import Ask, Fault, Scenario
from tiers import thinned

LATER = Fault(9.0, "clock_jump")
"""Until then what was to happen to a frame may happen."""

KEPT = {
    # A result that came twice took the answer time of a step that was not there: IndexError, the scheduler died.
    "an answer that comes twice": Scenario(
        6,
        (Ask(3.0, "a", 0, (0, 8), (1, 5), 20), Ask(3.0, "b", 0, (0, 8), (2, 5), 20)),
        (Fault(3.3, "twice"), Fault(4.5, "twice"), Fault(6.0, "twice")),
    ),
    # The last message to a front end was lost, and nothing came behind it: its client waited for ever.
    "the last message is lost": Scenario(
        2, (Ask(3.0, "a", 0, (0, 8), (1, 5), 1),), (Fault(3.0, "to_front drop"), Fault(3.0, "to_front drop"), LATER)
    ),
    # A scheduler that could not answer a front end's Hello forgot it, and the front end never asked again.
    "a front end is not welcomed": Scenario(
        51,
        tuple(Ask(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(6)),
        (Fault(3.0, "not_reading", 1), Fault(3.05, "scheduler_dies")),
    ),
    # Hello or Ready of a worker was lost: both sides waited for each other, with requests in the queue.
    "a worker's hello is lost": Scenario(
        17,
        tuple(Ask(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(4)),
        (Fault(3.0, "die_now"), Fault(3.01, "from_worker drop"), LATER),
    ),
    "a worker's configuration is lost": Scenario(
        17,
        tuple(Ask(2.6 + i / 10, f"r{i}", i, (0, 16), (i, 10), 8) for i in range(4)),
        (Fault(3.0, "die_now"), Fault(3.01, "to_worker drop"), Fault(3.02, "to_worker drop"), LATER),
    ),
    # Whoever was submitted again to a new scheduler found its queue full, and was refused in the middle of its answer.
    "a full queue after a death": Scenario(
        47,
        tuple(Ask(2.6 + i / 200, f"r{i}", 0, (0, 0), (i, 9), 25) for i in range(14)),
        (Fault(3.4, "scheduler_dies"), Fault(5.0, "scheduler_dies")),
    ),
    # Steps after the workers had run out of memory hit blocks that were never written (harmless: their results are
    # stale); here for the path.
    "out of memory while a prefix is shared": Scenario(
        67,
        (
            Ask(34.944, "r47", 0, (2, 24), (216, 7), 2, priority=1, salt="salt"),
            Ask(34.971, "r48", 4, (0, 0), (686, 7), 8, priority=5, then=("leave_at", 14), prompt_logprobs=2),
        ),
        (Fault(7.979, "front_dies"), Fault(35.032, "to_front replay", 3), Fault(35.076, "oom", 2)),
    ),
    # The first step after the last request had gone hung: it is found overdue all the same.
    "a hang that nobody waits for": Scenario(
        226,
        (Ask(12.339, "r59", 0, (1, 5), (882, 4), 1, ignore_eos=False, salt="salt", then=("stop", 0)),),
        (Fault(3.545, "hang", 2), Fault(14.308, "front_dies", 1)),
    ),
    # The next scheduler could not begin its trace, and the engine gave up with all its requests.
    "a full disk and another scheduler": Scenario(
        11,
        (Ask(3.0, "a", 0, (0, 8), (1, 5), 20), Ask(3.0, "b", 1, (0, 8), (2, 5), 20)),
        (Fault(3.0, "trace_full"), Fault(3.3, "scheduler_dies")),
    ),
    # A front end's first messages were damaged five times in a row, and it told its clients that the engine is gone.
    "five damaged greetings": Scenario(
        404997,
        (Ask(8.848, "r22", 3, (2, 0), (111, 4), 1, True, priority=1, logprobs=0),),
        tuple(Fault(7.2 + i / 100, "from_front flip") for i in range(7)),
    ),
    # The slots of drafts were not counted for a window: who was put out waited for ever, with the whole pool free.
    "a pool that is just large enough": Scenario(
        406999,
        (
            Ask(4.128, "r22", 2, (0, 24), (509, 11), 8, False, priority=5, even=True),
            Ask(6.484, "r34", 2, (0, 0), (183, 3), 2, False, priority=5, logprobs=0),
            Ask(9.29, "r43", 4, (2, 8), (790, 9), 2, True, priority=5, then=("stop", 2), logprobs=2),
        ),
        (Fault(4.551, "scheduler_dies_twice"),),
    ),
}


@pytest.mark.parametrize("name", thinned(KEPT, keep=4))
def test_it_stays_mended(name: str) -> None:
    outcome = play(KEPT[name])
    assert not outcome.failure
    assert outcome.faults, "none of its faults happened"

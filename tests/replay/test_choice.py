"""The choice of vLLM's client, which imitates measured runs."""

from types import SimpleNamespace
from typing import Any

from quire.replay.simulate.choice import VllmChoice
from quire.replay.workload.workload import Call


def engine(waiting: int = 0, running: int = 0) -> Any:
    return SimpleNamespace(table=SimpleNamespace(num_waiting=waiting, running=dict.fromkeys(range(running))))


CALL = Call(0, "0", 0.0, 1, 1)


def test_own_requests_count_as_waiting_and_the_first_of_equal_engines_is_chosen() -> None:
    choice = VllmChoice([engine(), engine(), engine()])
    assert [choice.choose(CALL, 0.05) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_published_loads_replace_own_requests_every_100_ms() -> None:
    engines = [engine(1, 1), engine(0, 4)]
    choice = VllmChoice(engines)
    for number in range(2):
        choice.advanced(number, 0.02)
    assert [choice.choose(CALL, 0.09) for _ in range(2)] == [0, 1], "nothing is published yet"
    engines[0].table.num_waiting = 9
    choice.advanced(0, 0.11)
    assert [choice.choose(CALL, 0.15) for _ in range(3)] == [1, 0, 1], "scores 5 and 4 as of 0.1 s"
    assert [choice.choose(CALL, 0.25) for _ in range(3)] == [1, 1, 1], "scores 37 and 4"

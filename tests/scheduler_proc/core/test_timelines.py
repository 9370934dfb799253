"""What happens to a request, as events for the client that asks for them."""

import pytest
from load_choices import FOUND, FRONT, PROMPT, engine_with_prefix
from scheduler_driver import Driver


def events_of(driver: Driver, name: str) -> list[tuple[str, str, int]]:
    driver.finish()
    assert driver.replay_lines() is None
    return [(each.event, each.reason, each.tokens) for each in driver.answers[name].timeline]


def test_a_preempted_request_tells_why_and_what_it_lost() -> None:
    driver = Driver(num_blocks=12, max_num_seqs=2)
    for name in "abc":
        driver.add(name, list(range(1, 18)), max_tokens=16, return_timeline=name == "b")
    begin = [("scheduled", "", 16), ("first_token", "", 0), ("preempted", "itself", 28)]
    assert events_of(driver, "b") == [*begin, ("scheduled", "", 28), ("ended", "", 0)]
    assert not driver.answers["a"].timeline and not driver.answers["c"].timeline, "only those that ask"


def test_a_fork_and_new_workers() -> None:
    driver = Driver()
    driver.add("parent", [1, 2, 3], max_tokens=9)
    driver.step()
    driver.add("fork", [], max_tokens=9, forked_from="parent", return_timeline=True)
    driver.step(2)
    driver.restart_worker()
    events = events_of(driver, "fork")
    assert [event[0] for event in events] == ["scheduled", "preempted", "scheduled", "ended"]
    assert events[0][2] > 0 and events[1][1] == "new_epoch"


@pytest.mark.full
def test_loaded_tokens_have_their_tier() -> None:
    engine = engine_with_prefix(4e-3)
    engine.add("again", PROMPT, max_tokens=4, return_timeline=True)
    split = [("scheduled", "", 0), ("preempted", "joins_load", FRONT), ("loaded", "host", FOUND - FRONT)]
    assert sorted(events_of(engine, "again")) == sorted(
        [*split, ("scheduled", "", FOUND), ("first_token", "", 0), ("ended", "", 0)]
    )

"""Worker deaths: no request loses a token, and a request that always crashes the workers is found and fails alone."""

from typing import Any

import pytest
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


class CrashingDriver(Driver):
    """A driver whose workers crash on some requests: ``crashes`` has the number of tokens after which they do."""

    def __init__(self, crashes: dict[str, int], **settings: Any) -> None:
        super().__init__(**({"max_num_seqs": 4} | settings))
        self.crashes = crashes
        self.num_deaths = 0
        self.died_with: list[list[str]] = []

    def execute(self) -> bool:
        if self._to_run:
            step: SchedulerOutput = self._to_run[0].message
            names = [row.request_id for row in self.worker.rows.values() if row.handle not in step.removed]
            names += [new.request_id for new in step.new_requests]
            for name in names:
                if name in self.crashes and len(self.answers[name].tokens) >= self.crashes[name]:
                    self.num_deaths += 1
                    self.died_with.append(sorted(set(names)))
                    self.restart_worker()
                    return True
        return super().execute()


def check(driver: CrashingDriver, names: str, crashing: set[str], n: int) -> None:
    driver.finish()
    for index, name in enumerate(names):
        prompt = [index, 7, 8, 9, 10]
        if name in crashing:
            ended = driver.answers[name].ended
            assert ended is not None and ended.reason == EndReason.ERROR and ended.detail.startswith("engine_fault: ")
            assert driver.answers[name].tokens == expected_tokens(prompt, driver.crashes[name])
        else:
            assert end_of(driver, name) == (EndReason.LENGTH, expected_tokens(prompt, n))


def add_all(driver: CrashingDriver, names: str, n: int) -> None:
    for index, name in enumerate(names):
        driver.add(name, [index, 7, 8, 9, 10], max_tokens=n, ignore_eos=True, client=index % 2)


@BOTH
@pytest.mark.parametrize("after", [0, 1, 6])
def test_crashing_request_fails_alone(asynchronous: bool, after: int) -> None:
    driver = CrashingDriver({"b": after}, async_scheduling=asynchronous)
    add_all(driver, "abcdef", 12)
    check(driver, "abcdef", {"b"}, 12)
    assert driver.num_deaths == 3 and driver.died_with[-1] == ["b"]
    assert driver.replay_lines() is None


@BOTH
def test_two_crashing_requests_are_found_one_after_the_other(asynchronous: bool) -> None:
    driver = CrashingDriver({"b": 0, "d": 3}, async_scheduling=asynchronous)
    add_all(driver, "abcdef", 12)
    check(driver, "abcdef", {"b", "d"}, 12)
    assert driver.num_deaths <= 7
    assert driver.replay_lines() is None


def test_crashing_request_without_others_is_found() -> None:
    driver = CrashingDriver({"a": 2}, max_num_seqs=1)
    add_all(driver, "a", 12)
    check(driver, "a", {"a"}, 12)
    assert driver.num_deaths == 3


def test_no_other_request_is_admitted_beside_a_suspect() -> None:
    driver = CrashingDriver({"a": 0})
    add_all(driver, "abc", 6)
    while driver.num_deaths < 2:
        driver.step()
    driver.add("late", [9, 9], max_tokens=3)
    diff = driver.schedule()
    assert diff is not None and [new.request_id for new in diff.new_requests] == ["a"]
    reasons = {r.request_id: r.wait_reason for r in driver.scheduler.table.requests.values()}
    assert reasons["b"] is WaitReason.SUSPECT
    driver.run()
    assert end_of(driver, "late")[0] is EndReason.LENGTH


def test_suspect_with_a_token_is_cleared_and_the_next_runs_alone() -> None:
    driver = CrashingDriver({})
    add_all(driver, "ab", 40)
    driver.schedule()
    driver.restart_worker()
    driver.schedule()
    driver.restart_worker()  # both were running at two deaths: a runs alone, then b
    while not driver.answers["b"].tokens:
        driver.step()
    assert driver.scheduler.decisions.preemptions[PreemptReason.SUSPECT] == 1, "a was preempted"
    check(driver, "ab", set(), 40)
    assert driver.replay_lines() is None


@pytest.mark.parametrize("steady_decode", [True, False])
def test_the_suspect_admitted_first_runs_alone_first(steady_decode: bool) -> None:
    """With and without steady decode, which b joins first: its prompt has one chunk."""
    driver = CrashingDriver({}, steady_decode=steady_decode, long_prefill_token_threshold=4)
    driver.add("a", [1, 7, 8, 9, 10, 11], max_tokens=40)
    driver.add("b", [2, 7, 8], max_tokens=40)
    while len(driver.answers["a"].tokens) < 2:
        driver.step()
    for _ in range(2):
        driver.schedule()
        driver.restart_worker()
    assert driver.scheduler.suspects.alone is driver.request("a")


def test_deaths_with_tokens_in_between_make_no_suspect() -> None:
    driver = CrashingDriver({})
    add_all(driver, "abc", 80)
    for _ in range(12):
        known = {name: len(answer.tokens) for name, answer in driver.answers.items()}
        while any(len(driver.answers[name].tokens) == known[name] for name in "abc"):
            driver.step()
        driver.restart_worker()
        assert driver.scheduler.suspects.alone is None
    check(driver, "abc", set(), 80)


def test_waiting_request_is_not_suspected() -> None:
    driver = CrashingDriver({"a": 0}, max_num_seqs=1)
    add_all(driver, "ab", 5)
    check(driver, "ab", {"a"}, 5)
    assert driver.died_with == [["a"]] * 3


def test_aborted_suspect_releases_the_other_requests() -> None:
    driver = CrashingDriver({"a": 0})
    add_all(driver, "abc", 6)
    while driver.num_deaths < 2:
        driver.step()
    driver.abort("a")
    driver.run()
    assert end_of(driver, "b")[0] is end_of(driver, "c")[0] is EndReason.LENGTH
    assert driver.num_deaths == 2


def test_a_beam_search_that_was_a_suspect_goes_on() -> None:
    """Its leader gets no token, and waits for its beams: if it went on running alone, all would wait for ever."""
    driver = Driver(max_num_seqs=4)
    driver.add("a", [1, 2, 3], max_tokens=4, use_beam_search=True, beam_width=2)
    for _ in range(2):
        driver.schedule()
        driver.restart_worker()
    driver.finish()
    ended = driver.answers["a"].ended
    assert ended is not None and ended.reason == EndReason.LENGTH

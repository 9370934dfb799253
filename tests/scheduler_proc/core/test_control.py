"""Pause, resume, statistics, disconnected front ends, failure of the engine, and ``Scheduler.check``."""

from typing import Any

import pytest
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason, StepOutputs


def busy(**settings: Any) -> Driver:
    driver = Driver(max_num_seqs=2, **settings)
    for index in range(4):
        driver.add(f"r{index}", [index, 1, 2], client=index % 2, max_tokens=6)
    driver.step()
    return driver


def test_pause_stops_steps_and_loses_no_request() -> None:
    driver = busy(async_scheduling=True)
    assert driver.control("pause").done
    assert not driver.scheduler.can_schedule and driver.schedule() is None
    driver.add("late", [5], max_tokens=2)
    driver.settle()
    assert not driver.scheduler.in_flight and len(driver.scheduler.table.requests) == 5
    driver.control("resume")
    driver.finish()
    for index in range(4):
        assert driver.answers[f"r{index}"].tokens == expected_tokens([index, 1, 2], 6)


def test_statistics_contain_query_and_counters() -> None:
    driver = busy(async_scheduling=True)
    reply = driver.control("statistics")
    assert (reply.query, reply.done, reply.num_running, reply.num_waiting) == (7, True, 2, 2)
    assert reply.num_usable_blocks == 32 and reply.num_free_blocks == 30
    assert (reply.prompt_tokens, reply.generation_tokens) == (12, 2)
    driver.run()
    reply = driver.control("statistics")
    assert (reply.num_running, reply.num_waiting, reply.num_free_blocks) == (0, 0, 32)
    assert (reply.prompt_tokens, reply.generation_tokens, reply.num_steps) == (12, 24, len(driver.diffs))


def test_dropped_client_aborts_only_its_requests() -> None:
    driver = busy(async_scheduling=True)
    driver.drop_client(1)
    assert {client for client, _ in driver.scheduler.table.requests} == {0}
    assert [driver.answers[r].reason for r in ("r1", "r3")] == [EndReason.ABORTED] * 2
    driver.drop_client(9)
    driver.finish()
    for request_id, index in (("r0", 0), ("r2", 2)):
        assert driver.answers[request_id].tokens == expected_tokens([index, 1, 2], 6)


def test_fail_all_ends_every_request_with_the_reason() -> None:
    driver = busy(async_scheduling=True)
    driver.schedule()
    driver.scheduler.fail_all("engine_fault: the engine stopped")
    messages = driver.scheduler.take_messages()
    ended = [e for _, m in messages if isinstance(m, StepOutputs) for e in m.ended]
    assert len(ended) == 4
    assert {(e.reason, e.detail) for e in ended} == {(EndReason.ERROR, "engine_fault: the engine stopped")}
    assert not driver.scheduler.table.requests
    driver.scheduler.check()


def test_client_receives_only_its_own_requests() -> None:
    driver = Driver()
    for client in (0, 1, 2):
        driver.add(f"r{client}", [client], client=client, max_tokens=3)
    driver.schedule()
    driver.execute()
    result = driver.down.receive()
    assert result is not None
    driver.scheduler.consume(result.message)
    messages = dict(driver.scheduler.take_messages())
    assert sorted(messages) == [0, 1, 2]
    for client, message in messages.items():
        assert [i.request_id for i in message.introduced] == [f"r{client}"]
        assert message.tokens.tolist() == expected_tokens([client], 1)


def test_finish_reasons_are_those_of_openai() -> None:
    assert [reason.finish_reason for reason in EndReason] == ["stop", "length", "abort", "error", "repetition"]


@pytest.mark.parametrize("damage", ["place", "placeholder", "blocks", "handles", "held"])
def test_check_fails_on_damaged_state(damage: str) -> None:
    driver = busy()
    scheduler = driver.scheduler
    scheduler.check()
    request = next(iter(scheduler.table.running.values()))
    if damage == "place":
        scheduler.table.waiting.add_request(request)
    elif damage == "placeholder":
        scheduler.table.leave_steady(request)
        request.sampled(9)  # drafts that were never scheduled
    elif damage == "blocks":
        scheduler.kv.free(request)
    elif damage == "handles":
        scheduler.table.handles.allocate()
    else:
        scheduler.kv.coordinator.managers[0].req_to_blocks[99] = []
    with pytest.raises(AssertionError):
        scheduler.check()


def test_ending_of_request_that_never_ran_is_introduced() -> None:
    driver = Driver()
    driver.add("a", [1], max_tokens=2)
    driver.abort("a")
    assert end_of(driver, "a") == (EndReason.ABORTED, [])
    assert driver.answers["a"].num_cached_tokens == 0

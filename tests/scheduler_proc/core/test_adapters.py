"""Requests with LoRA adapters: loads, turns, evictions, and what a worker's death or a failed load does to them."""

from itertools import product
from typing import Any

import pytest
from fake_adapters import adapter_ref
from scheduler_driver import Driver, end_of, expected_tokens
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef, UnloadAdapter
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.features.adapters.slots import ADAPTER_SLICE, HELD_PATIENCE
from quire.scheduler_proc.requests.reasons import WaitReason

A, B, C, D = (adapter_ref(name) for name in "ABCD")


def engine(max_loras: int = 2, **settings: Any) -> Driver:
    return Driver(**{"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": max_loras + 1} | settings)


def answered(driver: Driver, request_id: str, prompt: list[int], adapter: AdapterRef | None) -> bool:
    tokens = driver.answers[request_id].tokens
    return tokens == expected_tokens(prompt, len(tokens), adapter=adapter) and len(tokens) > 0


def test_the_worked_example() -> None:
    """The one of docs/scheduling.md."""
    driver = engine(1, num_blocks=60, max_num_batched_tokens=8, async_scheduling=True)
    driver.add("A", [1, 2, 3], max_tokens=30, adapter=A)
    driver.step(4)
    driver.add("B", list(range(10, 30)), max_tokens=24, adapter=B)
    driver.run()
    reasons = [(d.step, d.request_id, str(d.reason)) for d in driver.scheduler.decisions.take()]
    assert reasons == [(1, "A", "adapter"), (5, "B", "adapter"), (8, "B", "adapter_turn")]
    changes = {
        diff.step: (diff.parked, diff.unparked, [new.request_id for new in diff.new_requests], dict(diff.counts))
        for diff in driver.diffs
    }
    assert {step: change for step, change in changes.items() if any(change)} == {
        1: ([], [], ["A"], {0: 3}),
        9: ([0], [], ["B"], {1: 8}),
        10: ([], [], [], {1: 8}),
        11: ([], [], [], {1: 4}),
        25: ([1], [0], [], {}),
        41: ([0], [1], [], {}),
        51: ([], [0], [], {}),
    }
    assert [(load.number, load.slot) for load in driver.adapter_loads] == [(1, 0), (2, 1)]


def test_waits_for_its_adapter_and_gets_its_tokens() -> None:
    driver = engine()
    driver.add("plain", [1, 2, 3], max_tokens=6)
    driver.add("lora", [1, 2, 3], max_tokens=6, adapter=A)
    driver.schedule()
    assert driver.request("lora").wait_reason is WaitReason.ADAPTER
    assert driver.scheduler.statistics().waiting_by_reason["adapter"] == 1
    assert [(each.request_id, each.adapter) for each in driver.control("requests").requests] == [
        ("plain", ""),
        ("lora", "A"),
    ]
    driver.finish()
    assert answered(driver, "plain", [1, 2, 3], None) and answered(driver, "lora", [1, 2, 3], A)
    assert driver.answers["plain"].tokens != driver.answers["lora"].tokens
    assert [(load.number, load.slot) for load in driver.adapter_loads] == [(1, 0)]
    assert driver.replay_lines() is None


def test_names_with_one_content_share_its_slot_and_its_cache() -> None:
    driver = engine()
    prompt = list(range(1, 10))
    driver.add("first", prompt, max_tokens=2, adapter=A)
    driver.run()
    driver.add("same", prompt, max_tokens=2, adapter=adapter_ref("other name", "A"))
    driver.add("other", prompt, max_tokens=2, adapter=B)
    driver.finish()
    assert driver.answers["same"].num_cached_tokens == 8 and driver.answers["other"].num_cached_tokens == 0
    assert len(driver.adapter_loads) == 2


def test_the_same_name_with_another_content_hits_nothing() -> None:
    driver = engine(max_loras=1)
    prompt = list(range(1, 10))
    for number in range(6):
        driver.add(str(number), prompt, max_tokens=3, adapter=adapter_ref("name", f"content {number % 3}"))
        driver.run()
        assert answered(driver, str(number), prompt, adapter_ref("", f"content {number % 3}"))
    driver.check_drained()


@pytest.mark.parametrize(("num_tokens", "asynchronous"), thinned(product([40, 1, 16, 17, 100], [True, False]), keep=1))
def test_a_rare_adapter_waits_at_most_twice_as_long(num_tokens: int, asynchronous: bool) -> None:
    """One request beside 100 of another adapter, where one adapter can be in a step."""
    prompt = [700 + index for index in range(num_tokens)]

    def steps_to_first_token(num_others: int) -> int:
        driver = engine(
            1,
            num_blocks=3000,
            max_num_seqs=128,
            max_num_batched_tokens=128,
            long_prefill_token_threshold=16,
            async_scheduling=asynchronous,
        )
        driver.add("warm", [3], max_tokens=1, adapter=B)
        driver.run()
        for number in range(num_others):
            driver.add(f"hot {number}", [number], max_tokens=60, adapter=A)
        driver.step(12)
        began = driver.scheduler.last_step
        driver.add("rare", prompt, max_tokens=2, adapter=B)
        while driver.scheduler.table.requests.get((0, "rare")) is not None:
            driver.schedule() or driver.answer()
            request = driver.scheduler.table.requests.get((0, "rare"))
            if request is None or request.num_output_placeholders or request.num_output_tokens:
                break
        taken = driver.scheduler.last_step - began
        driver.finish()
        assert answered(driver, "rare", prompt, B)
        return taken

    assert steps_to_first_token(100) <= 2 * steps_to_first_token(0)


def test_adapters_take_turns() -> None:
    """Three adapters of which two can be in a step: none waits for more than a slice."""
    driver = engine(2, num_blocks=200)
    for adapter in (A, B, C):
        driver.add(adapter.name, [ord(adapter.name)], max_tokens=100, adapter=adapter)
    last: dict[str, int] = {}
    while driver.scheduler.table.requests:
        driver.step()
        if not driver.diffs:
            continue
        diff = driver.diffs[-1]
        active = [row for row in driver.worker.rows.values() if row.active]
        assert len({row.adapter for row in active}) <= 2
        for row in active:
            last[row.request_id] = diff.step
        live = {request.request_id for request in driver.scheduler.table.running.values()}
        assert all(diff.step - last[name] <= 2 * ADAPTER_SLICE for name in live & last.keys())
    driver.check_drained()
    assert all(answered(driver, adapter.name, [ord(adapter.name)], adapter) for adapter in (A, B, C))
    assert len(driver.adapter_loads) == 3
    assert driver.replay_lines() is None


@pytest.mark.parametrize("steps_between", [1, 8])
def test_new_requests_of_one_adapter_leave_steps_to_another(steps_between: int) -> None:
    """Each ends the turn of the other adapter, which then gets a turn soon."""
    driver = engine(1, num_blocks=200, max_model_len=256)
    driver.add("long", [1, 2, 3], max_tokens=240, adapter=A)
    driver.step(5)
    before = len(driver.answers["long"].tokens)
    for number in range(200):
        if number % steps_between == 0:
            driver.add(f"short {number}", [1, 2, 3], max_tokens=8, adapter=B)
        driver.step()
    assert len(driver.answers["long"].tokens) - before > 200 * 0.3


def test_more_adapters_than_slots_all_advance() -> None:
    driver = engine(1, num_blocks=200, max_cpu_loras=2)
    for adapter in (A, B, C, D):
        driver.add(adapter.name, [ord(adapter.name)], max_tokens=50, adapter=adapter)
    driver.finish()
    assert all(answered(driver, adapter.name, [ord(adapter.name)], adapter) for adapter in (A, B, C, D))
    assert len(driver.adapter_loads) > 4 and driver.worker.adapters.num_read > 4
    assert driver.scheduler.statistics().num_adapters_evicted > 2
    assert driver.replay_lines() is None


def test_rows_full_of_requests_without_a_turn() -> None:
    """All rows belong to an adapter that has lost its slot: it gets one back, although others wait."""
    driver = engine(1, num_blocks=200, max_num_seqs=2, async_scheduling=True)
    for number, adapter in enumerate((A, B, C, D, A, B, C, D)):
        driver.add(str(number), [1 + number], max_tokens=40, adapter=adapter)
    driver.finish()
    assert driver.replay_lines() is None


@pytest.mark.parametrize("is_held", [False, True])
def test_a_slot_is_given_up_although_nothing_else_runs(is_held: bool) -> None:
    """No step is planned while no request runs or waits, so the event itself must lead to the load."""
    driver = engine(1)
    driver.add("a", [1, 2, 3], max_tokens=60, adapter=A)
    driver.add("b", [1, 2, 3], max_tokens=60, adapter=B)
    driver.step(8)
    driver.add("c", [1, 2, 3], max_tokens=5, adapter=C)
    driver.step(2)
    assert driver.request("c").wait_reason is WaitReason.ADAPTER and not driver.scheduler.in_flight
    if is_held:
        driver.hold("a")
        driver.hold("b")
    else:
        driver.abort("a", "b")
    driver.step(10)
    assert answered(driver, "c", [1, 2, 3], C) and end_of(driver, "c")[0] is EndReason.LENGTH


def test_slots_of_requests_that_never_run_are_given_up() -> None:
    """Requests of low priority hold both slots; those without an adapter leave no row for them."""
    driver = engine(1, scheduling_policy="priority", max_num_seqs=2, num_blocks=60)
    requests = driver.scheduler.table.requests

    def step(number: int) -> None:
        for index in range(4 - sum(request.priority == 0 for request in requests.values())):
            driver.add(f"{number} {index}", [1, 2, 3], max_tokens=9)
        driver.step()

    step(0)
    driver.add("a", [1, 2, 3], max_tokens=9, priority=5, adapter=A)
    driver.add("b", [1, 2, 3], max_tokens=9, priority=5, adapter=B)
    step(1)
    driver.add("c", [1, 2, 3], max_tokens=3, priority=-5, adapter=C)
    for number in range(HELD_PATIENCE + 20):
        step(number + 2)
    assert end_of(driver, "c")[0] is EndReason.LENGTH and answered(driver, "c", [1, 2, 3], C)
    assert not driver.answers["a"].tokens


def test_a_steady_batch_stays_steady_while_no_adapter_waits() -> None:
    driver = engine(2, block_size=16, num_blocks=200)
    for number, adapter in enumerate((A, B, None)):
        driver.add(str(number), [1 + number], max_tokens=100, adapter=adapter)
    driver.step(20)
    assert len(driver.scheduler.steady_decode) == 3
    driver.finish()


def test_a_failed_load_ends_its_requests_only() -> None:
    driver = engine()
    driver.worker.adapters.folders[A.path] = B.digest
    driver.add("plain", [1], max_tokens=4)
    driver.add("bad", [2], max_tokens=4, adapter=A)
    driver.add("good", [3], max_tokens=4, adapter=B)
    driver.finish()
    rejected = driver.answers["bad"].rejected
    assert rejected is not None and (rejected.code, rejected.param) == ("adapter_not_loaded", "model")
    assert "content has changed" in rejected.message
    assert answered(driver, "plain", [1], None) and answered(driver, "good", [3], B)
    assert driver.scheduler.statistics().num_adapters_failed == 1
    del driver.worker.adapters.folders[A.path]
    driver.add("again", [2], max_tokens=4, adapter=A)
    driver.finish()
    assert answered(driver, "again", [2], A)
    assert driver.replay_lines() is None


def test_a_failed_reload_ends_running_requests_with_an_error() -> None:
    driver = engine(1, num_blocks=200)
    for adapter in (A, B, C):
        driver.add(adapter.name, [ord(adapter.name)], max_tokens=60, adapter=adapter)
    while len(driver.adapter_loads) < 4:
        driver.step()
    driver.worker.adapters.fault = lambda: "no memory"
    while all(answer.ended is None for answer in driver.answers.values()):
        driver.step()
    driver.worker.adapters.fault = lambda: ""
    driver.finish()
    failed = [answer.ended.detail for answer in driver.answers.values() if answer.ended and answer.ended.detail]
    assert failed and all(detail == "adapter_not_loaded: no memory" for detail in failed)
    assert driver.replay_lines() is None


def test_new_workers_load_again() -> None:
    driver = engine(2, num_blocks=100)
    for adapter in (A, B):
        driver.add(adapter.name, [5], max_tokens=30, adapter=adapter)
    driver.step(6)
    driver.restart_worker()
    driver.finish()
    assert answered(driver, "A", [5], A) and answered(driver, "B", [5], B)
    assert len(driver.adapter_loads) == 4
    assert driver.replay_lines() is None


def test_forks_and_beams_have_the_adapter_of_their_parent() -> None:
    driver = engine(1, num_blocks=200)
    driver.add("hot", [9], max_tokens=60, adapter=B)
    driver.step(4)
    driver.add("parent", [1, 2, 3], max_tokens=20, adapter=A)
    driver.add("child", [], max_tokens=20, forked_from="parent")
    driver.add("search", [4, 5], max_tokens=5, use_beam_search=True, beam_width=2, adapter=A)
    driver.finish()
    assert answered(driver, "parent", [1, 2, 3], A) and answered(driver, "child", [1, 2, 3], A)
    assert driver.answers["search"].reason in (EndReason.STOPPED, EndReason.LENGTH)
    assert driver.replay_lines() is None


def test_unload() -> None:
    driver = engine()

    def unload(adapter: AdapterRef, *, force: bool = False) -> bool:
        driver.consume(UnloadAdapter(adapter.name, adapter.digest, force, 3))
        return driver.statistics_seen[-1].done

    driver.add("A", [1], max_tokens=50, adapter=A)
    driver.add("other", [1], max_tokens=5, adapter=adapter_ref("alias", "A"))
    driver.step(3)
    assert not unload(A)
    driver.schedule()
    unload(A, force=True)
    assert end_of(driver, "A")[0] is EndReason.ABORTED
    assert unload(A), "the content is still used under another name"
    driver.run()
    assert answered(driver, "other", [1], A)
    assert driver.scheduler.statistics().adapters_by_place["ready"] == 1
    assert unload(adapter_ref("alias", "A")) and not driver.scheduler.adapters.slots.known
    driver.add("again", [1], max_tokens=5, adapter=A)
    driver.finish()
    assert [(load.number, load.dropped) for load in driver.adapter_loads] == [(1, []), (2, [1])]
    assert driver.replay_lines() is None


def test_an_answer_to_no_load_is_counted() -> None:
    driver = engine()
    driver.consume(AdapterLoaded(4, 1))
    driver.consume(AdapterLoaded(4, 99))
    assert driver.scheduler.statistics().num_stray_messages == 2


@pytest.mark.parametrize(
    ("adapter", "enabled", "text"),
    [
        (A, False, "serves no adapters"),
        (AdapterRef("a", b"short", "/a"), True, "32 bytes"),
        (AdapterRef("a" * 257, bytes(32), "/a"), True, "name of an adapter"),
        (AdapterRef("a", bytes(32), "a" * 4097), True, "path of an adapter"),
    ],
)
def test_refused_adapters(adapter: AdapterRef, enabled: bool, text: str) -> None:
    driver = engine(enable_lora=enabled)
    driver.add("a", [1], adapter=adapter)
    rejected = driver.answers["a"].rejected
    assert rejected is not None and text in rejected.message and rejected.param == "model"
    assert not driver.scheduler.adapters.slots.known


def test_a_fork_cannot_have_another_adapter() -> None:
    driver = engine()
    driver.add("parent", [1], max_tokens=9, adapter=A)
    driver.add("child", [], max_tokens=9, forked_from="parent", adapter=B)
    driver.add("same", [], max_tokens=9, forked_from="parent", adapter=A)
    driver.finish()
    assert driver.answers["child"].rejected is not None and answered(driver, "same", [1], A)


def test_host_memory_must_hold_what_is_in_slots() -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        engine(2, max_cpu_loras=2)


def test_known_adapters_are_bounded() -> None:
    driver = engine(2, max_cpu_loras=4)
    for number in range(40):
        driver.add(str(number), [1], max_tokens=2, adapter=adapter_ref(f"adapter {number}"))
        driver.run()
        assert len(driver.scheduler.adapters.slots.known) <= 4
    driver.check_drained()

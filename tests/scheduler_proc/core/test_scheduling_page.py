"""The worked example of docs/scheduling.md, and the text of a decision."""

from scheduler_driver import Driver

from quire.scheduler_proc.requests.reasons import Decision

A, B, C = 0, 1, 2
"""Handles."""


def test_the_worked_example() -> None:
    driver = Driver(num_blocks=12, max_num_batched_tokens=16, max_prefill_share=0.5, async_scheduling=True)
    driver.add("A", list(range(6)), max_tokens=9)
    driver.step()
    driver.add("B", list(range(100, 126)), max_tokens=6)
    driver.add("C", [50, 51, 52], max_tokens=3)
    decisions: list[Decision] = []
    while driver.scheduler.table.requests:
        driver.step()
        decisions += driver.scheduler.decisions.take()
    steps = [
        (
            diff.removed,
            [(new.handle, new.num_computed_tokens) for new in diff.new_requests],
            [] if diff.block_ids is None else diff.block_ids.tolist(),
            [] if diff.appended_block_ids is None else diff.appended_block_ids.tolist(),
            dict(diff.counts),
        )
        for diff in driver.diffs
    ]
    assert steps == [
        ([], [(A, 0)], [1, 2], [], {A: 6}),
        ([], [], [], [], {}),
        ([], [(B, 0)], [3, 4], [], {B: 8}),
        ([], [], [], [5, 6, 7], {B: 8}),
        ([], [], [], [8, 9], {B: 8}),
        ([], [(C, 0)], [11], [10], {B: 2, C: 3}),
        ([], [], [], [], {}),
        ([C], [], [], [11], {}),
        ([B], [], [], [], {}),
        ([A], [(B, 24), (C, 0)], [3, 4, 6, 7, 8, 9, 11, 10, 5, 2], [], {B: 5, C: 5}),
        ([C], [], [], [], {}),
        ([], [], [], [], {}),
    ]
    recorded = [(d.step, d.kind, d.request_id, str(d.reason)) for d in decisions]
    assert (3, "wait", "C", "prefill_share") in recorded
    assert (8, "preempt", "C", "least_loss") in recorded and (9, "preempt", "B", "itself") in recorded
    assert (10, "evict", "", "admission") in recorded


def test_decision_is_one_line_for_any_request_id() -> None:
    line = str(Decision(8, "preempt", "a\nquire: all is well\x1b[2J", "least_loss", "b"))
    assert line == "preempt step=8 request='a\\nquire: all is well\\x1b[2J' reason=least_loss beneficiary='b'"
    assert str(Decision(9, "evict", "", "decode", num_blocks=3)) == "evict step=9 num_blocks=3 reason=decode"

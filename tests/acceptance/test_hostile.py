"""Costs of a hostile client for honest ones: how they are counted in a trace, and which are reported."""

import json
from pathlib import Path
from typing import Any

import hostile
import pytest
from harness import main
from hostile import CALM, Round
from trace_share import RequestShare, count_shares

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.replay.recorded.reader import TraceLine
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    Arrival,
    Ended,
    NewRow,
    PrefixCacheEvent,
    Reason,
    Result,
    StepDecision,
)


def trace_of(*lines: AnyLine) -> list[TraceLine]:
    return [TraceLine(line, number, "t") for number, line in enumerate(lines, 1)]


def arrival(request_id: str) -> Arrival:
    return Arrival(now=0.0, req_id=request_id, num_prompt_tokens=5, sampling=SamplingParams(), seed=0)


def step(number: int, **fields: Any) -> StepDecision:
    return StepDecision(step=number, now=0.0, **fields)


def row(handle: int, request_id: str, blocks: int) -> NewRow:
    return NewRow(handle, request_id, 5, 5, 0, [blocks], 0)


def result(number: int, *handles: int) -> Result:
    return Result(step=number, now=0.0, ended=[Ended(handle, EndReason.LENGTH, 1) for handle in handles])


class TestShares:
    def test_steps_and_blocks_are_counted_until_the_end(self) -> None:
        lines = trace_of(
            step(1, new=[row(0, "x-0", 9)]),
            arrival("a-0"),
            step(2),
            PrefixCacheEvent(step=3, req_id="a-0", local_hit_tokens=4, total_prompt_tokens=5, num_tokens=5),
            step(3, new=[row(1, "a-0", 2)]),
            step(4, appended=[1, 0, 77, 0, 0, 78]),
            step(5),
            result(4, 1),
            step(6, removed=[1]),
        )
        assert count_shares(lines, {"a"}) == {"a-0": RequestShare(0 + 1, 5, 2, 4, 2 + 3 + 3, 4, 0)}

    def test_reused_handle_counts_for_its_new_request(self) -> None:
        lines = trace_of(
            arrival("a-0"),
            step(1, new=[row(0, "a-0", 2)]),
            result(1, 0),
            step(2, removed=[0], new=[row(0, "x-0", 50)]),
            step(3, appended=[0, 0, 9]),
            result(3, 0),
        )
        share = count_shares(lines, {"a"})["a-0"]
        assert (share.took, share.block_steps) == (1, 2)

    def test_preempted_request_holds_no_blocks(self) -> None:
        lines = trace_of(
            arrival("a-0"),
            step(1, new=[row(0, "a-0", 2)]),
            step(2, removed=[0], reasons=[Reason("preempt", "a-0", "youngest", "x-0")]),
            step(3),
            step(4, new=[row(3, "a-0", 2)]),
            result(4, 3),
        )
        share = count_shares(lines, {"a"})["a-0"]
        assert (share.waited, share.took, share.block_steps, share.preempted) == (1, 4, 4, 1)

    def test_only_the_answers_of_selected_responses_count(self) -> None:
        lines = trace_of(arrival("a-0"), arrival("a-1"), arrival("ab-0"))
        assert list(count_shares(lines, {"a"})) == ["a-0", "a-1"]


def honest(steps: int, blocks: int = 10, text: str = "t") -> Round:
    return Round([text], ["a"], front_end_mib=60.0, shares=[RequestShare(0, 5, 1, steps, blocks)])


class TestHostile:
    @pytest.mark.parametrize(
        ("attacked", "note"),
        [
            (honest(110), ""),
            (honest(90), ""),
            (honest(120), "steps x 1.20"),
            (honest(100, blocks=20), "block_steps x 2.00"),
            (Round(["t"], front_end_mib=60.0), "steps x -, block_steps x -"),
        ],
    )
    def test_ratio_above_the_limit_is_reported(self, attacked: Round, note: str) -> None:
        report = hostile.make_report({}, {CALM: honest(100), "flood": attacked})
        assert report.notes == ([f"flood: worse than without it: {note}"] if note else [])

    def test_different_texts_and_failures_are_reported(self) -> None:
        attacked = honest(100, text="u")
        attacked.faults["status 500"] += 1
        found = hostile.make_report({}, {CALM: honest(100), "flood": attacked}).results["rounds"]["flood"]
        assert (found["texts_changed"], found["faults"]) == (1, {"status 500": 1})

    def test_lost_trace_lines_are_reported(self) -> None:
        attacked = honest(100)
        attacked.lines_lost = 7
        assert "7 trace lines" in hostile.make_report({}, {CALM: honest(100), "flood": attacked}).notes[0]

    def test_honest_load_depends_only_on_the_seed(self) -> None:
        assert hostile.honest_bodies(20, 1) == hostile.honest_bodies(20, 1) != hostile.honest_bodies(20, 2)


@pytest.mark.slow
def test_attacks_on_a_real_server(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--attacks", "slow_reader,grammars", "--num-requests", "24", "--json", str(file)]
    main(["hostile", *words])
    rounds = json.loads(file.read_text())["results"]["rounds"]
    assert set(rounds) == {CALM, "slow_reader", "grammars"}
    assert all(found["steps"] > hostile.OUTPUT_LEN and not found["faults"] for found in rounds.values())
    assert rounds["slow_reader"]["hostile"]["never read"] > 0
    assert rounds["grammars"]["hostile"]

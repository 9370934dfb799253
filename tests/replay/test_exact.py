"""A recorded trace as a record of its run, and as a workload for what-if runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scheduler_driver import Driver, make_request
from tiers import thinned
from traced_runs import STEP_SECONDS, encoded, random_run, traced, write_trace

from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.replay.costs.cost import ConstantCost
from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.recorded import replay_trace as replay_module
from quire.replay.recorded.replay_trace import replay_trace
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.setup import make_setup
from quire.replay.simulate.whatif import run_workload
from quire.replay.workload.workload import Call
from quire.scheduler_proc.trace.lines import Arrival, End, Event, Line, Lost, Result, StepDecision


def small_run(**settings: Any) -> Driver:
    """Run three clients; one request is preempted, one aborted, one stopped, and one waits to the end."""
    driver = Driver(**{"num_blocks": 9, "max_num_seqs": 3, "async_scheduling": True} | settings)
    for index in range(5):
        driver.add(f"r{index}", [7] * 8 + [index], max_tokens=14 + index, client=index % 3, priority=index)
        for _ in range(3):
            driver.step()
    driver.abort("r3", client=0)
    driver.stop("r1", 2, client=1)
    driver.run()
    return driver


def small_trace(tmp_path: Path, **settings: Any) -> tuple[Driver, list[Line], Path]:
    driver = small_run(**settings)
    lines = [*traced(driver), End(now=1e6)]
    return driver, lines, write_trace(tmp_path / "trace", lines)


def outcome(record: RunRecord) -> dict[str, tuple[str, int]]:
    return {run.request_id: (run.finish, run.num_output_tokens) for run in record.requests}


class TestRecord:
    def test_record_matches_what_clients_received(self, tmp_path: Path) -> None:
        driver, _, path = small_trace(tmp_path)
        record = replay_trace(path)
        assert record.decisions_equal is True and record.first_difference is None and not record.notes
        for run in record.requests:
            ended = driver.answers[run.request_id].ended
            assert ended is not None and run.finish == EndReason(ended.reason).finish_reason
            assert run.num_output_tokens == ended.num_output_tokens
            if driver.answers[run.request_id].num_cached_tokens >= 0 and run.scheduled >= 0:
                assert run.num_cached_tokens == driver.answers[run.request_id].num_cached_tokens
        assert Counter(run.finish for run in record.requests) == {"length": 3, "abort": 1, "stop": 1}
        statistics = driver.scheduler.statistics()
        assert sum(run.num_preemptions for run in record.requests) == statistics.num_preemptions > 0
        assert sum(record.preemptions_by_reason.values()) == statistics.num_preemptions
        assert record.extra["lines"] > len(record.steps) == len(driver.diffs)
        assert sum(record.steps.prefill_tokens) + sum(record.steps.decode_tokens) > sum(
            run.num_prompt_tokens for run in record.requests
        )
        assert record.settings["max_num_seqs"] == 3 and record.num_usable_blocks == 8

    def test_record_has_recorded_times(self, tmp_path: Path) -> None:
        _, lines, path = small_trace(tmp_path)
        record = replay_trace(path)
        arrivals = [at * STEP_SECONDS for at, line in enumerate(lines) if isinstance(line, Arrival)]
        assert [run.arrival for run in record.requests] == pytest.approx(arrivals)
        results = [at * STEP_SECONDS for at, line in enumerate(lines) if isinstance(line, Result)]
        assert list(record.steps.end) == pytest.approx(results)
        assert all(end - begin <= STEP_SECONDS + 1e-9 for begin, end in zip(record.steps.begin, results, strict=True))
        first = next(at for at, line in enumerate(lines) if isinstance(line, StepDecision))
        assert record.requests[0].scheduled == pytest.approx(first * STEP_SECONDS)
        for run in record.requests:
            assert run.arrival <= run.scheduled <= run.first_token <= run.end or run.finish == "abort"
        assert record.virtual_s == pytest.approx(max(run.end for run in record.requests) - arrivals[0])
        assert record.wall_s > 0

    def test_notes_clock_that_went_back(self, tmp_path: Path) -> None:
        _, lines, path = small_trace(tmp_path)
        at = next(at for at, line in enumerate(lines) if isinstance(line, Result))
        write_trace(path, [*lines[:at], msgspec.structs.replace(lines[at], now=1.0), *lines[at + 1 :]])
        record = replay_trace(path)
        assert record.decisions_equal and record.notes == ["the clock went back 1 times: the last time is used instead"]
        assert list(record.steps.end) == sorted(record.steps.end)

    def test_reports_progress(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "_PROGRESS_EVERY", 16)
        driver = Driver(num_blocks=80)
        driver.add("a", [1], max_tokens=20)
        driver.run()
        reports: list[tuple[float, int]] = []
        replay_trace(write_trace(tmp_path / "trace", traced(driver)), progress=lambda *each: reports.append(each))
        assert len(reports) == 1 and reports[0][0] > 0 and reports[0][1] == 0

    @pytest.mark.parametrize("seed", thinned(range(8), keep=1))
    def test_any_run_has_reports_and_loads_as_workload(self, tmp_path: Path, seed: int) -> None:
        driver = random_run(seed, events=20)
        lines = [*traced(driver), End(now=1e6)]
        path = write_trace(tmp_path / "trace", lines)
        record = replay_trace(path)
        assert record.decisions_equal and not record.notes
        for run in record.requests:
            answer = driver.answers[run.request_id]
            assert run.finish and run.end >= run.arrival
            assert (run.finish == "rejected") == (answer.rejected is not None)
            if answer.ended is not None:
                assert run.num_output_tokens == answer.ended.num_output_tokens
        calls = load(path, LoadOptions()).calls
        arrived = {line.req_id: line for line in lines if isinstance(line, Arrival)}
        assert len(calls) == sum(driver.answers[name].rejected is None for name in arrived)
        for call in calls:
            ended, delivered = driver.answers[call.request_id].ended, arrived[call.request_id].num_output_tokens
            assert ended is not None
            assert call.num_output_tokens == max(ended.num_output_tokens - delivered, 1)


class TestDifference:
    """The location of a difference is tested in test_command.py and recorded/test_trace_exact.py."""

    def test_altered_line_is_a_difference(self, tmp_path: Path) -> None:
        _, lines, path = small_trace(tmp_path)
        raw = encoded(lines)
        at = next(at for at, line in enumerate(lines) if isinstance(line, StepDecision))
        raw[at] = raw[at].replace(b'"now":100.', b'"now":101.')
        path.write_bytes(b"\n".join(raw) + b"\n")
        record = replay_trace(path)
        assert record.first_difference is not None
        assert (record.first_difference["line"], record.first_difference["field"]) == (at + 1, "crc")

    @pytest.mark.parametrize("recorded", [False, True])
    def test_missing_lines_stop_the_comparison(self, tmp_path: Path, recorded: bool) -> None:
        _, lines, path = small_trace(tmp_path)
        raw = encoded([*lines[:40], Lost(lines=5), *lines[45:]])
        raw[40] = raw[40] if recorded else b"{"
        path.write_bytes(b"\n".join(raw) + b"\n")
        with pytest.raises(ConfigError, match="trace:41: "):
            replay_trace(path)
        record = replay_trace(path, lenient=True)
        assert record.decisions_equal is None and record.first_difference is None and len(record.steps) > 3
        assert record.notes[-1] == "compared up to trace:41, where lines are missing"


class TestWorkload:
    def test_calls_equal_recorded_requests(self, tmp_path: Path) -> None:
        driver, lines, path = small_trace(tmp_path)
        workload = load(path, LoadOptions())
        assert [call.request_id for call in workload.calls] == [f"r{index}" for index in range(5)]
        assert [call.priority for call in workload.calls] == list(range(5))
        arrivals = [at * STEP_SECONDS for at, line in enumerate(lines) if isinstance(line, Arrival)]
        assert [call.arrival for call in workload.calls] == pytest.approx(arrivals)
        for call in workload.calls:
            ended = driver.answers[call.request_id].ended
            assert ended is not None and call.num_output_tokens == max(ended.num_output_tokens, 1)
            assert call.num_prompt_tokens == 9 and call.content is not None and len(call.content.ids) == 2
            assert call.answer is not None and list(call.answer.ids[:2]) == list(call.content.ids)
            known = len(call.answer.ids) * 4
            assert known <= 9 + ended.num_output_tokens
            if EndReason(ended.reason) == EndReason.LENGTH:
                assert known >= 9 + call.num_output_tokens - 1 - 4
        assert len({tuple(call.content.ids) for call in workload.calls if call.content}) == 1
        assert any("1 aborted" in note for note in workload.notes)
        assert workload.settings["num_usable_blocks"] == 8 and workload.settings["block_size"] == 4

    def test_same_engine_has_same_prefix_cache_hits(self, tmp_path: Path) -> None:
        """Requests one at a time on the recorded engine have the recorded hits."""
        driver = Driver(num_blocks=30, max_num_seqs=3)
        for index in range(6):
            driver.add(f"r{index}", [index % 2] * 9 + [index], max_tokens=5)
            driver.run()
        path = write_trace(tmp_path / "trace", traced(driver))
        recorded = replay_trace(path)
        workload = load_workload(path, "auto", LoadOptions())
        assert workload.format == "quire"
        setup = make_setup(workload, {}, ConstantCost(1.0))
        assert setup.num_usable_blocks == 29 and setup.config.block_size == 4
        simulated = run_workload(workload, setup, ConstantCost(1.0), concurrency=1)
        hits = [run.num_cached_tokens for run in recorded.requests]
        assert [run.num_cached_tokens for run in simulated.requests] == hits and sum(hits) > 0
        assert outcome(recorded).keys() <= {call.request_id for call in workload.calls}

    def test_next_turn_can_hit_the_answer(self, tmp_path: Path) -> None:
        driver = Driver(num_blocks=30, block_size=4)
        driver.add("a", [1, 2, 3, 4, 5], max_tokens=10, ignore_eos=True)
        driver.run()
        turn = [1, 2, 3, 4, 5, *driver.answers["a"].tokens, 9, 9]
        driver.add("b", turn, max_tokens=3)
        driver.run()
        workload = load(write_trace(tmp_path / "trace", traced(driver)), LoadOptions())
        setup = make_setup(workload, {}, ConstantCost(1.0))
        hits = [
            run_workload(workload, setup, ConstantCost(1.0), concurrency=1, reuse_answers=reuse)
            .requests[1]
            .num_cached_tokens
            for reuse in (False, True)
        ]
        assert hits == [4, driver.answers["b"].num_cached_tokens] and hits[1] == 12

    def test_host_memory_is_simulated_and_recorded_copies_are_ignored(self, tmp_path: Path) -> None:
        driver = Driver(25, num_host_pages=65, cpu_offload_bytes=64 * 4096)
        for index in range(10):
            driver.add(f"r{index}", list(range(index % 5, 40)), max_tokens=4)
            driver.run()
        lines = list(traced(driver))
        (recorded,) = driver.scheduler.statistics().tiers
        others = [line for line in lines if not (isinstance(line, Event) and isinstance(line.event, BlocksMoved))]
        assert len(others) < len(lines) and recorded.num_loaded
        (tier,) = replay_trace(write_trace(tmp_path / "trace", lines)).tiers.values()
        assert (tier["num_pages"], tier["num_loaded"]) == (64, recorded.num_loaded) and "hit_tokens" not in tier
        runs = []
        for name, kept in (("with", lines), ("without", others)):
            workload = load(write_trace(tmp_path / name, kept), LoadOptions())
            setup = make_setup(workload, {}, ConstantCost(1.0))
            assert setup.tiers.num_host_pages == 65
            runs.append(run_workload(workload, setup, ConstantCost(1.0), concurrency=1).tiers["host"])
        assert runs[0] == runs[1] and runs[0]["num_loaded"] > 0
        slow = make_setup(workload, {"host_gb_per_s": "1e-7"}, ConstantCost(1.0))
        assert run_workload(workload, slow, ConstantCost(1.0), concurrency=1).tiers["host"]["num_late"] > 0

    def test_hashes_of_any_length_become_integers(self, tmp_path: Path) -> None:
        _, lines, path = small_trace(tmp_path)
        header = msgspec.structs.replace(lines[0], hash_bytes=4)
        write_trace(path, [header, *lines[1:]])
        assert all(call.content and len(call.content.ids) == 2 for call in load(path, LoadOptions()).calls)

    def test_lenient_skips_damaged_lines(self, tmp_path: Path) -> None:
        _, lines, path = small_trace(tmp_path)
        raw = encoded(lines)
        at = next(at for at, line in enumerate(lines) if isinstance(line, Arrival) and line.req_id == "r2")
        raw[at] = raw[at][:50]
        path.write_bytes(b"\n".join(raw) + b"\n")
        with pytest.raises(ConfigError, match=f"{path}:{at + 1}: the line is damaged"):
            load(path, LoadOptions())
        workload = load(path, LoadOptions(lenient=True))
        assert [call.request_id for call in workload.calls] == ["r0", "r1", "r3", "r4"]
        assert any(f":{at + 1}: the line is damaged" in note for note in workload.notes)
        write_trace(path, [*lines[:-1], Lost(lines=2)])
        with pytest.raises(ConfigError, match="2 lines are missing"):
            load(path, LoadOptions())

    def test_two_clients_may_use_the_same_id(self, tmp_path: Path) -> None:
        driver = Driver(num_blocks=30)
        for client in (0, 1):
            driver.consume(make_request("same", [client + 1] * (5 + client), max_tokens=3 + client), client)
        while driver.scheduler.table.requests or driver.scheduler.in_flight:
            driver.scheduler.take_messages()
            driver.schedule()
            driver.execute()
            received = driver.down.receive()
            assert received is not None
            driver.log.consumed(0.0, 0, received.frames)
            driver.scheduler.consume(received.message)
        calls: list[Call] = load(write_trace(tmp_path / "trace", traced(driver)), LoadOptions()).calls
        assert [(call.num_prompt_tokens, call.num_output_tokens) for call in calls] == [(5, 3), (6, 4)]

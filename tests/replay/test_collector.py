"""Records of requests of several clients that are aborted, fail, or restart on new workers."""

import numpy as np
from scheduler_driver import make_config, make_layout

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import NO_TOKENS, Int32
from quire.protocol.wire.front_end_messages import Abort, AddRequest
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.core.opaque import OpaqueRequest, OpaqueResult
from quire.replay.core.scheduler import ReplayScheduler
from quire.replay.costs.rows import SimulatedRows
from quire.replay.run.collector import RunCollector
from quire.replay.run.run_record import RequestRun, RunRecord
from quire.scheduler_proc.requests.events import Fail
from quire.scheduler_proc.trace.decision_log import DecisionLog


class Bench:
    """A Scheduler with its collector, driven step by step; a step takes one second."""

    def __init__(self) -> None:
        config = make_config()
        decision_log = DecisionLog()
        self.scheduler = ReplayScheduler(config, make_layout(config), 33, hooks=decision_log)
        self.record = RunRecord()
        self.collector = RunCollector(self.record, self.scheduler, decision_log)
        self.rows = SimulatedRows()
        self.now = 0.0

    def arrive(self, name: str, client: int = 0, num_output_tokens: int = 20) -> RequestRun:
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        self.scheduler.consume(OpaqueRequest(AddRequest(name, NO_TOKENS, sampling, 0, arrival=self.now), 4), client)
        run = RequestRun(name, self.now, 4)
        self.collector.arrived(run, client)
        return run

    def step(self, *, bad: tuple[int, ...] = ()) -> list[RequestRun]:
        decided, handles = self.decide()
        return self.answer(decided, handles, bad)

    def decide(self) -> tuple[int, Int32 | None]:
        diff = self.scheduler.schedule(self.now)
        assert diff is not None
        shape = self.rows.apply(diff)
        self.collector.step_decided(self.now, diff.step, shape)
        return diff.step, self.rows.take_handles()

    def answer(self, step: int, handles: Int32 | None, bad: tuple[int, ...] = ()) -> list[RequestRun]:
        self.now += 1.0
        self.scheduler.consume(OpaqueResult(ModelRunnerOutput(step, handles=handles, bad=list(bad))))
        return self.collector.step_finished(self.now, step, self.now - 1.0, self.now, handles)

    def finish(self) -> dict[float, int]:
        return dict(self.collector.finish(self.now).itl)


def test_clients_with_equal_ids_have_separate_records() -> None:
    bench = Bench()
    mine, other = bench.arrive("same", 0, 2), bench.arrive("same", 1, 3)
    assert [run for _ in range(3) for run in bench.step()] == [mine, other]
    assert (mine.first_token, mine.end, mine.num_output_tokens) == (1.0, 2.0, 2)
    assert (other.first_token, other.end, other.num_output_tokens) == (1.0, 3.0, 3)
    assert bench.finish() == {1000.0: 3}


def test_aborted_request_has_an_end_and_no_gap_after_it() -> None:
    bench = Bench()
    gone, stays = bench.arrive("gone"), bench.arrive("stays", num_output_tokens=5)
    bench.step()
    bench.step()
    in_flight, handles = bench.decide()
    bench.scheduler.consume(Abort(["gone"]))
    assert bench.collector.changed(2.5) == [gone]
    assert (gone.finish, gone.end, gone.num_output_tokens) == ("abort", 2.5, 2)
    bench.answer(in_flight, handles)
    while stays.end < 0:
        bench.step()
    assert stays.end == 5.0
    assert bench.finish() == {1000.0: 1 + 4}  # one of the aborted request, four of the other


def test_abort_before_the_first_token() -> None:
    bench = Bench()
    gone = bench.arrive("gone")
    bench.scheduler.consume(Abort(["gone"]))
    bench.collector.changed(0.5)
    assert (gone.finish, gone.first_token, gone.scheduled) == ("abort", -1.0, -1.0)
    assert bench.finish() == {}


def test_failed_request_gets_no_token_from_its_last_result() -> None:
    bench = Bench()
    fails, never = bench.arrive("fails"), bench.arrive("never")
    bench.step()
    handle = bench.scheduler.table.requests[0, "fails"].handle
    assert bench.step(bad=(handle,)) == [fails]
    bench.scheduler.consume(Fail("never", "a reason"))
    assert bench.collector.changed(2.0) == [never]
    assert (fails.finish, never.finish, never.finish_detail) == ("error", "error", "a reason")
    assert (fails.num_output_tokens, never.num_output_tokens) == (1, 2)
    assert bench.finish() == {1000.0: 1}


def test_ignores_results_of_earlier_epochs() -> None:
    bench = Bench()
    run = bench.arrive("a", num_output_tokens=3)
    bench.step()
    lost, handles = bench.decide()
    bench.scheduler.begin_worker_epoch()
    assert bench.answer(lost, handles) == []
    assert [moment.what for moment in run.moments] == ["preempt"]
    while run.end < 0:
        bench.step()
    assert [moment.what for moment in run.moments] == ["preempt", "resume"]
    assert run.num_preemptions == 1
    assert run.first_token == 1.0
    assert bench.finish() == {2000.0: 1, 1000.0: 1}  # one second for the lost step, one for the prefill after it


def test_accepted_drafts_have_gap_zero() -> None:
    bench = Bench()
    bench.arrive("a")
    bench.step()
    bench.step()
    bench.collector.step_finished(2.5, 99, 2.0, 2.5, np.array([0], np.int32), num_accepted=2)
    assert bench.finish() == {0.0: 2, 500.0: 1, 1000.0: 1}

"""Each reason to wait or to be preempted is reachable, recorded and counted; invalid messages are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_adapters import adapter_ref
from fake_items import image
from load_choices import compute_front, split
from scheduler_driver import Driver, change

from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.front_end_messages import Control, EndReason, Statistics
from quire.protocol.wire.side_rows import MAX_STEP_SIDE_BYTES
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.core.policies import QUIRE, Policies
from quire.scheduler_proc.features.result_bytes import ROW_BYTES
from quire.scheduler_proc.requests.reasons import HOLD_REASONS, RESERVED_REASONS, PreemptReason, WaitReason
from quire.scheduler_proc.scheduler import WorkerFault


def waits(driver: Driver, request_id: str) -> list[str]:
    """Return the reasons recorded for one request, in order."""
    return [d.reason for d in driver.scheduler.decisions.take() if (d.kind, d.request_id) == ("wait", request_id)]


def pair(*, first: list[int] | None = None, second: list[int] | None = None, **settings: Any) -> Driver:
    """Return an engine with two waiting requests."""
    driver = Driver(**settings)
    driver.add("first", first or [1, 2, 3], max_tokens=20)
    driver.add("second", second or [4, 5, 6], max_tokens=20)
    return driver


def max_num_seqs() -> Driver:
    driver = pair(max_num_seqs=1)
    driver.schedule()
    return driver


def token_budget() -> Driver:
    driver = pair(first=list(range(30)), max_num_batched_tokens=16)
    driver.schedule()
    return driver


def prefill_share() -> Driver:
    driver = Driver(max_num_batched_tokens=16, max_prefill_share=0.25)
    driver.add("decodes", [1], max_tokens=20)
    driver.step()
    driver.add("first", list(range(10)), max_tokens=2)
    driver.add("second", [3], max_tokens=2)
    driver.schedule()
    return driver


def whole_prompt() -> Driver:
    driver = pair(
        first=list(range(30)), second=list(range(40, 60)), max_num_batched_tokens=128, enable_chunked_prefill=False
    )
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=40)
    driver.schedule()
    return driver


def result_size() -> Driver:
    driver = pair(first=[1, 2, 3, 4, 5], enable_return_routed_experts=True)
    for request_id in ("first", "second"):  # as if five positions filled the result of a step
        ROW_BYTES.put(driver.request(request_id), MAX_STEP_SIDE_BYTES // 5)
    driver.schedule()
    return driver


def kv_blocks() -> Driver:
    driver = pair(first=list(range(20)), second=list(range(30, 46)), num_blocks=8)
    driver.schedule()
    return driver


def kv_pressure() -> Driver:
    driver = pair(first=list(range(20)), num_blocks=9, watermark=0.0, kv_pressure_high=0.6, kv_pressure_low=0.6)
    driver.schedule()
    return driver


def program_limit() -> Driver:
    """The contexts of two admitted programs fill the pool, and one request of another program runs."""
    driver = Driver(num_blocks=33, scheduling_policy="program", watermark=0.0)
    assert driver.scheduler.programs.limit is not None
    driver.scheduler.programs.limit.max_others = 1
    for job in ("admitted", "also admitted"):
        driver.add(job, [len(job)] * 36, job_id=job, max_tokens=2)
        driver.run()
    for job in ("first", "second"):
        driver.add(job, [len(job)] * 36, job_id=job, max_tokens=20)
    driver.step()
    return driver


def full_sequence() -> Driver:
    driver = pair(num_blocks=7, reserve_full_sequence=True)
    driver.schedule()
    return driver


def preempting() -> Driver:
    driver = Driver(num_blocks=9, enable_prefix_caching=False)
    for name in ("old", "second"):
        driver.add(name, [len(name)] * 7, max_tokens=13)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    return driver


def result_in_flight() -> Driver:
    """ "second" preempts itself, because "old" holds its blocks until its last result. No other work remains, so the
    next step is requested while the token of "second" is in flight."""
    driver = Driver(num_blocks=5, enable_prefix_caching=False, async_scheduling=True)
    driver.add("old", [1] * 7, max_tokens=2)
    driver.add("second", [2] * 7, max_tokens=9)
    driver.schedule()
    driver.schedule()
    driver.answer()
    assert driver.schedule() is None and driver.schedule() is None
    return driver


def paused() -> Driver:
    driver = max_num_seqs()
    driver.abort("first")
    driver.control("pause_new")
    driver.answer()
    driver.schedule()
    return driver


def loading() -> Driver:
    prompt = list(range(1, 41))
    driver = Driver(25, num_host_pages=65)
    for number, tokens in enumerate([prompt, *([100 + i] * 30 for i in range(6))]):
        driver.add(str(number), tokens, max_tokens=4)
        driver.run()
    driver.add("second", prompt, max_tokens=2)
    driver.fill()
    return driver


def fork() -> Driver:
    driver = Driver(max_num_batched_tokens=16)
    driver.add("first", list(range(1, 30)), max_tokens=20)
    driver.add("second", [], max_tokens=20, forked_from="first")
    driver.schedule()
    return driver


def beams() -> Driver:
    driver = Driver()
    driver.add("second", [1, 2, 3], max_tokens=5, use_beam_search=True, beam_width=2)
    driver.step()
    driver.schedule()
    return driver


def adapter() -> Driver:
    driver = Driver(enable_lora=True)
    driver.add("second", [1, 2, 3], max_tokens=5, adapter=adapter_ref("a"))
    driver.schedule()
    return driver


def encoder() -> Driver:
    driver = Driver(vision=VisionConfig("TinyVision", 9), encoder_cache_tokens=8)
    driver.add("second", [1, 2, 3], max_tokens=5, items=[image("a", (0, 2))])
    driver.schedule()
    return driver


def held(reason: WaitReason) -> Callable[[], Driver]:
    def case() -> Driver:
        driver = pair()
        driver.hold("second", reason.value)
        return driver

    return case


CASES: dict[WaitReason, Callable[[], Driver]] = {
    WaitReason.MAX_NUM_SEQS: max_num_seqs,
    WaitReason.TOKEN_BUDGET: token_budget,
    WaitReason.PREFILL_SHARE: prefill_share,
    WaitReason.WHOLE_PROMPT: whole_prompt,
    WaitReason.RESULT_SIZE: result_size,
    WaitReason.KV_BLOCKS: kv_blocks,
    WaitReason.KV_PRESSURE: kv_pressure,
    WaitReason.PROGRAM_LIMIT: program_limit,
    WaitReason.FULL_SEQUENCE: full_sequence,
    WaitReason.PREEMPTING: preempting,
    WaitReason.RESULT_IN_FLIGHT: result_in_flight,
    WaitReason.PAUSED: paused,
    WaitReason.SUSPECT: lambda: suspect(),
    WaitReason.LOADING: loading,
    WaitReason.FORK: fork,
    WaitReason.BEAMS: beams,
    WaitReason.ADAPTER: adapter,
    WaitReason.ENCODER: encoder,
    **{reason: held(reason) for reason in HOLD_REASONS},
}


@pytest.mark.parametrize("reason", CASES)
def test_reason_to_wait_is_recorded_and_reported(reason: WaitReason) -> None:
    driver = CASES[reason]()
    assert driver.request("second").wait_reason is reason
    assert driver.scheduler.statistics().waiting_by_reason[reason] == 1
    assert waits(driver, "second")[-1] == reason
    driver.scheduler.config = driver.config
    driver.control("resume")
    if reason in HOLD_REASONS:
        driver.release("second")
    driver.finish()
    assert driver.answers["second"].reason is EndReason.LENGTH


def test_a_request_without_a_turn_runs() -> None:
    driver = Driver(enable_lora=True, max_loras=1)
    for name in ("first", "second"):
        driver.add(name, [1, 2, 3], max_tokens=20, adapter=adapter_ref(name))
        driver.step(4)
    assert WaitReason.ADAPTER_TURN in waits(driver, "second")
    listed = driver.control("requests")
    assert WaitReason.ADAPTER_TURN not in listed.waiting_by_reason
    assert {(each.state, each.reason) for each in listed.requests} == {("running", ""), ("running", "adapter_turn")}
    driver.finish()


def test_every_reason_to_wait_has_a_case() -> None:
    counted = set(WaitReason) - {WaitReason.ADAPTER_TURN}
    assert set(CASES) == counted - {WaitReason.QUEUED}
    driver = pair()
    shown = dict.fromkeys(counted - set(RESERVED_REASONS), 0)
    assert driver.scheduler.statistics().waiting_by_reason == {**shown, WaitReason.QUEUED: 2}


def test_reason_is_recorded_once_until_it_changes() -> None:
    driver = max_num_seqs()
    driver.step(8)
    assert waits(driver, "second") == [WaitReason.MAX_NUM_SEQS]


def test_requests_behind_the_first_count_for_its_reason() -> None:
    driver = max_num_seqs()
    driver.add("third", [1], max_tokens=1)
    assert driver.scheduler.statistics().waiting_by_reason["max_num_seqs"] == 2
    assert waits(driver, "third") == []


def preempt(policy: str, worse: int = 0, policies: Policies = QUIRE) -> Driver:
    driver = Driver(num_blocks=9, enable_prefix_caching=False, scheduling_policy=policy, policies=policies)
    driver.add("old", [1] * 7, max_tokens=13, priority=worse)
    driver.add("young", [2] * 7, max_tokens=13)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    return driver


def itself() -> Driver:
    driver = Driver(num_blocks=5, enable_prefix_caching=False)
    driver.add("old", [1] * 5, max_tokens=9)
    driver.add("young", [2] * 6, max_tokens=7)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    return driver


def new_epoch() -> Driver:
    driver = pair()
    driver.step()
    driver.begin_worker_epoch()
    return driver


def suspect() -> Driver:
    """Both were running when the workers died, twice: the first one runs alone."""
    driver = pair()
    for _ in range(2):
        driver.schedule()
        driver.restart_worker()
    driver.schedule()
    return driver


def suspect_after_suspect() -> Driver:
    driver = suspect()
    while not driver.scheduler.decisions.preemptions[PreemptReason.SUSPECT]:
        driver.step()
    return driver


def read_from_a_bad_one() -> Driver:
    driver = Driver()
    driver.add("writer", list(range(20)), max_tokens=9)
    driver.step()
    driver.add("reader", list(range(20)), max_tokens=9)
    driver.step()
    driver.worker.bad_from["writer"] = 2
    driver.step()
    return driver


def over_share() -> Driver:
    driver = Driver(max_num_seqs=3)
    for name in ("many0", "many1", "many2"):
        driver.add(name, [1, 2], max_tokens=9, tenant=1)
    driver.step()
    driver.add("other", [3], max_tokens=2, tenant=2)
    driver.step()
    return driver


def held() -> Driver:
    driver = pair()
    driver.step()
    driver.hold("first")
    driver.release("first")
    return driver


def joins_load() -> Driver:
    driver = split()
    compute_front(driver)
    return driver


PREEMPTIONS: dict[PreemptReason, tuple[Callable[[], Driver], str, str]] = {
    PreemptReason.LEAST_LOSS: (lambda: preempt("fcfs", 5), "young", "old"),
    PreemptReason.YOUNGEST: (lambda: preempt("fcfs", policies=Policies(least_loss=False)), "young", "old"),
    PreemptReason.LOWEST_PRIORITY: (lambda: preempt("priority", 5), "old", "young"),
    PreemptReason.ITSELF: (itself, "young", "young"),
    PreemptReason.BAD_PREFIX: (read_from_a_bad_one, "reader", ""),
    PreemptReason.NEW_EPOCH: (new_epoch, "first", ""),
    PreemptReason.SUSPECT: (suspect_after_suspect, "first", "second"),
    PreemptReason.HELD: (held, "first", ""),
    PreemptReason.JOINS_LOAD: (joins_load, "again", ""),
    PreemptReason.LAST_PROGRAM: (lambda: preempt("program"), "young", "old"),
    PreemptReason.OVER_SHARE: (over_share, "many2", "other"),
}


@pytest.mark.parametrize("reason", PreemptReason)
def test_reason_of_preemption_is_recorded_and_counted(reason: PreemptReason) -> None:
    case, victim, beneficiary = PREEMPTIONS[reason]
    driver = case()
    assert driver.scheduler.statistics().preemptions_by_reason[reason.value] > 0
    found = [d for d in driver.scheduler.decisions.take() if (d.kind, d.reason) == ("preempt", reason)]
    assert (found[0].request_id, found[0].beneficiary) == (victim, beneficiary)
    driver.finish()


def test_preemption_counts_start_at_zero() -> None:
    assert Driver().scheduler.statistics().preemptions_by_reason == dict.fromkeys(map(str, PreemptReason), 0)


def test_evictions_record_their_beneficiary() -> None:
    driver = Driver(num_blocks=9)
    driver.add("first", list(range(20)), max_tokens=2)
    driver.run()
    driver.add("next", list(range(50, 70)), max_tokens=12)
    driver.run()
    evictions = [d for d in driver.scheduler.decisions.take() if d.kind == "evict"]
    assert {(d.reason, d.beneficiary) for d in evictions} == {("admission", "next"), ("decode", "")}
    assert sum(d.num_blocks for d in evictions) == driver.scheduler.statistics().num_evicted_blocks > 0


# ---- invalid messages


def test_messages_for_unknown_requests_are_counted_and_ignored() -> None:
    driver = pair()
    driver.step()
    driver.abort("unknown")
    driver.abort("first", client=1)  # request of another client
    driver.stop("unknown", 3)
    driver.stop("second", 3, client=2)
    assert driver.scheduler.statistics().num_stray_messages == 4
    assert driver.answers["first"].ended is None and driver.answers["second"].ended is None


def test_messages_after_the_end_are_counted_and_ignored() -> None:
    driver = pair()
    driver.run()
    ends = [driver.answers[name].ended for name in ("first", "second")]
    driver.abort("first", "second")
    driver.stop("first", 1)
    driver.abort("first")
    assert driver.scheduler.statistics().num_stray_messages == 4
    assert [driver.answers[name].ended for name in ("first", "second")] == ends
    driver.check_drained()


def test_duplicate_request_id_is_refused_while_in_use() -> None:
    driver = Driver()
    driver.add("a", [1], max_tokens=3)
    driver.add("a", [2], max_tokens=3)
    (rejected,) = driver.refused
    assert (rejected.code, rejected.param) == ("duplicate_request_id", "request_id")
    driver.add("b", [1], max_tokens=3)
    driver.run()
    assert driver.scheduler.statistics().num_requests_refused == 1
    driver.answers.pop("a")
    driver.add("a", [2], max_tokens=1)
    driver.run()
    assert driver.answers["a"].reason is EndReason.LENGTH


def test_full_queue_reports_the_number_of_waiting_requests() -> None:
    driver = Driver(max_num_seqs=1, max_num_queued_reqs=2)
    for name in "abcd":
        driver.add(name, [1], max_tokens=2)
    rejected = driver.answers["c"].rejected
    assert rejected is not None and rejected.code == "queue_full" and "2 requests wait" in rejected.message
    driver.step()
    driver.add("e", [1], max_tokens=2)
    assert driver.answers["e"].rejected is None, "one is running now"
    driver.run()
    assert driver.scheduler.statistics().num_requests_refused == 2


def result(**fields: Any) -> ModelRunnerOutput:
    tokens, handles = np.array([1, 2], np.int32), np.array([0, 1], np.int32)
    return change(ModelRunnerOutput(1, tokens, handles), **fields)


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        (result(step=2), "unexpected result of step 2, expected 1"),
        (result(step=0), "unexpected result of step 0, expected 1"),
        (result(handles=np.array([0, 5], np.int32)), "handles differ from those of the sampling requests"),
        (result(handles=np.array([0, 0], np.int32)), "handles differ"),
        (result(handles=np.array([0], np.int32), tokens=np.array([1], np.int32)), "handles differ"),
        (result(handles=None, tokens=None), "handles differ"),
        (result(tokens=np.array([1], np.int32)), "1 tokens for 2 requests"),
        (result(tokens=np.array([1, 1000], np.int32)), "outside of the vocabulary"),
        (result(tokens=np.array([1, -1], np.int32)), "outside of the vocabulary"),
        (result(counts=np.array([1, 2], np.int32)), "counts do not match handles and tokens"),
        (result(counts=np.array([2, 0], np.int32)), "handle 0 has 2 tokens, expected 1 to 1"),
        (result(bad=[7]), "bad or failed handles that did not sample"),
        (result(failed=[(0, "x"), (5, "x")]), "bad or failed handles that did not sample"),
    ],
)
def test_refuses_invalid_result_without_change(invalid: ModelRunnerOutput, text: str) -> None:
    driver = pair()
    driver.schedule()
    before = driver.scheduler.statistics()
    with pytest.raises(WorkerFault, match=text):
        driver.scheduler.consume(invalid)
    driver.scheduler.check()
    assert driver.scheduler.statistics() == before and driver.scheduler.take_messages() == []
    driver.finish()


def test_refuses_unexpected_result() -> None:
    with pytest.raises(WorkerFault, match="unexpected result of step 1, expected none"):
        Driver().scheduler.consume(result())


def test_unknown_control_is_answered_and_ignored() -> None:
    driver = pair()
    driver.scheduler.consume(Control("self_destruct", 9))
    ((_, message),) = driver.scheduler.take_messages()
    assert isinstance(message, Statistics) and (message.query, message.done) == (9, False)
    driver.finish()

"""The lines of a run: enough to replay it, without user texts and without unchanged requests."""

from typing import Any

import numpy as np
from lines_in_memory import record_log
from scheduler_driver import Driver, expected_tokens, make_config, make_layout, make_request

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs
from quire.protocol.wire.front_end_messages import AddRequest, Control, EndReason
from quire.scheduler_proc.requests.events import Fail, Refuse
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.lines import (
    Arrival,
    Event,
    Header,
    PrefixCacheEvent,
    Result,
    StepDecision,
    StepSnapshot,
    WorkerEpoch,
    encode_line,
)
from quire.scheduler_proc.trace.recorder import TraceRecorder, make_immediately
from quire.scheduler_proc.trace.translate import event_line, without_texts

SECRET = "hunter2"
PROMPT = list(range(3, 20))


def of(driver: Driver, *kinds: type) -> list[Any]:
    return [line for line in driver.lines() if isinstance(line, kinds)]


def test_a_steady_decode_step_is_a_line_without_requests() -> None:
    driver = Driver(num_blocks=400, block_size=16, max_num_seqs=32, max_num_batched_tokens=512, async_scheduling=True)
    for index in range(32):
        driver.add(f"r{index}", [index], max_tokens=40)
    driver.run()
    assert driver.replay_lines() is None
    quiet = [line for line in of(driver, StepDecision) if line.step in range(4, 16)]
    assert len(quiet) == 12 and all(len(encode_line(line)) < 80 for line in quiet)
    results = [line for line in of(driver, Result) if line.step in range(4, 38)]
    assert all(line.handles is None and len(encode_line(line)) < 100 for line in results)
    assert max(len(line.hashes) for line in of(driver, StepDecision)) == 32, (
        "hashes are listed where blocks become full"
    )
    assert len(of(driver, StepSnapshot)) < 12, "snapshots only after changes"


def test_traces_have_no_user_text() -> None:
    driver = Driver(eos=[2])
    driver.add(
        "a",
        PROMPT,
        max_tokens=5,
        min_tokens=1,
        stop=[SECRET],
        stop_token_ids=[9],
        bad_words=[SECRET],
        logit_bias={731: 1.0},
        allowed_token_ids=[731, 732],
        extra_args={"x": SECRET},
        cache_salt=SECRET,
        prompt_logprobs=3,
        structured_outputs=StructuredOutputs(regex=SECRET),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    )
    driver.run()
    assert driver.replay_lines() is None
    text = b"\n".join(encode_line(line) for line in driver.lines())
    assert SECRET.encode() not in text and b"731" not in text and b'model_path":"/' not in text
    (arrival,) = of(driver, Arrival)
    assert arrival.request.sampling == SamplingParams(
        max_tokens=5,
        min_tokens=1,
        stop_token_ids=[9],
        prompt_logprobs=0,
        structured_outputs=StructuredOutputs(json_object=True),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    )
    assert not len(arrival.request.prompt_token_ids)
    asked = [line for line in record_log(driver.header, driver.log, prompts=True) if isinstance(line, Arrival)]
    assert asked[0].request.prompt_token_ids.tolist() == PROMPT


def test_each_field_of_a_request_is_public_or_blanked() -> None:
    """A new field of the message is written to traces unless ``without_texts`` blanks it: decide here."""
    blanked = {"prompt_token_ids", "output_token_ids", "cache_salt", "hint", "num_forked_tokens"}
    numbers = {"seed", "priority", "arrival", "tenant", "resubmitted", "is_last_step", "request_id", "job_id"}
    converted = {"sampling", "adapter", "pooling", "forked_from", "items"}
    assert set(AddRequest.__struct_fields__) == blanked | numbers | converted | {"kv_transfer"}  # the last is refused
    full = AddRequest("a", np.ones(2, np.int32), SamplingParams(), 1, np.ones(2, np.int32), cache_salt=SECRET, hint="h")
    public = without_texts(full)
    assert not any(np.size(getattr(public, name)) and getattr(public, name) for name in blanked - {"output_token_ids"})
    assert public.output_token_ids is None


def test_traces_have_no_messages_of_grammar_compilers() -> None:
    for event in (Refuse("a", "invalid_grammar", "structured_outputs", SECRET), Fail("a", f"failed: {SECRET}")):
        line = encode_line(event_line(0.0, 0, event, []))
        assert (SECRET.encode() not in line and b"failed" in line) or b"invalid_grammar" in line


def test_the_header_has_no_paths_or_addresses() -> None:
    driver = Driver(
        model_path="/home/x/model",
        kv_events_endpoint="ipc:///home/x/e",
        trace="/home/x/t",
        crash_dump_dir="/home/x/c",
        head_key_file="/home/x/keys/head.key_secret",
    )
    header = driver.lines()[0]
    assert isinstance(header, Header) and b"/home" not in encode_line(header)
    assert (header.num_blocks, header.config.block_size, header.complete) == (33, 4, True)


def test_refused_and_duplicate_requests_leave_no_line() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("a", PROMPT, max_tokens=9)
    driver.add("a", [1, 2], max_tokens=3)
    driver.add("b", [], max_tokens=3)
    driver.add("c", [5000], max_tokens=3)
    driver.step()
    driver.add("a", [1, 2], max_tokens=3)
    driver.add("d", [7], max_tokens=2, client=1)
    driver.run()
    assert [(line.client, line.req_id) for line in of(driver, Arrival)] == [(0, "a"), (1, "d")]
    assert driver.replay_lines() is None


def test_a_resubmission_has_its_number_of_delivered_tokens() -> None:
    driver = Driver()
    driver.add("a", PROMPT, expected_tokens(PROMPT, 5), max_tokens=9)
    driver.add("full", PROMPT, expected_tokens(PROMPT, 5), max_tokens=5)
    driver.run()
    a, full = of(driver, Arrival)
    assert (a.num_prompt_tokens, a.num_output_tokens, len(a.block_hashes)) == (17, 5, 8 * (22 // 4))
    assert (full.num_output_tokens, full.block_hashes) == (5, b""), "it ended before its first step"
    assert driver.replay_lines() is None


def test_a_resubmission_ended_by_repetition_replays() -> None:
    driver = Driver()
    driver.add("other", PROMPT, max_tokens=9)
    driver.add(
        "a", PROMPT, [7] * 9, max_tokens=20, repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=3)
    )
    assert driver.answers["a"].reason is EndReason.REPETITION
    driver.run()
    assert driver.replay_lines() is None


def test_admissions_and_reasons_belong_to_their_step() -> None:
    driver = Driver(num_blocks=12, max_num_seqs=2)
    for name in "abc":
        driver.add(name, PROMPT, max_tokens=16)
    driver.run()
    assert driver.replay_lines() is None
    hits = of(driver, PrefixCacheEvent)
    assert [(hit.req_id, hit.local_hit_tokens) for hit in hits[:2]] == [("a", 0), ("b", 16)]
    assert all((hit.total_prompt_tokens, hit.num_tokens >= 17) == (17, True) for hit in hits)
    reasons = [(line.step, reason) for line in of(driver, StepDecision) for reason in line.reasons]
    assert (1, "wait", "c", "max_num_seqs") in [(step, r.what, r.req_id, r.reason) for step, r in reasons]
    assert [(r.req_id, r.reason, r.beneficiary) for _, r in reasons if r.what == "preempt"] == [("b", "itself", "b")]


def test_a_worker_epoch_with_a_halved_budget_replays() -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.add("a", list(range(1, 60)), max_tokens=9)
    driver.step()
    assert driver.scheduler.halve_token_budget()
    driver.log.token_budget_halved(0.0)
    driver.begin_worker_epoch()
    driver.deliver()
    driver.run()
    assert [line.budget_halved for line in of(driver, WorkerEpoch)] == [True]
    assert max(count for line in of(driver, StepDecision) if line.step > 1 for _, count in line.counts) == 16
    assert driver.replay_lines() is None


def test_only_controls_that_change_state_leave_a_line() -> None:
    driver = Driver()
    for kind in ("statistics", "reset_prefix_cache", "pause_new", "resume"):
        driver.control(kind)
    assert [line.event.kind for line in of(driver, Event)] == ["reset_prefix_cache", "pause_new", "resume"]


def test_times_are_those_of_the_loop() -> None:
    config = make_config()
    decision_log = DecisionLog()
    scheduler = Scheduler(config, make_layout(config), 33, hooks=decision_log)
    lines: list[Any] = []
    recorder = TraceRecorder(scheduler, decision_log, make_immediately(lines.append))
    event = make_request("a", PROMPT, max_tokens=2, arrival=0.5)
    for time, message in ((1.0, event), (2.0, Control("resume"))):
        scheduler.consume(message)
        recorder.consumed(time, 0, message)
    recorder.before_step()
    recorder.decided(3.0, scheduler.schedule(3.0))
    assert [line.now for line in lines if not isinstance(line, PrefixCacheEvent)] == [1.0, 2.0, 3.0, 3.0]
    assert lines[0].request.arrival == 0.5
    assert (lines[2].running, lines[2].waiting, lines[2].free_blocks) == (0, 1, 32)

"""Pooled requests: they end with the last token of their prompt, sample nothing, and each client gets its own rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_worker import contexts_of, pooled_row
from keyframed_runs import keyframe_of, tails
from lines_in_memory import numbered, record_log
from log_replay import replay
from msgspec.structs import replace
from scheduler_driver import Driver, change, expected_tokens, make_config
from side_parts import with_rows

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.front_end_messages import EndReason, StepOutputs
from quire.protocol.wire.side_rows import MAX_SIDE_BYTES, POOLED, ROUTED_EXPERTS, SideRows, find_rows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.lines import Arrival, decode_line, encode_line

LONG = list(range(100, 120))
LAST = PoolingConfig(tasks=["embed", "token_embed"], size=6)
ALL = PoolingConfig(tasks=["embed", "token_embed", "classify"], pooling="mean", size=6, labels=["a", "b", "c"])
EMBED, EACH, CLASSIFY = PoolingParams(), PoolingParams("token_embed"), PoolingParams("classify")
NO_KV = KVLayout([], num_kv_heads=1, head_dim=4, dtype="float32")


def pooling_driver(pooling: PoolingConfig = LAST, **settings: Any) -> Driver:
    return Driver(pooling=pooling, **settings)


def encoder(**settings: Any) -> Driver:
    whole = {"generates": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 128, "num_blocks": 2}
    return pooling_driver(ALL, layout=NO_KV, **whole | settings)


def rows_of(prompt: list[int], width: int = 6, *, each: bool = False) -> dict[int, list[float]]:
    contexts = contexts_of(prompt) if each else contexts_of(prompt)[-1:]
    return dict(enumerate(pooled_row(context, width) for context in contexts))


def check_ended(driver: Driver, request_id: str, rows: dict[int, list[float]]) -> None:
    answer = driver.answers[request_id]
    assert answer.ended is not None and answer.reason is EndReason.STOPPED, answer
    assert answer.ended.num_output_tokens == 0 and not answer.tokens
    assert answer.pooled == rows


def test_a_pooled_request_ends_with_its_prompt_and_leaves_the_batch() -> None:
    driver = pooling_driver(async_scheduling=True)
    driver.add("chat", [1, 2], max_tokens=20)
    driver.step(3)
    driver.add("a", LONG, pooling=EMBED)
    first = driver.schedule()
    assert first is not None and [(new.request_id, new.pooling) for new in first.new_requests] == [("a", EMBED)]
    driver.answer()
    second = driver.schedule()
    assert second is not None and second.removed == [new.handle for new in first.new_requests]
    assert driver.request("a") in driver.scheduler.table.leaving.values()
    driver.settle()
    check_ended(driver, "a", rows_of(LONG))
    driver.finish()
    assert driver.answers["chat"].tokens == expected_tokens([1, 2], 20)
    statistics = driver.scheduler.statistics()
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (22, 20)
    assert driver.scheduler.num_results == 21


def test_decoding_requests_stay_in_steady_decode_beside_pooled_ones() -> None:
    driver = pooling_driver(max_num_batched_tokens=16)
    driver.add("chat", [1, 2], max_tokens=40)
    driver.step(4)
    for number in range(5):
        driver.add(f"e{number}", [*LONG, number], pooling=EMBED)
    for _ in range(8):
        driver.step()
        assert len(driver.scheduler.steady_decode) == 1
    driver.finish()
    for number in range(5):
        check_ended(driver, f"e{number}", rows_of([*LONG, number]))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_every_client_gets_its_own_rows_over_chunks(asynchronous: bool, budget: int) -> None:
    driver = pooling_driver(ALL, async_scheduling=asynchronous, max_num_batched_tokens=budget)
    driver.add("a", LONG, pooling=EMBED, client=0)
    driver.add("b", LONG[1:], pooling=EACH, client=1)
    driver.add("c", LONG[2:], pooling=CLASSIFY, client=1)
    driver.add("d", LONG[3:], pooling=PoolingParams("embed", 4), client=2)
    driver.add("e", [7], pooling=EMBED, client=2)
    driver.add("chat", LONG, max_tokens=3)
    driver.finish()
    check_ended(driver, "a", rows_of(LONG))
    check_ended(driver, "b", rows_of(LONG[1:], each=True))
    check_ended(driver, "c", rows_of(LONG[2:], 3))
    check_ended(driver, "d", rows_of(LONG[3:], 4))
    check_ended(driver, "e", rows_of([7]))


def test_rows_and_end_are_in_one_message() -> None:
    driver = pooling_driver()
    driver.add("a", LONG, pooling=EMBED)
    driver.add("chat", [1, 2], max_tokens=4)
    driver.schedule()
    driver.answer()
    ((_, message),) = driver.messages
    assert isinstance(message, StepOutputs)
    assert [rows.handles for rows in message.side] == [[ended.handle for ended in message.ended]]


def test_only_pooling_of_the_last_token_reads_the_prefix_cache() -> None:
    skipping = replace(EMBED, skip_reading_prefix_cache=True)
    cases = ((LAST, EMBED, 16), (LAST, skipping, 0), (LAST, EACH, 0), (ALL, EMBED, 0), (ALL, CLASSIFY, 0))
    for pooling, params, hits in cases:
        driver = pooling_driver(pooling)
        for request_id in ("first", "second"):
            driver.add(request_id, LONG, pooling=params)
            driver.run()
        driver.add("chat", LONG, max_tokens=1)
        driver.finish()
        assert driver.answers["second"].num_cached_tokens == hits
        assert driver.answers["chat"].num_cached_tokens == 16, "all of them write it"


def test_prompt_may_fill_the_context_and_the_pool() -> None:
    driver = pooling_driver(max_model_len=20, num_blocks=6)
    driver.add("a", LONG, pooling=EMBED)
    driver.add("too long", [*LONG, 1], pooling=EMBED)
    driver.finish()
    check_ended(driver, "a", rows_of(LONG))
    rejected = driver.answers["too long"].rejected
    assert rejected is not None and (rejected.code, rejected.param) == ("context_length_exceeded", "prompt")
    assert "20 tokens of a prompt; the prompt has 21" in rejected.message
    driver = pooling_driver(num_blocks=5)
    driver.add("a", LONG[:16], pooling=EMBED)
    driver.add("too long", LONG[:17], pooling=EMBED)
    driver.finish()
    check_ended(driver, "a", rows_of(LONG[:16]))
    rejected = driver.answers["too long"].rejected
    assert rejected is not None and rejected.code == "kv_pool_too_small"
    assert rejected.message == "the prompt needs 5 KV blocks; the pool has 4"


WIDE = PoolingConfig(tasks=["embed", "token_embed"], size=2**20, matryoshka_dimensions=[2, 4])


@pytest.mark.parametrize(
    ("pooling", "extra", "param", "text"),
    [
        (None, {"pooling": EMBED}, "task", "this model cannot embed; its pooling tasks: none"),
        (LAST, {"pooling": CLASSIFY}, "task", "this model cannot classify; its pooling tasks: embed, token_embed"),
        (
            LAST,
            {"pooling": PoolingParams("embed", 7)},
            "dimensions",
            "dimensions must be an integer from 1 to 6 (got 7)",
        ),
        (WIDE, {"pooling": PoolingParams("embed", 3)}, "dimensions", "dimensions must be one of 2, 4, 1048576 (got 3)"),
        (ALL, {"pooling": PoolingParams("classify", 2)}, "dimensions", "cannot be combined with task classify (got 2)"),
        (WIDE, {"pooling": EACH}, "prompt", f"have {4 * 20 * 2**20} bytes, more than the {MAX_SIDE_BYTES}"),
        (LAST, {"pooling": EMBED, "output": [5]}, "output_token_ids", "has no output (got 1 tokens)"),
    ],
)
def test_refusals(pooling: PoolingConfig | None, extra: dict[str, Any], param: str, text: str) -> None:
    driver = Driver(pooling=pooling)
    driver.add("a", LONG, **extra)
    driver.check_drained()
    rejected = driver.answers["a"].rejected
    assert rejected is not None and rejected.param == param and text in rejected.message


def test_a_whole_vector_is_one_of_the_sizes() -> None:
    """Also if the sizes to which it may be cut are named without it, as on the side of the front end."""
    driver = Driver(pooling=PoolingConfig(tasks=["embed"], size=6, matryoshka_dimensions=[2, 4]))
    driver.add("a", LONG, pooling=PoolingParams("embed", 6))
    driver.finish()
    check_ended(driver, "a", rows_of(LONG))


def test_a_model_that_only_pools_refuses_to_generate() -> None:
    driver = encoder()
    driver.add("a", LONG)
    rejected = driver.answers["a"].rejected
    assert rejected is not None and rejected.code == "unsupported"
    assert rejected.message == "this model cannot generate tokens; its pooling tasks: embed, token_embed, classify"


def test_forks_of_and_from_pooled_requests_are_refused() -> None:
    driver = pooling_driver(max_num_batched_tokens=8)
    driver.add("pooled", LONG, pooling=EMBED)
    driver.add("chat", [1, 2], max_tokens=30)
    driver.step(2)
    driver.add("a", [], forked_from="pooled")
    driver.add("b", [], forked_from="chat", pooling=EMBED)
    for name in ("a", "b"):
        rejected = driver.answers[name].rejected
        assert rejected is not None and rejected.param == "forked_from"
    driver.finish()


def test_sampling_parameters_are_unused() -> None:
    driver = pooling_driver()
    driver.add("a", LONG, pooling=EMBED, use_beam_search=True, beam_width=2, max_tokens=1)
    driver.add("b", LONG, pooling=EMBED, prompt_logprobs=2, max_tokens=1)
    driver.finish()
    check_ended(driver, "a", rows_of(LONG))
    check_ended(driver, "b", rows_of(LONG))
    assert not driver.answers["b"].prompt_logprobs


def preempt(driver: Driver, request_id: str) -> None:
    """Preempt a running request, as any of the reasons does."""
    request = driver.request(request_id)
    driver.scheduler.table.preempt(request)
    driver.scheduler.kv.free(request)
    driver.scheduler.check()


def test_hidden_states_that_are_not_finite_end_the_request_alone() -> None:
    driver = pooling_driver()
    driver.worker.bad_from["a"] = driver.worker.failed_at["b"] = 0
    for name in "abc":
        driver.add(name, [*LONG, ord(name)], pooling=EMBED)
    driver.finish()
    for name, text in (("a", "numerical_error: "), ("b", "request_failed: no reason")):
        answer = driver.answers[name]
        assert answer.ended is not None and answer.reason is EndReason.ERROR and not answer.pooled
        assert answer.ended.detail.startswith(text)
    check_ended(driver, "c", rows_of([*LONG, ord("c")]))


def test_bad_hidden_states_of_a_preempted_request_are_retried_once() -> None:
    for always in (False, True):
        driver = pooling_driver(async_scheduling=True)
        driver.add("a", LONG, pooling=EMBED)
        driver.worker.bad_once.add(("a", 1))
        driver.schedule()
        preempt(driver, "a")
        driver.settle()
        assert driver.answers["a"].ended is None
        if always:
            driver.worker.bad_once.add(("a", 1))
        driver.finish()
        if always:
            assert driver.answers["a"].reason is EndReason.ERROR
        else:
            check_ended(driver, "a", rows_of(LONG))


def with_pooled(change_rows: Callable[[Any], Any]) -> Callable[[ModelRunnerOutput], Any]:
    return lambda result: with_rows(result, POOLED, change_rows(find_rows(result.side, POOLED)))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (with_pooled(lambda rows: None), "no pooled rows for handles"),
        (with_pooled(lambda rows: rows.first_rows([1, 0, 0])), "no pooled rows for handles"),
        (with_pooled(lambda rows: change(rows, handles=[rows.handles[0]] * 3)), "occurs twice"),
        (with_pooled(lambda rows: change(rows, handles=[*rows.handles[:2], 99])), "has none"),
        (with_pooled(lambda rows: SideRows.of(POOLED, [*rows.parts(), (99, 0, [np.zeros((1, 6), "f4")])])), "has none"),
        (with_pooled(lambda rows: change(rows, starts=[1, 1, 1])), "expected rows 0 to"),
        (with_pooled(lambda rows: change(rows, widths=[1, 1, 1])), "expected sizes"),
        (with_pooled(lambda rows: SideRows.of(POOLED, [(h, s, [r[:, :-1]]) for h, s, (r,) in rows.parts()])), "values"),
        (with_pooled(lambda rows: SideRows.of(POOLED, [(h, s, [r[:0]]) for h, s, (r,) in rows.parts()])), "range"),
        (with_pooled(lambda rows: change(rows, counts=[-1, 1, 1])), "range"),
        (with_pooled(lambda rows: change(rows, counts=[1, 1])), "numbers"),
        (lambda result: change(result, bad=[99]), "bad or failed"),
    ],
)
def test_wrong_pooled_rows_are_a_fault_of_the_worker(damage: Callable[[Any], Any], text: str) -> None:
    faults: list[str] = []

    def damaged(result: ModelRunnerOutput) -> ModelRunnerOutput:
        with pytest.raises(Exception, match=text) as raised:
            driver.scheduler.in_flight.match(damage(result))
        faults.append(type(raised.value).__name__)
        return damage(result)

    driver = pooling_driver()
    driver.add("a", LONG, pooling=EMBED)
    driver.add("b", [1, 2], pooling=EACH)
    driver.add("c", [3], pooling=EMBED)
    driver.schedule()
    driver.execute()
    assert driver.deliver_damaged(damaged) and faults == ["WorkerFault"]
    driver.finish()
    check_ended(driver, "b", rows_of([1, 2], each=True))


def test_missing_rows_of_a_chunk_are_a_fault_of_the_worker() -> None:
    driver = pooling_driver(max_num_batched_tokens=8)
    driver.add("a", LONG, pooling=EACH)
    driver.schedule()
    driver.execute()
    assert driver.deliver_damaged(lambda result: change(result, side=[]))
    driver.finish()
    check_ended(driver, "a", rows_of(LONG, each=True))


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: change(rows, handles=[99]),
        lambda rows: change(rows, starts=[1]),
        lambda rows: change(rows, starts=[-1]),
        lambda rows: change(rows, counts=[1]),
        lambda rows: SideRows.of(ROUTED_EXPERTS, [*rows.parts(), (rows.handles[0], 0, [np.zeros((1, 9), np.int32)])]),
        lambda rows: change(rows, handles=[1]),  # which did not request them
        lambda rows: SideRows.of(ROUTED_EXPERTS, [(h, start, [part[:, :1]]) for h, start, (part,) in rows.parts()]),
    ],
)
def test_wrong_routed_experts_are_a_fault_of_the_worker(damage: Callable[[Any], Any]) -> None:
    driver = Driver(enable_return_routed_experts=True)
    driver.add("a", LONG, max_tokens=3, return_routed_experts=True)
    driver.add("b", LONG[:3], max_tokens=3)
    driver.schedule()
    driver.execute()
    assert driver.deliver_damaged(lambda result: with_rows(result, ROUTED_EXPERTS, damage(result.side[0])))
    driver.finish()
    assert len(driver.answers["a"].experts) == len(LONG) + 2 and not driver.answers["b"].experts


def test_a_model_without_kv_computes_whole_prompts_without_blocks() -> None:
    driver = encoder(max_num_seqs=4, async_scheduling=True, enable_prefix_caching=True)
    prompts = {f"e{number}": [number + 1] * (10 * number + 1) for number in range(12)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, pooling=(EMBED, EACH, CLASSIFY)[len(prompt) % 3])
    driver.finish()
    assert driver.scheduler.kv.max_tokens > 10**9
    for name, prompt in prompts.items():
        params = (EMBED, EACH, CLASSIFY)[len(prompt) % 3]
        check_ended(driver, name, rows_of(prompt, ALL.width(params.task), each=params is EACH))
    for diff in driver.diffs:
        assert diff.block_ids is None and diff.appended_handles is None and len(diff.new_requests) <= 4
        assert all(new.num_blocks == [] for new in diff.new_requests)
        assert sum(new.num_tokens for new in diff.new_requests) <= 128
    statistics = driver.scheduler.statistics()
    assert statistics.num_free_blocks == statistics.num_usable_blocks == 1
    assert statistics.prefix_cache_hit_tokens == 0
    assert driver.replay_lines() is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"generates": True}, "cannot generate tokens"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill False"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold 0"),
        ({"max_num_batched_tokens": 64}, "must be at least max_model_len, which is 128"),
    ],
)
def test_settings_that_contradict_a_layout_without_groups(settings: dict[str, Any], text: str) -> None:
    whole = {"generates": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 128}
    with pytest.raises(ConfigError, match=text):
        Scheduler(make_config(**whole | settings), NO_KV, 2)


def test_requests_with_pooling_belong_to_no_program() -> None:
    driver = pooling_driver(scheduling_policy="program")
    driver.add("a", LONG, pooling=EMBED, job_id="job", is_last_step=True)
    driver.add("b", LONG, max_tokens=2, job_id="job")
    driver.finish()
    check_ended(driver, "a", rows_of(LONG))
    assert driver.answers["b"].reason is EndReason.LENGTH, "the job has not ended"


@pytest.mark.parametrize("prompts", [False, True])
def test_trace_has_the_task_but_no_vectors_and_replays(prompts: bool) -> None:
    driver = pooling_driver(ALL, max_num_batched_tokens=8, async_scheduling=True)
    driver.add("a", LONG, pooling=PoolingParams("embed", 4))
    driver.run()
    keyframe_of(driver)
    driver.add("b", LONG, pooling=EACH)
    driver.add("chat", LONG, max_tokens=9)
    driver.finish()
    records = list(driver.log)
    encoded = [encode_line(line) for line in record_log(driver.header, records, prompts=prompts)]
    lines = [decode_line(line) for line in encoded]
    arrivals = [line.request for line in lines if isinstance(line, Arrival)]
    assert [request.pooling for request in arrivals] == [PoolingParams("embed", 4), EACH, None]
    assert all(b"pooled" not in line for line in encoded)
    assert replay_lines(numbered(lines), check=True) is None
    (tail,) = tails(driver)
    assert replay(driver.header, tail, check=True) is None

"""Rejected requests, with field and numbers, and the use of handles and logprobs in results."""

from typing import Any

import numpy as np
import pytest
from fake_worker import logprob_rows
from scheduler_driver import VOCAB_SIZE, Driver, change, end_of, expected_tokens, make_request
from side_parts import side_rows

from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.logprobs import TokenLogprobs
from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.worker_messages import ModelRunnerOutput


def rejection(driver: Driver, prompt: list[int], output: list[int] | None = None, **extra: Any) -> tuple[str, str, str]:
    """Submit a request that must be rejected without side effects; return code, param and text."""
    driver.add("x", prompt, output, **extra)
    rejected = driver.answers["x"].rejected
    assert rejected is not None, "it was accepted"
    driver.check_drained()
    return rejected.code, rejected.param, rejected.message


def test_prompt_needs_room_for_one_token_in_the_context() -> None:
    driver = Driver(max_model_len=10)
    code, param, text = rejection(driver, list(range(10)))
    assert (code, param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 10 tokens" in text and "has 10" in text
    driver.add("fits", list(range(9)), max_tokens=5)
    driver.run()
    assert end_of(driver, "fits") == (EndReason.LENGTH, expected_tokens(list(range(9)), 1))


def test_refuses_prompt_larger_than_the_pool() -> None:
    driver = Driver(num_blocks=5)
    code, param, text = rejection(driver, list(range(16)))
    assert (code, param) == ("kv_pool_too_small", "prompt")
    assert "need 5 KV blocks" in text and "pool has 4" in text
    driver.add("fits", list(range(15)), max_tokens=1)
    driver.run()
    assert driver.answers["fits"].reason is EndReason.LENGTH


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1, -(2**31)])
def test_refuses_token_ids_outside_the_vocabulary(token: int) -> None:
    for prompt, output in (([1, token], None), ([1], [token])):
        code, param, text = rejection(Driver(), prompt, output)
        assert (code, param) == ("invalid_value", "prompt") and f"from 0 to {VOCAB_SIZE - 1}" in text
    driver = Driver()
    driver.add("edge", [0, VOCAB_SIZE - 1], max_tokens=1)
    assert driver.run()["edge"].reason is EndReason.LENGTH


@pytest.mark.parametrize(
    ("name", "beyond", "within"),
    [
        ("stop_token_ids", [5, VOCAB_SIZE], [5, VOCAB_SIZE - 1]),
        ("logit_bias", {VOCAB_SIZE: 1.0, 5: 1.0}, {VOCAB_SIZE - 1: 1.0}),
        ("allowed_token_ids", [VOCAB_SIZE, 5], list(range(VOCAB_SIZE))),
        ("bad_words_token_ids", [[1], [5, VOCAB_SIZE, 2]], [[1], [5, VOCAB_SIZE - 1]]),
    ],
)
def test_refuses_sampling_parameters_outside_the_vocabulary(name: str, beyond: Any, within: Any) -> None:
    code, param, text = rejection(Driver(), [1], **{name: beyond})
    assert (code, param) == ("invalid_value", name) and f"{name} must be from 0 to {VOCAB_SIZE - 1}" in text
    driver = Driver()
    driver.add("edge", [1], max_tokens=1, **{name: within})
    assert driver.run()["edge"].reason is not None


def test_thinking_budget_needs_thinking_markers() -> None:
    code, param, _ = rejection(Driver(), [1], thinking_token_budget=5)
    assert (code, param) == ("invalid_value", "thinking_token_budget")
    driver = Driver(thinking_start_token_ids=[7], thinking_end_token_ids=[8])
    driver.add("a", [1], max_tokens=2, thinking_token_budget=5)
    assert driver.run()["a"].reason is EndReason.LENGTH


@pytest.mark.parametrize("seed", [-1, -(2**63)])
def test_refuses_seed_out_of_range(seed: int) -> None:
    assert rejection(Driver(), [1], seed=seed)[:2] == ("invalid_value", "seed")


RESERVED: list[dict[str, Any]] = [
    {"items": [InputItem(bytes(32), [(0, 1)], "/a")]},
    {"adapter": AdapterRef("a", bytes(32), "/a")},
    {"kv_transfer": b"x"},
]


@pytest.mark.parametrize("reserved", RESERVED, ids=str)
def test_refuses_reserved_fields(reserved: dict[str, Any]) -> None:
    assert rejection(Driver(), [1], **reserved)[0] == "unsupported"


@pytest.mark.parametrize("fields", [{"job_id": "j" * 257}, {"is_last_step": True}], ids=str)
def test_refuses_impossible_jobs(fields: dict[str, Any]) -> None:
    code, param, _ = rejection(Driver(), [1], **fields)
    assert (code, param) == ("invalid_value", next(iter(fields)))


def test_two_clients_can_use_the_same_request_id() -> None:
    driver = Driver()
    for client in (0, 1):
        driver.scheduler.consume(make_request("same", [1], max_tokens=1), client)
    assert len(driver.scheduler.table.requests) == 2


def running_pair() -> Driver:
    """Return an engine with two requests and two steps in flight."""
    driver = Driver(async_scheduling=True)
    driver.add("a", [1, 2, 3], max_tokens=9)
    driver.add("b", [4, 5], max_tokens=9)
    driver.schedule()
    driver.schedule()
    return driver


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


GOOD = ModelRunnerOutput(1, ints(10, 11), ints(0, 1))


def test_result_contains_handles_only_when_they_change() -> None:
    driver = running_pair()
    driver.scheduler.consume(GOOD)
    driver.scheduler.consume(ModelRunnerOutput(2, ints(20, 21)))
    assert [driver.request(request_id).num_output_tokens for request_id in "ab"] == [2, 2]


def test_logprobs_are_sent_to_the_client_of_their_token() -> None:
    driver = Driver()
    for client, name in enumerate("ab"):
        driver.add(name, [1, client], client=client, max_tokens=9, logprobs=client or None)
    driver.schedule()
    driver.scheduler.consume(change(GOOD, side=[side_rows(LOGPROBS, (1, 0, logprob_rows([[(5, -1.0), (6, -2.0)]])))]))
    messages = dict(driver.scheduler.take_messages())
    assert messages[0].side == []
    ((handle, start, rows),) = messages[1].side[0].parts()
    assert (handle, start, LOGPROBS.value(rows)) == (1, 0, [TokenLogprobs(5, -1.0, 1, [(6, -2.0)])])

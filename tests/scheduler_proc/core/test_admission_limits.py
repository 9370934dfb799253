"""Fields that a correct front end never sends: the request is refused with the field's name, others continue."""

from typing import Any

import msgspec
import numpy as np
import pytest
from scheduler_driver import Driver, expected_tokens, make_config

from quire.protocol.model.model_config import MoeConfig
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.front_end_messages import AddRequest, EndReason
from quire.scheduler_proc.features.routed_experts import routed_row_bytes
from quire.scheduler_proc.messages.arrivals import Refusal

VOCAB = 300
CONTEXT = 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
IDS = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(vocab_size=VOCAB, max_model_len=CONTEXT)


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


WRONG: list[tuple[str, dict[str, Any]]] = [
    # Tokens, lengths, ids and reserved fields: test_refusals.py.
    *[("prompt", {"prompt_token_ids": ids(*[5] * length)}) for length in (0, CONTEXT, CONTEXT + 1, 100_000)],
    *[("request_id", {"request_id": value}) for value in ("", "x" * 257, "é" * 10_000)],
    *[("priority", {"priority": value}) for value in (2**31, -(2**31) - 1, 2**40, 2**63, -(2**63))],
    *[("cache_salt", {"cache_salt": value}) for value in ("x" * (MAX_SALT_LENGTH + 1), "é" * 10**6)],
    *[("tenant", {"tenant": value}) for value in (-1, 2**31, 2**40, -(2**63))],
    *[("arrival", {"arrival": value}) for value in (float("nan"), float("inf"), float("-inf"))],
]


@pytest.mark.parametrize(("param", "fields"), WRONG, ids=lambda value: repr(value)[:40])
def test_refuses_invalid_field_and_serves_other_requests(driver: Driver, param: str, fields: dict[str, Any]) -> None:
    driver.add("canary", [5, 6, 7], max_tokens=5)
    given = {"request_id": "wrong", "prompt_token_ids": IDS, "sampling": PARAMS, "seed": 0, **fields}
    driver.answers.setdefault(given["request_id"], type(driver.answers["canary"])())
    driver.consume(AddRequest(**given))
    driver.run()
    refused = driver.answers.pop(given["request_id"]).rejected
    assert refused is not None and refused.param == param
    assert refused.code in ("invalid_value", "unsupported", "context_length_exceeded")
    assert len(refused.message) < 200
    canary = driver.answers.pop("canary")
    assert canary.reason is EndReason.LENGTH and canary.tokens == expected_tokens([5, 6, 7], 5, VOCAB)
    driver.check_drained()


def test_routed_experts_need_the_flag_and_fit_into_a_message(driver: Driver) -> None:
    driver.add("asks", [5, 6, 7], max_tokens=5, return_routed_experts=True)
    refused = driver.answers.pop("asks").rejected
    assert refused is not None and refused.param == "return_routed_experts"
    assert "start it with --enable-return-routed-experts" in refused.message
    moe = MoeConfig(num_experts=64, num_experts_per_token=8, intermediate_size=8, layers=list(range(32)))
    config = make_config(enable_return_routed_experts=True)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, moe=moe))
    routed_row_bytes(65_536, config)
    with pytest.raises(Refusal, match=r"must have at most 65536 tokens for this model \(got up to 65537\)"):
        routed_row_bytes(65_537, config)


@pytest.mark.parametrize("delivered", [4, 5, CONTEXT, 1000])
def test_complete_resubmission_ends_at_once(driver: Driver, delivered: int) -> None:
    driver.add("full", [5, 6, 7], output=[9] * delivered, max_tokens=4)
    driver.run()
    answer = driver.answers.pop("full")
    assert answer.reason is EndReason.LENGTH and answer.tokens == []
    driver.check_drained()

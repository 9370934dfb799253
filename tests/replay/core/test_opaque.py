"""Validation of arrivals without tokens."""

from typing import Any

import pytest
from scheduler_driver import change, make_config, make_layout

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import NO_TOKENS
from quire.protocol.wire.front_end_messages import AddRequest
from quire.replay.core.opaque import OpaqueRequest
from quire.replay.core.scheduler import ReplayScheduler


@pytest.mark.parametrize(
    "fields",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 500},
        {"block_hashes": b"xyz", "hash_bytes": 2},
        {"hash_bytes": 0},
        {"num_output_tokens": -1},
    ],
)
def test_checks_opaque_arrivals(fields: dict[str, Any]) -> None:
    config = make_config()
    scheduler = ReplayScheduler(config, make_layout(config), 33)
    event = OpaqueRequest(AddRequest("o", NO_TOKENS, SamplingParams(), 0), 5)
    scheduler.consume(change(event, **fields))
    assert not scheduler.table.requests
    scheduler.consume(event)
    scheduler.consume(event)
    assert len(scheduler.table.requests) == len(scheduler.table.waiting) == 1

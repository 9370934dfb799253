"""The front end's block keys are the hashes that the scheduler makes."""

import asyncio

import numpy as np
import pytest
from fake_items import image
from scheduler_driver import Driver

from quire.frontend.engine import block_keys
from quire.frontend.engine.block_keys import BlockKeys
from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import AddRequest


def request(num_tokens: int, **fields: object) -> AddRequest:
    tokens = np.arange(num_tokens, dtype=np.int32) % 50
    return AddRequest("a", tokens, SamplingParams(max_tokens=1), 0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cache_salt": "salt"},
        {"tenant": 3},
        {"adapter": AdapterRef("sql", bytes(range(32)), "/sql")},
        {"items": [image("a", (3, 20), (25, 5)), image("b", (40, 9))]},
    ],
    ids=["plain", "salted", "tenant", "adapter", "images"],
)
def test_keys_are_the_first_bytes_of_the_schedulers_hashes(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_keys, "TOKENS_AT_ONCE", 24)
    driver = Driver(
        vocab_size=50,
        block_size=16,
        isolate_prefix_cache_by_key=True,
        enable_lora=True,
        max_loras=1,
        num_blocks=65,
        vision=VisionConfig("TinyVision", 9),
        encoder_cache_tokens=64,
    )
    driver.consume(request(75, **fields))
    (admitted,) = driver.scheduler.table.requests.values()
    hashes = admitted.tokens.block_hashes
    keys = asyncio.run(BlockKeys(driver.config).of(request(75, **fields), 16))
    assert len(hashes) == 4 and keys == b"".join(each[:8] for each in hashes)


def test_what_cannot_use_the_cache_has_no_keys() -> None:
    keys = BlockKeys(Driver().config)
    wants_all = AddRequest("a", np.arange(64, dtype=np.int32), SamplingParams(prompt_logprobs=1), 0)
    assert asyncio.run(keys.of(wants_all, 16)) == b""
    assert asyncio.run(keys.of(request(64), 0)) == b"", "no engine has been ready"

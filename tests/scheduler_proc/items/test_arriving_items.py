"""Arrivals with items: what is refused, with the field, the value and the limit."""

from typing import Any

import pytest
from scheduler_driver import Driver

from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.item_messages import InputItem

IMAGES = VisionConfig("TinyVision", token_id=9)
ATOMIC = VisionConfig("TinyVision", token_id=9, is_causal=False)


def item(*ranges: tuple[int, int], kind: str = "image", digest: bytes = bytes(32), path: str = "/a") -> InputItem:
    return InputItem(digest, list(ranges), path, kind)


@pytest.mark.parametrize(
    ("items", "settings", "code", "text"),
    [
        ([item((0, 2))], {"vision": None}, "unsupported", "takes text only (got an item of the kind 'image')"),
        ([item((0, 2), kind="rows")], {}, "unsupported", "takes image (got an item of the kind 'rows')"),
        ([item((0, 2))], {"encoder_cache_tokens": 0}, "unsupported", "takes text only"),
        ([item((0, 2), digest=b"short")], {}, "invalid_value", "must have 32 bytes (got 5)"),
        ([item((0, 2), path="x" * 4097)], {}, "invalid_value", "at most 4096 characters (got 4097)"),
        ([item()], {}, "invalid_value", "from 1 to 4096 ranges of positions (got 0)"),
        ([InputItem(bytes(32), [(0, 2)], "/a", grid=(1, 0, 2))], {}, "invalid_value", "or none (got (1, 0, 2))"),
        ([item((0, 0))], {}, "invalid_value", "from 0 to 19 (got 0 from 0 on)"),
        ([item((-1, 2))], {}, "invalid_value", "from 0 to 19 (got 2 from -1 on)"),
        ([item((19, 2))], {}, "invalid_value", "from 0 to 19 (got 2 from 19 on)"),
        ([item((4, 2), (5, 2))], {}, "invalid_value", "from 6 to 19 (got 2 from 5 on)"),
        ([item((4, 2)), item((2, 2))], {}, "invalid_value", "from 6 to 19 (got 2 from 2 on)"),
        ([item((0, 9))], {}, "item_too_large", "at most 8 positions, the encoder cache of this engine (got 9)"),
        ([item((0, 5))], {"vision": ATOMIC, "windows": [0, 4]}, "item_too_large", "windows: at most 4 (got 5)"),
        (
            [item((0, 7))],
            {"vision": ATOMIC},
            "item_too_large",
            "must fit into one step, and into the model's attention windows: at most 5 (got 7)",
        ),
    ],
)
def test_refuses_items(items: list[InputItem], settings: dict[str, Any], code: str, text: str) -> None:
    driver = Driver(**{"vision": IMAGES, "encoder_cache_tokens": 8, "max_num_batched_tokens": 12} | settings)
    driver.add("a", list(range(20)), max_tokens=1, items=items)
    rejected = driver.answers["a"].rejected
    assert rejected is not None and (rejected.code, text in rejected.message) == (code, True), rejected
    assert rejected.param == ("prompt_embeds" if items[0].kind == "rows" else "messages")

"""LoRARequest: its fields, and the adapter of each prompt of a call."""

from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from configs import MODEL

from quire import LoRARequest
from quire.frontend.adapters.reader import AdapterReader
from quire.launch.offline.lora_request import adapters_for
from quire.protocol.errors import InvalidRequest
from quire.protocol.model.adapter_config import AdapterError


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("/a", 1, "/x"), "the name of an adapter must have"),
        (("", 1, "/x"), "the name of an adapter must have"),
        ((5, 1, "/x"), r"lora_name must be a string \(got 5\)"),
        (("a", 0, "/x"), "lora_int_id must be an integer from 1"),
        (("a", 1, None), r"lora_path must be the path of a folder \(got None\)"),
        (("a", 1, ""), r"lora_path must be the path of a folder \(got ''\)"),
    ],
)
def test_refused_fields(fields: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        LoRARequest(*fields)


def test_one_for_all_prompts_or_one_for_each(tmp_path: Path) -> None:
    reader = AdapterReader(MODEL, 64)
    one, two = (LoRARequest(f"n{i}", i, make_adapter(tmp_path / f"{i}", MODEL, seed=i)) for i in (1, 2))
    assert adapters_for(None, 2, None) == [None, None]
    first, again = adapters_for(one, 2, reader)
    assert first == again
    assert first is not None
    assert (first.name, len(first.digest), first.path) == ("n1", 32, str(tmp_path / "1"))
    mixed = adapters_for([two, None, one], 3, reader)
    assert [each and each.name for each in mixed] == ["n2", None, "n1"]
    assert adapters_for([], 0, reader) == []


def test_refusals(tmp_path: Path) -> None:
    reader, one = AdapterReader(MODEL, 64), LoRARequest("a", 1, make_adapter(tmp_path / "a", MODEL))
    with pytest.raises(InvalidRequest, match="1 lora_requests for 2 prompts"):
        adapters_for([one], 2, reader)
    with pytest.raises(InvalidRequest, match=r"needs LLM\(\.\.\., enable_lora=True\)"):
        adapters_for(one, 1, None)
    for other in ("a", ["a"], {"a": 1}):
        with pytest.raises(InvalidRequest, match="lora_request must be a LoRARequest, None, or a list of these"):
            adapters_for(other, 1, reader)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=f"{tmp_path}/none is not a folder"):
        adapters_for(LoRARequest("a", 1, tmp_path / "none"), 1, reader)

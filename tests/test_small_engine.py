"""The engine of docs/small_engine.py returns the same tokens as ``LLM``, and stays short."""

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from lent_engines import DEMO

from quire import LLM, SamplingParams

PAGE = Path(__file__).parent.parent / "docs/small_engine.py"
PROMPTS = [[5, 6, 7], list(range(20, 120)), [5, 6, 7, 8] * 12]


@pytest.fixture(scope="module")
def small_engine() -> Any:
    spec = spec_from_file_location("small_engine", PAGE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_same_tokens_as_llm(small_engine: Any, lend: Callable[..., LLM]) -> None:
    all_params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=40),
    ]
    # A pool of 20 blocks is too small for all prompts together, so requests wait or are preempted.
    engine = small_engine.SmallEngine(dtype="float32", deterministic=True, num_gpu_blocks_override=20)
    llm = lend(**DEMO)
    for params in all_params:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert engine.generate(PROMPTS, params) == expected
    engine.scheduler.check()


def test_refused_prompt_raises(small_engine: Any) -> None:
    engine = small_engine.SmallEngine(max_model_len=64)
    with pytest.raises(ValueError, match="prompt 0 was rejected"):
        engine.generate([list(range(100))], SamplingParams())


def test_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= 120

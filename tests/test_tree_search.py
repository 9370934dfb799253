"""The tree search of docs/tree_search.py finds an answer that is more likely than a sampled one, and stays short."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

PAGE = Path(__file__).parent.parent / "docs/tree_search.py"


@pytest.mark.full
def test_answer_of_the_search() -> None:
    spec = spec_from_file_location("tree_search", PAGE)
    assert spec is not None and spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    with LLM() as llm:
        text = module.search(llm, "Once upon a time")
        assert text
        assert llm.statistics().num_running == 0
        sampled = llm.generate("Once upon a time", SamplingParams(n=8, seed=1, max_tokens=60, logprobs=0))[0].outputs
        means = sorted((each.cumulative_logprob or 0.0) / len(each.token_ids) for each in sampled)
        prompt, both = (len(llm._text_in.encode(each)) for each in ("Once upon a time", f"Once upon a time{text}"))
        (scored,) = llm.generate(f"Once upon a time{text}", SamplingParams(max_tokens=1, prompt_logprobs=0))
        entries = (scored.prompt_logprobs or [])[prompt:both]
        tokens = scored.prompt_token_ids[prompt:]
        values = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry]
        assert sum(values) / len(values) > means[4]


def test_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= 40

"""What a checkpoint and the flags that replace it decide, in a real engine."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}


@pytest.mark.full
def test_flags_reach_the_engine(tmp_path: Path) -> None:
    """Sampling defaults, the chat template, and closed objects with the letter of JSON Schema beside them."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.5, "top_k": 1, "max_new_tokens": 5}')
    with LLM(generation_config=tmp_path, chat_template="{{ greeting }} {{ messages[0].content }}") as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=1.5, top_k=1, max_tokens=5)
        greedy = llm.generate("Once", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0]
        assert llm.generate("Once")[0].outputs[0].token_ids == greedy.token_ids
        asked = [{"role": "user", "content": "there was"}]
        chatted = llm.chat(asked, chat_template_kwargs={"greeting": "Once"})[0]
        assert chatted.prompt_token_ids == llm.generate("Once there was")[0].prompt_token_ids
        params = [
            SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA), max_tokens=60, seed=seed, temperature=1.5)
            for seed in range(20)
        ]
        answers = [json.loads(output.outputs[0].text) for output in llm.generate(["Weather: "] * 20, params)]
        assert all(set(answer) == {"city", "unit"} for answer in answers)

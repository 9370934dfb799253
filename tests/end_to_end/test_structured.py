"""Structured output with real processes: every answer satisfies its schema, and other requests are not affected."""

import contextlib
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from engine_processes import engine_processes
from json_schemas import schemas, validates
from lent_engines import DEMO
from tiers import thinned

from quire import LLM, SamplingParams
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.structured_outputs import StructuredOutputs

pytestmark = pytest.mark.full


@pytest.fixture
def llm(lend: Callable[..., LLM]) -> LLM:
    return lend(**DEMO)


def mixed(llm: LLM, num_requests: int, num_schemas: int) -> None:
    """Run requests of which every fourth has no grammar; the others use the schemas in turn."""
    wanted = schemas(num_schemas)
    prompts, params = [], []
    for index in range(num_requests):
        prompts.append([{"role": "user", "content": f"Tell me of person {index}, in {index % 7} words."}])
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": index, "max_tokens": 40}
        if index % 4:
            constraint = StructuredOutputs(json=wanted[index % num_schemas])
            sampling |= {"max_tokens": 450, "structured_outputs": constraint}
        params.append(SamplingParams(**sampling))
    outputs = llm.chat(prompts, params)
    for index, output in enumerate(outputs):
        answer, schema = output.outputs[0], wanted[index % num_schemas]
        if index % 4:
            assert answer.finish_reason == "stop", f"{answer.text!r} for {schema}"
            assert validates(json.loads(answer.text), schema), f"{answer.text!r} does not satisfy {schema}"
    free = llm.chat(prompts[::4], params[::4])
    assert [o.outputs[0].token_ids for o in free] == [o.outputs[0].token_ids for o in outputs[::4]]


@pytest.mark.full
def test_mixed_traffic(llm: LLM) -> None:
    mixed(llm, num_requests=48, num_schemas=12)


@pytest.mark.slow
def test_five_hundred_requests_over_fifty_schemas(llm: LLM) -> None:
    mixed(llm, num_requests=500, num_schemas=50)
    assert llm.statistics().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "auto"), (2, "float32")])
def test_same_answers_with_drafts_and_ranks(ranks: int, dtype: str) -> None:
    """Two ranks are compared in float32.

    Each rank rounds its partial sums. In bfloat16, which the demo model uses on CPUs with bfloat16 matrix instructions,
    this changes the logits enough to change sampled tokens.
    """
    wanted = schemas(12)
    prompts = [[{"role": "user", "content": f"{i} Tell me of red blue red blue red blue"}] for i in range(12)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=300, structured_outputs=StructuredOutputs(json=schema))
        for i, schema in enumerate(wanted)
    ]
    with LLM(deterministic=True, max_model_len=512, dtype=dtype) as plain_llm:
        plain = [output.outputs[0].token_ids for output in plain_llm.chat(prompts, params)]
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    settings: dict[str, Any] = {"tensor_parallel_size": ranks, "speculative_config": config, "dtype": dtype}
    with LLM(deterministic=True, max_model_len=512, **settings) as drafting:
        assert [output.outputs[0].token_ids for output in drafting.chat(prompts, params)] == plain
        assert drafting.statistics().num_accepted_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("drafts", thinned([0, 3], keep=1))
def test_same_answers_while_mask_processes_are_killed(drafts: int) -> None:
    """No request fails, because none of them is the cause."""
    wanted = schemas(12)
    prompts = [[{"role": "user", "content": f"{i} Tell me of red blue red blue red blue"}] for i in range(12)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=300, structured_outputs=StructuredOutputs(json=schema))
        for i, schema in enumerate(wanted)
    ]
    config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "adaptive": False}
    settings: dict[str, Any] = {"speculative_config": config} if drafts else {}
    with LLM(deterministic=True, max_model_len=512, **settings) as llm:
        plain = [output.outputs[0].token_ids for output in llm.chat(prompts, params)]
        ended = threading.Event()
        killed: list[int] = []
        killer = threading.Thread(target=lambda: kill_helpers(ended, killed))
        killer.start()
        try:
            outputs = llm.chat(prompts, params)
        finally:
            ended.set()
            killer.join()
        assert [output.outputs[0].error for output in outputs] == [None] * len(outputs)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert killed


def kill_helpers(ended: threading.Event, killed: list[int]) -> None:
    """Kill the processes that compute masks, again and again."""
    while not ended.wait(0.05):
        for process in engine_processes("quire.scheduler_proc.structured.mask_process"):
            with contextlib.suppress(psutil.Error):
                if "mask_process" in " ".join(process.parent().cmdline()):  # type: ignore[union-attr]
                    process.kill()
                    killed.append(process.pid)


def test_an_invalid_grammar_is_refused(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="["))
    with pytest.raises(InvalidRequest, match="unclosed character class") as refused:
        llm.generate([[5, 6, 7]], bad)
    assert refused.value.param == "structured_outputs" and refused.value.code == "invalid_structured_outputs"
    choice = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    assert llm.generate([[5, 6, 7]], choice)[0].outputs[0].text in ("yes", "no")


COMPLETE: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"json": {"type": "boolean"}}, "true|false"),
    ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"regex": r"[a-z ]{5,30}\."}, r"[a-z ]{5,30}\."),
]


def check_complete(llm: LLM, sampled: list[dict[str, Any]]) -> None:
    bans = [{"min_tokens": 40}, {"min_tokens": 3}, {"allowed_token_ids": list(range(3, 1024))}]
    cases = [(wanted, form, own | ban) for wanted, form in COMPLETE for own in sampled for ban in bans]
    params = [
        SamplingParams(**way, max_tokens=50, structured_outputs=StructuredOutputs(**wanted)) for wanted, _, way in cases
    ]
    outputs = llm.generate([[5, 6, 7, 5, 6]] * len(params), params)
    for (_, form, way), output in zip(cases, outputs, strict=True):
        for answer in output.outputs:
            assert answer.finish_reason == "stop" and re.fullmatch(form, answer.text), (form, way, answer)


def test_a_complete_grammar_ends_although_the_end_is_banned(llm: LLM) -> None:
    ways = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"use_beam_search": True, "beam_width": 2}]
    check_complete(llm, ways)


def test_a_complete_grammar_ends_without_drafts() -> None:
    with LLM(max_model_len=128) as plain:
        check_complete(plain, [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}])

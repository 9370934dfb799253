"""Routed experts through the offline API, with real processes, against the router logits of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import experts_of

from quire import LLM, SamplingParams
from quire.launch.offline.request_output import CompletionOutput

pytestmark = pytest.mark.full

PROMPTS = [[5 + 7 * i % 83 for i in range(length)] for length in (3, 40, 90)]


@pytest.fixture(scope="module")
def tiny(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    return checkpoint_factory("qwen3_moe")


@pytest.fixture(scope="module")
def llm(tiny: tuple[Path, Any]) -> Iterator[LLM]:
    """With drafts, chunks, and a pool in which requests are preempted. The results do not depend on the batch."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    sizes = {"max_model_len": 128, "block_size": 4, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 32}
    flags = {"enable_return_routed_experts": True, "deterministic": True, "max_num_seqs": 8}
    with LLM(tiny[0], speculative_config=drafts, **sizes, **flags) as llm:
        yield llm


def check(answer: CompletionOutput, prompt: list[int], model: Any) -> None:
    """Compare the experts of all tokens but the last."""
    want = np.array(experts_of(model, [*prompt, *answer.token_ids[:-1]]))
    assert answer.routed_experts is not None and answer.routed_experts.dtype == np.uint8
    assert answer.routed_experts.shape == (len(want), 2, 3)
    np.testing.assert_array_equal(answer.routed_experts.reshape(want.shape), want)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5, "n": 3, "seed": 4}], ids=str)
def test_outputs_have_the_experts_of_all_tokens_but_the_last(
    llm: LLM, tiny: tuple[Path, Any], sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, return_routed_experts=True, **sampling)
    for output in llm.generate(PROMPTS, params):
        for answer in output.outputs:
            check(answer, output.prompt_token_ids, tiny[1])


def test_answers_that_a_stop_token_ends_or_that_do_not_ask(llm: LLM, tiny: tuple[Path, Any]) -> None:
    prompt, asks = PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=20, return_routed_experts=True)
    token = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0].token_ids[4]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[token], return_routed_experts=True)
    first, second, third = llm.generate([prompt] * 3, [params, SamplingParams(max_tokens=4), asks])
    for output in (first, third):
        check(output.outputs[0], prompt, tiny[1])
    assert first.outputs[0].finish_reason == "stop" and second.outputs[0].routed_experts is None


def test_started_requests_and_their_forks(llm: LLM, tiny: tuple[Path, Any]) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True, return_routed_experts=True, seed=2)
    parent = llm.start(PROMPTS[1], params)
    parent.read(6)
    (child,) = llm.fork(parent, num_tokens=5, seed=9)
    for running in (parent, child):
        check(running.read(), PROMPTS[1], tiny[1])

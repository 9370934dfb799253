"""The offline API: priorities, a short queue, statistics; threads, event loops, forks and NumPy."""

import asyncio
import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lent_engines import TINY

from quire import LLM, SamplingParams
from quire.frontend.engine.job import NO_JOB
from quire.launch.offline.call_options import check_known, jobs_for
from quire.launch.offline.pooling_methods import PoolingOptions
from quire.launch.offline.request_output import EngineStatistics
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.wire.front_end_messages import Histogram, Statistics

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    return checkpoint_factory("qwen3")


@pytest.fixture
def llm(tiny: tuple[Path, Any], lend: Callable[..., LLM]) -> LLM:
    return lend(tiny[0], **TINY)


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1, 0, None, [5]])
def test_one_priority_per_prompt(llm: LLM, priority: Any) -> None:
    assert len(llm.generate([3, 4], SamplingParams(max_tokens=2, ignore_eos=True), priority=priority)) == 1


@pytest.mark.parametrize(
    ("priority", "says"),
    [
        ([1], "1 priorities for 2 prompts"),
        ([1, 2, 3], "3 priorities for 2 prompts"),
        ([], "0 priorities for 2 prompts"),
        ([0, 2**31], "priority must be an integer from -2147483648 to 2147483647"),
        (-(2**31) - 1, "priority must be an integer from"),
        (1.5, "priority must be an integer from"),
        (False, "priority must be an integer from"),
        ("ab", "priority must be an integer from"),
    ],
)
def test_invalid_priorities_are_refused_before_any_request_runs(llm: LLM, priority: Any, says: str) -> None:
    before = llm.statistics().prompt_tokens
    with pytest.raises(InvalidRequest, match=says) as caught:
        llm.generate([[3, 4], [5, 6]], GREEDY, priority=priority)
    assert caught.value.param == "priority"
    assert llm.statistics().prompt_tokens == before


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"job_id": 5}, r"job_id must be a string, or a list of one per prompt \(got 5\)"),
        ({"job_id": ["a"]}, "1 job_ids for 2 prompts"),
        ({"job_id": ["a", 5]}, "job_id must be a string of 1 to 256 characters"),
        ({"job_id": ""}, r"job_id must have 1 to 256 characters, .* \(got 0 characters\)"),
        ({"is_last_step": True}, "is_last_step needs a job_id"),
        ({"job_id": "a", "is_last_step": 1}, "is_last_step must be true or false"),
    ],
)
def test_invalid_jobs_are_refused(llm: LLM, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.generate([[3, 4], [5, 6]], GREEDY, **fields)


def test_the_last_prompt_of_a_job_is_its_last_step() -> None:
    jobs = jobs_for(["a", "b", "a"], 3, is_last_step=True)
    assert [(job.id, job.is_last_step) for job in jobs] == [("a", False), ("b", True), ("a", True)]
    assert jobs_for(None, 2, is_last_step=False) == [NO_JOB, NO_JOB]


@pytest.mark.full
def test_programs_of_the_offline_api(tiny: tuple[Path, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=2)
    with LLM(tiny[0], max_model_len=128, block_size=8, scheduling_policy="program") as llm:
        (output,) = llm.generate([*range(3, 40)], params)
        llm.generate([*output.prompt_token_ids, *output.outputs[0].token_ids, *range(40, 50)], params)
        llm.generate([[5, 6], [7, 8]], params, job_id="mine", is_last_step=True)
        statistics = llm.statistics()
        found = {name: statistics[f"turns_{name}"] for name in ("new", "prefix", "job_id")}
        # Samples are forks, which belong to the program of the first one.
        assert found == {"new": 1, "prefix": 3, "job_id": 4}
        assert statistics.num_programs == 2
        with pytest.raises(InvalidRequest, match="job_id 'mine' has ended"):
            llm.generate([5, 6], params, job_id="mine")


def test_unknown_keywords_are_refused(llm: LLM) -> None:
    for call in (llm.generate, llm.start):
        with pytest.raises(TypeError, match="unexpected keyword argument 'priorty'; did you mean priority"):
            call([3], priorty=1)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"LLM got an unexpected keyword argument 'use_tqmd'"):
        check_known("LLM", {"use_tqmd": True}, PoolingOptions)


def test_statistics_are_flat() -> None:
    histogram = Histogram([1.0], [2, 3], 9.5)
    waiting = {"capacity": 2, "grammar": 1}
    sent = Statistics(7, num_waiting=3, waiting_by_reason=waiting, kv_block_lifetime=histogram)
    flat = EngineStatistics(sent.counts())
    assert (flat.num_waiting, flat.waiting_by_reason_capacity, flat["waiting_by_reason_grammar"]) == (3, 2, 1)
    assert flat.get("waiting_by_reason_budget", 0) == flat.num_evicted_blocks == 0
    assert not {"query", "waiting_by_reason", "preemptions_by_reason", "kv_block_lifetime"} & set(flat)
    with pytest.raises(AttributeError, match="nothing"):
        _ = flat.nothing


def tokens_of(llm: LLM, prompt: Any, **params: Any) -> list[int]:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **params))
    return output.outputs[0].token_ids


IDS = list(np.array([3, 4, 5]))


def test_integers_of_numpy_are_token_ids(llm: LLM) -> None:
    expected = tokens_of(llm, [3, 4, 5])
    for prompt in (IDS, [IDS], {"prompt_token_ids": IDS}, np.array(IDS), [np.array(IDS)]):
        assert tokens_of(llm, prompt) == expected
    allowed = {"allowed_token_ids": IDS, "stop_token_ids": IDS[:1], "bad_words_token_ids": [IDS[1:2]]}
    assert set(tokens_of(llm, IDS, logit_bias={IDS[2]: 2}, **allowed)) <= {3, 5}
    for wrong in ([3, True], [np.True_], [np.float32(3)], [3, "4"], [3, [4]], [np.int64(-1)]):
        with pytest.raises(InvalidRequest):
            llm.generate(wrong)
        for field in allowed:
            with pytest.raises(InvalidRequest, match=field):
                SamplingParams(**{field: [wrong] if "bad" in field else wrong})  # type: ignore[arg-type]


def test_outputs_are_plain_values(llm: LLM) -> None:
    outputs = llm.generate([[3, 4], [5, 6]], SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1))
    assert copy.deepcopy(outputs) == outputs
    assert repr(outputs[0]).startswith("RequestOutput(request_id=") and "token_ids=[" in repr(outputs[0])


def test_threads_and_a_running_event_loop(llm: LLM) -> None:
    prompts = [[i, i + 1] for i in range(3, 9)]
    expected = [tokens_of(llm, prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: tokens_of(llm, prompt), prompts)) == expected

    async def both() -> list[list[int]]:
        return [tokens_of(llm, prompts[0]), *await asyncio.gather(*(asyncio.to_thread(tokens_of, llm, prompts[1]),))]

    assert asyncio.run(both()) == expected[:2]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_an_error_and_harms_nothing(llm: LLM) -> None:
    expected, running, session = tokens_of(llm, [3, 4]), llm.start([3, 4], GREEDY), llm.session()
    calls: list[Callable[[], Any]] = [lambda: llm.generate([3]), lambda: llm.start([3]), llm.statistics]
    calls += [running.read, running.abort, lambda: session.generate([3]), lambda: llm.fork(running)]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            for call in calls:
                with pytest.raises(EngineError, match=f"belongs to process {os.getppid()}: make one in the process"):
                    call()
            llm.close()
            os.write(write, b"right")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 9) == b"right"
    os.close(read)
    assert len(running.read().token_ids) == 40
    assert tokens_of(llm, [3, 4]) == expected

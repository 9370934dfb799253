"""Forks of running requests: an answer that begins with what another one has equals a request of its own.

The reference is the same request submitted whole, with its prompt and those tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
from engine_processes import engine_processes
from lent_engines import DEMO
from msgspec.structs import replace
from tiers import thinned

from quire import LLM, SamplingParams
from quire.frontend.engine.session import Session
from quire.launch.offline.running import RunningRequest
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import AddRequest

PROMPT = "<t>Once upon a time there was"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FEATURES: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": StructuredOutputs(json=SCHEMA), "ignore_eos": False},
    "thinking budget": {"thinking_token_budget": 11},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "token limits": {"min_tokens": 20, "ignore_eos": False, "bad_words": ["the"], "logit_bias": {17: 4.0}},
    "stop strings": {"stop": ["e "], "min_tokens": 12},
}


@pytest.fixture
def llm(lend: Callable[..., LLM]) -> LLM:
    return lend(**DEMO)


def params_of(feature: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, **FEATURES[feature]})


def forked_answers(llm: LLM, feature: str) -> list[tuple[Any, ...]]:
    """Return the answers of a request and its forks. It is long, so that it runs when it is forked."""
    params = params_of(feature)
    root = llm.start(PROMPT, params if feature == "grammar" else replace(params, min_tokens=90, max_tokens=100))
    root.read(7)
    children = llm.fork(root, 3, num_tokens=7, seed=9, sampling_params=params)
    children += llm.fork(root, 2, num_tokens=4, seed=10, sampling_params=params)
    assert all(child.output.token_ids == root.output.token_ids[:7] for child in children[:3])
    assert all(child.output.token_ids == root.output.token_ids[:4] for child in children[3:])
    grandchildren = llm.fork(children[0], 1, seed=11, sampling_params=SamplingParams(temperature=0.0, max_tokens=30))
    return [summary(request) for request in (root, *children, *grandchildren)]


def summary(request: RunningRequest) -> tuple[Any, ...]:
    output = request.read()
    chosen = [
        round(entry[token].logprob, 4) for entry, token in zip(output.logprobs or [], output.token_ids, strict=False)
    ]
    return output.text, output.token_ids, output.finish_reason, output.stop_reason, chosen


@pytest.mark.parametrize("feature", thinned(list(FEATURES), keep=1))
def test_children_equal_requests_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    sent: list[AddRequest] = []
    session = llm._calls.client.session if llm._calls.client is not None else None
    assert session is not None
    post = session._post
    monkeypatch.setattr(session, "_post", lambda message: (sent.append(message), post(message)))
    forked = forked_answers(llm, feature)
    arrivals = [message for message in sent if isinstance(message, AddRequest)]
    assert sum(len(message.prompt_token_ids) > 0 for message in arrivals) == 1
    add = Session.add
    monkeypatch.setattr(Session, "add", lambda self, request, on_update, parent: add(self, request, on_update))
    assert forked_answers(llm, feature) == forked
    assert len({tuple(tokens) for _, tokens, *_ in forked}) > 3
    if feature == "thinking budget":
        assert all("</t>" in text for text, *_ in forked[:-1])


@pytest.mark.full
def test_a_running_request(llm: LLM) -> None:
    """It is read in parts while others run, equals the sample of ``generate``, and can be aborted."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=60, ignore_eos=True)
    (whole,) = llm.generate(PROMPT, params)
    running = llm.start(PROMPT, params)
    assert not running.finished
    part = list(running.read(5).token_ids)
    assert len(part) >= 5
    llm.generate("Another", SamplingParams(max_tokens=3))
    assert running.read().token_ids == whole.outputs[0].token_ids
    assert (running.output.text, running.finished) == (whole.outputs[0].text, True)
    running.abort()
    assert running.output.finish_reason == "length"
    left = llm.start(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    children = llm.fork(left, 3)
    for each in (left, *children):
        each.abort()
        assert each.read().finish_reason == "abort"
    assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == whole.outputs[0].token_ids
    assert llm.statistics().num_running == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 0}, "n must be an integer from 1 to 128 (got 0)"),
        ({"n": 129}, "n must be an integer from 1 to 128 (got 129)"),
        ({"num_tokens": 300}, "num_tokens must be an integer from 0 to "),
        ({"seed": -(2**64)}, "seed must be an integer from"),
        ({"sampling_params": SamplingParams(max_tokens=2), "num_tokens": 3}, "max_tokens must be at least 4: the fork"),
        ({"sampling_params": SamplingParams(n=2, max_tokens=9), "num_tokens": 3}, "n cannot be used with a request"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1, max_tokens=9), "num_tokens": 3}, "prompt_logprobs can"),
        ({"sampling_params": SamplingParams(use_beam_search=True, beam_width=2)}, "use_beam_search cannot be used"),
    ],
)
def test_refusals(llm: LLM, given: dict[str, Any], says: str) -> None:
    running = llm.start(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    running.read(4)
    with pytest.raises(InvalidRequest) as caught:
        llm.fork(running, **given)
    assert says in str(caught.value)
    running.read()
    with pytest.raises(InvalidRequest, match=r"has ended \(length\): fork it while it is running"):
        llm.fork(running)


@pytest.mark.full
def test_log_probabilities_of_a_part_are_not_those_of_other_tokens(llm: LLM) -> None:
    """The root has none, its child only those of its own tokens; the grandchild does not copy them."""
    root = llm.start(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    root.read(6)
    wanted = SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True, logprobs=0)
    (child,) = llm.fork(root, num_tokens=6, seed=1, sampling_params=wanted)
    child.read(12)
    (grandchild,) = llm.fork(child, num_tokens=10, seed=2)
    for request, num_shared in ((child, 6), (grandchild, 10)):
        output = request.read()
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) - num_shared
        assert all(token in entry for token, entry in zip(output.token_ids[num_shared:], output.logprobs, strict=True))
    root.abort()


@pytest.mark.full
def test_a_request_of_another_engine_is_refused(llm: LLM) -> None:
    """Requests of two engines have the same ids."""
    with LLM(max_model_len=256) as other:
        request = other.start(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        with pytest.raises(InvalidRequest, match="belongs to another LLM"):
            llm.fork(request)


@pytest.mark.full
@pytest.mark.parametrize("process", ["quire.scheduler_proc", "quire.worker_proc"])
def test_children_survive_the_death_of_a_process(process: str) -> None:
    others = engine_processes(process)
    with LLM(deterministic=True, max_model_len=1024, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=600, ignore_eos=True)
        answers = []
        for is_killed in (False, True):
            root = llm.start(PROMPT, params)
            root.read(30)
            children = llm.fork(root, 4, num_tokens=20, seed=9)
            children[0].read(60)
            if is_killed:
                (victim,) = [each for each in engine_processes(process) if each not in others]
                victim.kill()
            answers.append([summary(each) for each in (root, *children)])
        assert answers[0] == answers[1]
        assert [len(tokens) for _, tokens, *_ in answers[0]] == [600] * 5

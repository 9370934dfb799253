"""Pauses of the offline API: nothing is lost, and no call waits for a pause that only its caller can end."""

from collections.abc import Callable

import pytest
from lent_engines import DEMO

from quire import LLM, SamplingParams
from quire.protocol.errors import EngineError, InvalidRequest

PROMPT = "Once upon a time there was"
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

pytestmark = pytest.mark.full


@pytest.fixture
def llm(lend: Callable[..., LLM]) -> LLM:
    return lend(**DEMO)


def test_keep_continues_where_it_stopped_and_wait_lets_running_requests_finish(llm: LLM) -> None:
    wanted = llm.generate(PROMPT, LONG)[0].outputs[0].token_ids
    request = llm.start(PROMPT, LONG)
    request.read(3)
    llm.pause("keep")
    with pytest.raises(EngineError, match="this LLM is paused: call resume"):
        request.read()
    llm.resume()
    request.read(len(request.output.token_ids) + 1)
    llm.pause()
    assert request.read().token_ids == wanted
    for call in (lambda: llm.generate(PROMPT, LONG), llm.start(PROMPT, LONG).read):
        with pytest.raises(EngineError, match="this LLM is paused"):
            call()
    llm.resume()
    assert llm.generate(PROMPT, LONG)[0].outputs[0].token_ids == wanted


def test_abort_ends_requests(llm: LLM) -> None:
    request = llm.start(PROMPT, LONG)
    request.read(1)
    llm.pause("abort")
    assert request.read().finish_reason == "abort" and len(request.output.token_ids) < 200
    llm.resume()
    with pytest.raises(InvalidRequest, match=r"mode must be wait, keep or abort \(got 'now'\)"):
        llm.pause("now")

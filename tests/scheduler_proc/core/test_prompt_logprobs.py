"""Prompt logprobs: from the parts in worker results to the clients that requested them, and to no others."""

from typing import Any

import numpy as np
import pytest
from kv_cases import full, layout_of, sliding
from scheduler_driver import Driver, change, end_of, expected_tokens
from scheduler_load import prompt_logprobs_of

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.front_end_messages import EndReason, StepOutputs
from quire.protocol.wire.logprobs import LogprobArrays, PromptLogprobs
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.scheduler import WorkerFault

LONG = list(range(100, 120))


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_each_client_receives_all_its_prompt_logprobs(asynchronous: bool, budget: int) -> None:
    """Over several chunks, with different widths, beside requests without prompt logprobs."""
    driver = Driver(async_scheduling=asynchronous, max_num_batched_tokens=budget)
    driver.add("a", LONG, client=0, prompt_logprobs=2, max_tokens=4)
    driver.add("b", LONG[3:], client=1, prompt_logprobs=0, max_tokens=1)
    driver.add("c", LONG[5:], client=1, max_tokens=4)
    driver.add("d", [9], client=2, prompt_logprobs=1, max_tokens=2)
    driver.finish()
    received = {name: answer.prompt_logprobs for name, answer in driver.answers.items()}
    assert received == {"a": prompt_logprobs_of(LONG), "b": prompt_logprobs_of(LONG[3:]), "c": {}, "d": {}}
    assert end_of(driver, "b") == (EndReason.LENGTH, expected_tokens(LONG[3:], 1))


def test_prefill_step_sends_prompt_logprobs_and_introduces_the_request() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", LONG, prompt_logprobs=0)
    driver.schedule()
    driver.answer()
    ((_, message),) = driver.messages
    assert isinstance(message, StepOutputs) and message.handles is None and message.tokens is None
    assert [i.request_id for i in message.introduced] == ["a"]
    part = message.prompt_logprobs
    assert part is not None and (part.handles, part.starts, part.counts) == ([0], [1], [8])
    assert part.arrays.token_ids.tolist() == LONG[1:9] and part.arrays.ranks.tolist() == [1] * 8


def test_no_prompt_logprobs_for_an_aborted_request() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("a", LONG, prompt_logprobs=0)
    driver.add("b", LONG, prompt_logprobs=0, max_tokens=2)
    driver.schedule()
    driver.abort("a")
    driver.run()
    assert driver.answers["a"].prompt_logprobs == {} and driver.answers["a"].reason is EndReason.ABORTED
    assert driver.answers["b"].prompt_logprobs == prompt_logprobs_of(LONG)


def test_prompt_logprobs_are_resent_after_a_preemption() -> None:
    driver = Driver(num_blocks=9)
    driver.add("old", [1, 2, 3, 4], max_tokens=25)
    driver.add("a", LONG[:9], prompt_logprobs=1, max_tokens=12)
    driver.finish()
    assert driver.scheduler.statistics().num_preemptions > 0
    assert driver.answers["a"].prompt_logprobs == prompt_logprobs_of(LONG[:9])


LAYOUTS = {
    "one group": layout_of(full(4)),
    "a window": layout_of(sliding(4, 8)),
    "two groups": layout_of(full(4), sliding(4, 8)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_prompt_logprobs_disable_prefix_cache_hits(layout: KVLayout) -> None:
    """A hit has no logits (law 11). Other requests can still read the blocks that it computes."""
    driver = Driver(layout=layout, num_blocks=100)
    driver.add("first", LONG, max_tokens=2, prompt_logprobs=0)
    driver.run()
    driver.add("again", [*LONG, 7], max_tokens=2, prompt_logprobs=0)
    driver.add("reader", [*LONG, 7], max_tokens=2)
    driver.finish()
    assert driver.answers["again"].num_cached_tokens == 0 < driver.answers["reader"].num_cached_tokens
    assert driver.answers["again"].prompt_logprobs == prompt_logprobs_of([*LONG, 7])


ARRAYS = LogprobArrays(ints(1, 9, 2, 9, 3, 9), np.zeros(6, np.float32), ints(1, 2, 3), 2)


def good() -> ModelRunnerOutput:
    """A valid result for prompts of 4 tokens: handle 0 requested prompt logprobs, handle 1 did not."""
    return ModelRunnerOutput(
        1,
        ints(10, 11),
        ints(0, 1),
        prompt_logprobs=PromptLogprobs([0], [1], [3], ARRAYS),
    )


def requested() -> Driver:
    driver = Driver()
    driver.add("a", [5, 1, 2, 3], prompt_logprobs=1, max_tokens=3)
    driver.add("b", [6, 1, 2, 3], max_tokens=3)
    driver.schedule()
    return driver


def arrays(**fields: Any) -> PromptLogprobs:
    return PromptLogprobs([0], [1], [3], change(ARRAYS, **fields))


WRONG: dict[str, PromptLogprobs] = {
    "an unknown request": PromptLogprobs([7], [1], [3], ARRAYS),
    "a request without prompt logprobs": PromptLogprobs([1], [1], [3], ARRAYS),
    "a request twice": PromptLogprobs([0, 0], [1, 2], [1, 2], ARRAYS),
    "more than the prompt": PromptLogprobs([0], [2], [3], ARRAYS),
    "the first token": PromptLogprobs([0], [0], [3], ARRAYS),
    "an empty part": PromptLogprobs([0], [1], [0], ARRAYS),
    "lists of different lengths": PromptLogprobs([0], [1, 2], [3], ARRAYS),
    "no width": arrays(width=0),
    "too few entries": arrays(values=np.zeros(5, np.float32)),
    "no ranks": arrays(ranks=ints()),
    "a token outside of the vocabulary": arrays(token_ids=ints(1, 9, 2, 9, 3, 1000)),
    "a negative token": arrays(token_ids=ints(1, 9, 2, 9, 3, -1)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_refuses_invalid_prompt_logprobs_without_change(wrong: PromptLogprobs) -> None:
    driver = requested()
    before = driver.scheduler.statistics()
    with pytest.raises(WorkerFault, match=r"result of step 1: .*(logprob|log probabilit)"):
        driver.scheduler.consume(change(good(), prompt_logprobs=wrong))
    assert driver.scheduler.statistics() == before and driver.scheduler.take_messages() == []
    driver.scheduler.consume(good())
    ((_, message),) = driver.scheduler.take_messages()
    part = message.prompt_logprobs
    assert (part.handles, part.starts, part.counts, part.arrays.width) == ([0], [1], [3], 2)
    assert part.arrays.token_ids.tolist() == [1, 9, 2, 9, 3, 9]

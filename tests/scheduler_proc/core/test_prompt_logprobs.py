"""Log probabilities of prompts: from the worker's parts to the clients that asked, and to nobody else."""

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
def test_each_client_gets_its_own_and_all_of_them(asynchronous: bool, budget: int) -> None:
    """Over chunks; with different numbers of best ones; beside some who did not ask."""
    driver = Driver(async_scheduling=asynchronous, max_num_batched_tokens=budget)
    driver.add("a", LONG, client=0, prompt_logprobs=2, max_tokens=4)
    driver.add("b", LONG[3:], client=1, prompt_logprobs=0, max_tokens=1)
    driver.add("c", LONG[5:], client=1, max_tokens=4)
    driver.add("d", [9], client=2, prompt_logprobs=1, max_tokens=2)
    driver.finish()
    told = {name: answer.prompt_logprobs for name, answer in driver.answers.items()}
    assert told == {"a": prompt_logprobs_of(LONG), "b": prompt_logprobs_of(LONG[3:]), "c": {}, "d": {}}
    assert end_of(driver, "b") == (EndReason.LENGTH, expected_tokens(LONG[3:], 1))


def test_a_step_without_a_token_brings_them_and_introduces_the_request() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", LONG, prompt_logprobs=0)
    driver.schedule()
    driver.answer()
    ((_, message),) = driver.heard
    assert isinstance(message, StepOutputs) and message.handles is None and message.tokens is None
    assert [i.request_id for i in message.introduced] == ["a"]
    told = message.prompt_logprobs
    assert told is not None and (told.handles, told.starts, told.counts) == ([0], [1], [8])
    assert told.arrays.token_ids.tolist() == LONG[1:9] and told.arrays.ranks.tolist() == [1] * 8


def test_nobody_hears_of_a_request_that_is_gone() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("a", LONG, prompt_logprobs=0)
    driver.add("b", LONG, prompt_logprobs=0, max_tokens=2)
    driver.schedule()
    driver.abort("a")
    driver.run()
    assert driver.answers["a"].prompt_logprobs == {} and driver.answers["a"].reason is EndReason.ABORTED
    assert driver.answers["b"].prompt_logprobs == prompt_logprobs_of(LONG)


def test_after_a_preemption_they_come_again() -> None:
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
def test_who_asks_reads_no_cached_prefix(layout: KVLayout) -> None:
    """A hit has no logits (law 11); what it computes, others may read."""
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
    """The answer to a step of handles 0, which asked, and 1, which did not; prompts of 4 tokens."""
    return ModelRunnerOutput(
        1,
        ints(10, 11),
        ints(0, 1),
        prompt_logprobs=PromptLogprobs([0], [1], [3], ARRAYS),
    )


def asked() -> Driver:
    driver = Driver()
    driver.add("a", [5, 1, 2, 3], prompt_logprobs=1, max_tokens=3)
    driver.add("b", [6, 1, 2, 3], max_tokens=3)
    driver.schedule()
    return driver


def arrays(**fields: Any) -> PromptLogprobs:
    return PromptLogprobs([0], [1], [3], change(ARRAYS, **fields))


WRONG: dict[str, PromptLogprobs] = {
    "a request that is not there": PromptLogprobs([7], [1], [3], ARRAYS),
    "a request that did not ask": PromptLogprobs([1], [1], [3], ARRAYS),
    "a request twice": PromptLogprobs([0, 0], [1, 2], [1, 2], ARRAYS),
    "more than the prompt": PromptLogprobs([0], [2], [3], ARRAYS),
    "the first token": PromptLogprobs([0], [0], [3], ARRAYS),
    "an empty part": PromptLogprobs([0], [1], [0], ARRAYS),
    "lists of different lengths": PromptLogprobs([0], [1, 2], [3], ARRAYS),
    "no width": arrays(width=0),
    "too few entries": arrays(values=np.zeros(5, np.float32)),
    "no ranks": arrays(ranks=ints()),
    "a token of no vocabulary": arrays(token_ids=ints(1, 9, 2, 9, 3, 1000)),
    "a negative token": arrays(token_ids=ints(1, 9, 2, 9, 3, -1)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_parts_that_cannot_be_are_a_fault_and_change_nothing(wrong: PromptLogprobs) -> None:
    driver = asked()
    before = driver.scheduler.statistics()
    with pytest.raises(WorkerFault, match="result of step 1: log probabilit"):
        driver.scheduler.consume(change(good(), prompt_logprobs=wrong))
    assert driver.scheduler.statistics() == before and driver.scheduler.take_messages() == []
    driver.scheduler.consume(good())
    ((_, message),) = driver.scheduler.take_messages()
    told = message.prompt_logprobs
    assert (told.handles, told.starts, told.counts, told.arrays.width) == ([0], [1], [3], 2)
    assert told.arrays.token_ids.tolist() == [1, 9, 2, 9, 3, 9]

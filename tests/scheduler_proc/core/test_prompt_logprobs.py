"""Prompt logprobs: from the parts in worker results to the clients that requested them, and to no others."""

from typing import Any

import numpy as np
import pytest
from fake_worker import prompt_logprobs_of
from kv_cases import full, layout_of, sliding
from scheduler_driver import Driver, change, end_of, expected_tokens

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.front_end_messages import EndReason, StepOutputs
from quire.protocol.wire.side_rows import PROMPT_LOGPROBS, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.scheduler import WorkerFault

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
    (part,) = message.side
    assert (part.kind, part.handles, part.starts, part.counts) == (PROMPT_LOGPROBS.number, [0], [1], [8])
    assert [array.tolist() for array in part.ints] == [LONG[1:9], [1] * 8]


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
    "two groups": layout_of(full(4), sliding(4)),
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


ARRAYS = [ints(1, 9, 2, 9, 3, 9), ints(1, 2, 3)]
ROWS = SideRows(PROMPT_LOGPROBS.number, [0], [1], [3], [2], ARRAYS, [np.zeros(6, np.float32)])


def good() -> ModelRunnerOutput:
    """A valid result for prompts of 4 tokens: handle 0 requested prompt logprobs, handle 1 did not."""
    return ModelRunnerOutput(
        1,
        ints(10, 11),
        ints(0, 1),
        side=[ROWS],
    )


def requested() -> Driver:
    driver = Driver()
    driver.add("a", [5, 1, 2, 3], prompt_logprobs=1, max_tokens=3)
    driver.add("b", [6, 1, 2, 3], max_tokens=3)
    driver.schedule()
    return driver


WRONG: dict[str, list[SideRows]] = {
    name: [change(ROWS, **fields)]
    for name, fields in {
        "an unknown kind": {"kind": 77},
        "an unknown request": {"handles": [7]},
        "no request": {"handles": []},
        "a request without prompt logprobs": {"handles": [1]},
        "a request twice": {"handles": [0, 0], "starts": [1, 2], "counts": [1, 2]},
        "more than the prompt": {"starts": [2]},
        "the first token": {"starts": [0]},
        "an empty part": {"counts": [0]},
        "lists of different lengths": {"starts": [1, 2]},
        "an empty list": {"widths": []},
        "no width": {"widths": [0]},
        "another width than requested": {
            "widths": [1],
            "ints": [ints(1, 2, 3), ARRAYS[1]],
            "floats": [np.zeros(3, "f4")],
        },
        "more rows than there can be": {"counts": [2**62]},
        "too few entries": {"floats": [np.zeros(5, np.float32)]},
        "no values": {"floats": []},
        "no ranks": {"ints": [ARRAYS[0], ints()]},
        "an array too many": {"ints": [*ARRAYS, ints()]},
        "a token outside of the vocabulary": {"ints": [ints(1, 9, 2, 9, 3, 1000), ARRAYS[1]]},
        "a negative token": {"ints": [ints(1, 9, 2, 9, 3, -1), ARRAYS[1]]},
    }.items()
} | {"two parts of one kind": [ROWS, ROWS]}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_refuses_invalid_prompt_logprobs_without_change(wrong: list[SideRows]) -> None:
    driver = requested()
    before = driver.scheduler.statistics()
    with pytest.raises(WorkerFault, match=r"result of step 1: "):
        driver.scheduler.consume(change(good(), side=wrong))
    assert driver.scheduler.statistics() == before and driver.scheduler.take_messages() == []
    driver.scheduler.consume(good())
    ((_, message),) = driver.scheduler.take_messages()
    assert message.side == [ROWS]

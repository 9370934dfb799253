"""Windows in a pool that is small beside them: chunks shrink, answers and prompts do not."""

from typing import Any

import pytest
from kv_cases import full, layout_of, sliding
from scheduler_driver import Driver, expected_tokens

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.front_end_messages import EndReason

GEMMA = layout_of(full(2), *[sliding(8, 2)] * 5)
PROMPT = [5 + i % 50 for i in range(33)]


@pytest.mark.parametrize("budget", [pytest.param(16, marks=pytest.mark.full), 2048])
def test_an_answer_alone_is_not_cut_while_blocks_are_free(budget: int) -> None:
    driver = Driver(120, layout=GEMMA, max_num_batched_tokens=budget, block_size=2, async_scheduling=True)
    driver.add("a", PROMPT, max_tokens=60)
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 60)
    assert driver.replay_lines() is None and driver.scheduler.statistics().num_preemptions == 0


@pytest.mark.full
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("layout", [GEMMA, layout_of(full(4), sliding(20, 4)), layout_of(sliding(9, 2), full(2))])
def test_the_longest_request_ends_alone_and_a_longer_prompt_is_refused(layout: KVLayout, chunked: bool) -> None:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 512, "max_model_len": 512}
    sizes |= {"block_size": layout.groups[0].block_size, "enable_chunked_prefill": chunked}
    for num_blocks, reserve in ((40, False), (57, True)):
        driver = Driver(num_blocks, layout=layout, reserve_full_sequence=reserve, **sizes)
        longest = driver.scheduler.kv.max_tokens
        prompts = [[5 + i % 50 for i in range(num)] for num in (longest - 9, longest, longest + 1)]
        for num, prompt in enumerate(prompts):
            driver.add(str(num), prompt, max_tokens=1 if num else 100)
        driver.run()
        first, second, third = driver.answers.values()
        assert first.tokens == expected_tokens(prompts[0], 10) and first.reason is EndReason.LENGTH
        assert second.tokens == expected_tokens(prompts[1], 1)
        assert third.rejected is not None and third.rejected.code == "kv_pool_too_small"
        assert not driver.scheduler.table.requests and driver.scheduler.statistics().num_preemptions == 0


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    driver = Driver(max_model_len=64)
    prompt = [5 + i % 50 for i in range(64)]
    driver.add("scored", prompt, max_tokens=1, prompt_logprobs=1)
    driver.add("longer", prompt, max_tokens=2, prompt_logprobs=1)
    driver.add("too long", [*prompt, 5], max_tokens=1, prompt_logprobs=1)
    driver.add("fork", [], forked_from="scored", max_tokens=2)
    driver.finish()
    assert len(driver.answers["scored"].prompt_logprobs) == 63
    assert driver.answers["scored"].tokens == expected_tokens(prompt, 1)
    for name in ("longer", "too long", "fork"):
        rejected = driver.answers[name].rejected
        assert rejected is not None and rejected.code == "context_length_exceeded"
    assert driver.replay_lines() is None

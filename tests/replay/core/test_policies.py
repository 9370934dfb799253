"""Policies of other engines: each alone, all together at random, and presets."""

import dataclasses
import random

import msgspec
import pytest
from scheduler_driver import Driver, expected_tokens, make_config
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.replay.core.policies import PRESETS, QUIRE, Policies, find_preset
from quire.scheduler_proc.requests.reasons import WaitReason


def prompt_of(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def one_step(driver: Driver) -> dict[str, int]:
    """Schedule and finish one step; return its tokens per request."""
    counts = driver.counts(driver.schedule())
    driver.execute()
    driver.deliver()
    return counts


@pytest.mark.parametrize("steady_decode", [True, False])
def test_decode_waits_behind_prefills_admitted_before_it(steady_decode: bool) -> None:
    """With a budget of 8 and chunks of 4, two prefills leave nothing for later requests."""
    seen = {}
    for name, policies in (("quire", QUIRE), ("in order", Policies(decodes_first=False))):
        driver = Driver(
            policies=policies,
            steady_decode=steady_decode,
            max_num_batched_tokens=8,
            long_prefill_token_threshold=3,
            enable_prefix_caching=False,
        )
        for number, length in enumerate((31, 31, 2)):
            driver.add(f"r{number}", prompt_of(length, 100 * number), max_tokens=20)
        assert one_step(driver) == {"r0": 3, "r1": 3, "r2": 2}
        driver.scheduler.config = msgspec.structs.replace(driver.config, long_prefill_token_threshold=4)
        seen[name] = one_step(driver)
        driver.run()
        driver.check_drained()
        assert driver.answers["r2"].tokens == expected_tokens(prompt_of(2, 200), 20)
    assert seen == {"quire": {"r0": 4, "r1": 3, "r2": 1}, "in order": {"r0": 4, "r1": 4}}


class TestPriority:
    def test_waiting_request_does_not_preempt(self) -> None:
        settings = {"scheduling_policy": "priority", "max_num_seqs": 1, "max_num_batched_tokens": 16}
        for policies, preemptions in ((QUIRE, 1), (Policies(priority_preempts=False), 0)):
            driver = Driver(policies=policies, **settings)
            driver.add("common", prompt_of(4), max_tokens=10, priority=5)
            driver.step()
            driver.add("urgent", prompt_of(4, 50), max_tokens=3, priority=1)
            driver.step()
            assert sum(driver.scheduler.decisions.preemptions.values()) == preemptions
            driver.run()
            driver.check_drained()


@pytest.mark.parametrize("whole", [True, False])
def test_admission_needs_blocks_for_whole_prompt_or_first_chunk(whole: bool) -> None:
    """The pool has ten blocks of four tokens, six of them held by a decoding request."""
    policies = Policies(admit_whole_prompts=whole)
    driver = Driver(11, policies=policies, max_num_batched_tokens=24, enable_prefix_caching=False)
    driver.add("decodes", prompt_of(23), max_tokens=8)
    driver.step()
    driver.add("long", prompt_of(36, 100), max_tokens=1)
    driver.scheduler.config = msgspec.structs.replace(driver.config, long_prefill_token_threshold=8)
    assert one_step(driver) == ({"decodes": 1} if whole else {"decodes": 1, "long": 8})
    if whole:
        assert driver.request("long").wait_reason is WaitReason.KV_BLOCKS
    driver.run()
    driver.check_drained()
    assert driver.answers["long"].tokens == expected_tokens(prompt_of(36, 100), 1)


def test_reuses_blocks_in_the_order_in_which_they_were_freed() -> None:
    """A request frees a cached block and an uncached one; the policy decides which is allocated first."""
    next_free = {}
    for name, policies in (("engine-u", QUIRE), ("engine", Policies(uncached_blocks_first=False))):
        driver = Driver(5, policies=policies)
        driver.add("a", prompt_of(5), max_tokens=2)
        driver.run()
        next_free[name] = driver.scheduler.kv.pool.free_block_queue.blocks()[0].block_id
        driver.scheduler.check()
    assert next_free == {"engine-u": 2, "engine": 3}  # block 2 held the prompt's end


@pytest.mark.parametrize("seed", thinned(range(12), keep=3))
def test_outputs_do_not_depend_on_policies(seed: int) -> None:
    rng = random.Random(seed)
    policies = Policies(**{field.name: rng.random() < 0.5 for field in dataclasses.fields(Policies)})
    driver = Driver(
        rng.choice((12, 16, 40)),
        policies=policies,
        steady_decode=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice((8, 13)),
        long_prefill_token_threshold=rng.choice((0, 3, 5)),
        scheduling_policy=rng.choice(("fcfs", "priority")),
        max_model_len=40,
    )
    asked = {}
    for number in range(14):
        prompt, length = prompt_of(rng.randint(1, 25), 10 * rng.randint(0, 3)), rng.randint(1, 12)
        asked[f"r{number}"] = (prompt, length)
        driver.add(f"r{number}", prompt, max_tokens=length, priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 9)):
            driver.random_step(rng)
            driver.scheduler.check()
    driver.run()
    driver.check_drained()
    for name, (prompt, length) in asked.items():
        assert driver.answers[name].tokens == expected_tokens(prompt, length), name


class TestNames:
    def test_the_live_engine_has_the_defaults(self) -> None:
        assert find_preset("quire").policies == Policies() == QUIRE and not find_preset("quire").settings

    @pytest.mark.parametrize(
        ("name", "known"),
        [
            ("vllm-0.19", "vllm-0.19"),
            ("vllm-0.19.0", "vllm-0.19"),
            ("vllm-0.28.1", "vllm-0.19"),
            ("vllm-0.11.2", "vllm-0.11"),
            ("vllm-0.18", "vllm-0.11"),
            ("vllm-1.0.0", "vllm-0.19"),
        ],
    )
    def test_finds_newest_preset_that_is_not_newer(self, name: str, known: str) -> None:
        assert find_preset(name) is PRESETS[known]

    @pytest.mark.parametrize("name", ["vllm-0.5.1", "vllm", "vllm-", "vllm-new", "sglang-0.4", "", "quire-0.1"])
    def test_rejects_unknown_engines(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"unknown engine.*known: quire, vllm-0\.19"):
            find_preset(name)

    def test_preset_settings_are_engine_fields(self) -> None:
        for preset in PRESETS.values():
            make_config(**preset.settings)
            assert preset.settings.keys() <= set(type(make_config()).__struct_fields__)

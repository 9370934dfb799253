"""Slots of recurrent states: checkpoints, hits, copies, forks, and pools that are too small."""

import random
from typing import Any

import msgspec
import pytest
from scheduler_driver import Driver, expected_tokens, make_config, make_layout
from traced_runs import random_run

from quire.protocol.model.kv_layout import KVGroup, KVLayout, StateTensor

GRID = 8
BLOCK = 4
STATES = [StateTensor("layers.0", "state", (2, 2), "float32")]


def hybrid(**settings: Any) -> KVLayout:
    layout = make_layout(make_config(block_size=BLOCK, **settings))
    return msgspec.structs.replace(layout, states=STATES, state_chunk=GRID)


def driver(num_slots: int = 9, **settings: Any) -> Driver:
    return Driver(**{"layout": hybrid(), "num_slots": num_slots, "block_size": BLOCK, "num_blocks": 65, **settings})


def ask(run: Driver, name: str, prompt: list[int], max_tokens: int = 3) -> int:
    """Run a request to its end, check its tokens, and return how many of its prompt were found."""
    run.add(name, prompt, max_tokens=max_tokens)
    run.run()
    answer = run.answers[name]
    assert answer.tokens == expected_tokens(prompt, max_tokens)
    return answer.num_cached_tokens


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_a_prompt_is_found_at_its_last_checkpoint(budget: int) -> None:
    run = driver(max_num_batched_tokens=budget)
    assert [ask(run, name, list(range(21))) for name in "abc"] == [0, 16, 16]
    assert ask(run, "short", [5, 6, 7]) == 0


def test_prompts_branch_where_blocks_matched_further() -> None:
    run = driver(num_slots=32, num_blocks=200)
    found = [ask(run, f"r{i}", [*range(30), *range(100 * i + 100, 100 * i + 117)]) for i in range(6)]
    assert found == [0, 0, 24, 24, 24, 24]


def test_the_worked_example_of_docs() -> None:
    layout = msgspec.structs.replace(make_layout(make_config(block_size=16)), states=STATES, state_chunk=64)
    sizes = {"num_blocks": 200, "num_slots": 20, "block_size": 16, "max_model_len": 300, "max_num_batched_tokens": 256}
    run = Driver(layout=layout, **sizes)
    a = list(range(100))
    assert ask(run, "a", a, 40) == 0
    assert [dict(diff.counts).get(0) for diff in run.diffs[:2]] == [64, 36]
    assert ask(run, "b", [*range(80), *range(900, 920)], 40) == 64
    assert ask(run, "c", [*a, *run.answers["a"].tokens, *range(20)], 4) == 128
    longer = [
        ask(run, name, [*range(500, 640), *range(at, at + 60)]) for name, at in (("d", 0), ("e", 100), ("f", 200))
    ]
    assert longer == [0, 0, 128]


def test_a_conversation_goes_on_from_its_answer() -> None:
    run = driver()
    prompt = list(range(10))
    ask(run, "first", prompt, max_tokens=20)
    answered = [*prompt, *run.answers["first"].tokens]
    # Of the decode only the newest checkpoint was kept, besides that of the prompt.
    assert run.scheduler.kv.states.pool.num_cached_blocks == 2
    assert ask(run, "second", [*answered, 1, 2, 3]) == 24


@pytest.mark.parametrize("num_slots", [2, 3])
def test_few_slots_make_requests_wait(num_slots: int) -> None:
    run = driver(num_slots=num_slots)
    prompts = {f"r{i}": [*range(17), i % 2] for i in range(7)}
    for name, prompt in prompts.items():
        run.add(name, prompt, max_tokens=9)
    run.finish()
    assert {name: answer.tokens for name, answer in run.answers.items()} == {
        name: expected_tokens(prompt, 9) for name, prompt in prompts.items()
    }


def test_a_request_goes_on_in_the_only_slot_that_is_free() -> None:
    run = driver(num_slots=2)
    assert ask(run, "a", list(range(16)), max_tokens=1) == 0
    assert run.scheduler.kv.states.pool.num_cached_blocks == 0, "the only slot was held when the checkpoint was due"


def test_without_chunks_or_the_prefix_cache_states_are_right_and_not_found() -> None:
    whole = driver(enable_chunked_prefill=False)
    assert [ask(whole, name, list(range(21)), 12) for name in "ab"] == [0, 0]
    uncached = driver(enable_prefix_caching=False)
    assert [ask(uncached, name, list(range(21)), 12) for name in "ab"] == [0, 0]


def test_forks_have_a_copy_of_the_state() -> None:
    run = driver(num_slots=6, max_num_seqs=4)
    prompt = list(range(13))
    run.add("parent", prompt, max_tokens=14)
    for name in "xyz":
        run.add(name, [], forked_from="parent", max_tokens=14)
    run.finish()
    assert {answer.num_cached_tokens for answer in run.answers.values()} == {0, len(prompt)}


def random_layout(rng: random.Random) -> KVLayout:
    groups = [KVGroup("full_attention", BLOCK, [0])]
    groups += [KVGroup("sliding_window", BLOCK, [1], window=rng.randrange(1, 12))] * rng.randrange(2)
    return KVLayout(groups, 1, 4, "float32", states=STATES, state_chunk=rng.choice((4, 8, 12)))


@pytest.mark.parametrize("seed", range(24))
def test_random_runs_are_right_and_replayed(seed: int) -> None:
    rng = random.Random(seed)
    run = random_run(seed, layout=random_layout(rng), block_size=BLOCK, num_slots=rng.choice((2, 3, 4, 6, 20)))
    run.check_drained()
    assert run.replay_lines() is None

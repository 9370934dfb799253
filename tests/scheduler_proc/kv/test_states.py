"""Slots of recurrent states: checkpoints, hits, copies, forks, and pools that are too small."""

import itertools
import random
from typing import Any

import msgspec
import pytest
from fake_pages import random_faults
from scheduler_driver import Driver, expected_tokens, make_config, make_layout
from tiers import thinned
from traced_runs import random_run

from quire.protocol.model.kv_layout import KVGroup, KVLayout, StateTensor
from quire.protocol.wire.transfer_messages import MoveKind
from quire.scheduler_proc.kv.tiers import AnyTier
from quire.scheduler_proc.requests.reasons import WaitReason

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


STATES_OF_PARTS = [StateTensor("layers.0", "state", (16, 15), "float32")]


def tiered(**settings: Any) -> Driver:
    """A checkpoint is a slot on the device, and four pages in a tier."""
    layout = msgspec.structs.replace(hybrid(), states=STATES_OF_PARTS)
    assert layout.num_state_parts == 4
    return driver(**{"layout": layout, "num_slots": 9, "num_host_pages": 200} | settings)


def prompt_of(number: int) -> list[int]:
    return [60 * number + at for at in range(21)]


@pytest.mark.parametrize("num_blocks", [24, 200])
@pytest.mark.parametrize("where", [{}, {"num_host_pages": 0, "num_disk_pages": 200}])
def test_states_come_back_from_a_tier(num_blocks: int, where: dict[str, int]) -> None:
    """With few blocks, their contents too; with many, only the state is loaded."""
    run = tiered(num_blocks=num_blocks, **where)
    run.read_disk() if "num_disk_pages" in where else None
    assert [ask(run, f"a{number}", prompt_of(number)) for number in range(14)] == [0] * 14
    assert [ask(run, f"b{number}", prompt_of(number)) for number in range(14)] == [16] * 14
    run.check_drained()
    assert run.replay_lines() is None


def test_a_state_is_invalidated_in_tiers_and_on_its_way_from_them() -> None:
    run = tiered(num_blocks=200)
    for number in range(14):
        ask(run, f"a{number}", prompt_of(number))
    run.add("again", prompt_of(0), max_tokens=1)
    run.fill()
    assert run.request("again").wait_reason is WaitReason.LOADING
    kv, request = run.scheduler.kv, run.request("again")
    kv.invalidate(request, 0)
    run.settle()
    assert kv.states.longest(request.block_hashes, 16, AnyTier([tier.pages for tier in kv.tiers])) == 0
    run.run()
    assert run.answers["again"].num_cached_tokens == 0


def test_a_state_of_which_a_page_was_not_stored_is_not_loaded() -> None:
    run = tiered(num_blocks=200)
    faults = itertools.cycle(("", "", "refused", ""))
    run.worker.host.fault = lambda: next(faults)
    for turn in "ab":
        for number in range(14):
            ask(run, f"{turn}{number}", prompt_of(number))
    assert {move.kind for move in run.moves} == {MoveKind.STORE}
    assert run.scheduler.kv.tiers[0].pages.num_cached_blocks == 0


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


PLACES = {"num_host_pages": 40}, {"num_host_pages": 40, "num_disk_pages": 90}, {"num_disk_pages": 90}


@pytest.mark.parametrize("seed", thinned(range(24), keep=4))
def test_random_runs_with_tiers(seed: int) -> None:
    """Few slots, damaged pages, new workers, aborts, and prompts of which each is a beginning of one of a few."""
    rng = random.Random(seed)
    layout = msgspec.structs.replace(random_layout(rng), states=rng.choice((STATES, STATES_OF_PARTS)))
    tokens, drafts = rng.choice((9, 13, 64)), rng.choice((0, 0, 2))
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 2, "num_speculative_tokens": drafts}
    places, slots = PLACES[seed % len(PLACES)], rng.choice((3, 4, 5, 7))
    run = driver(slots, layout=layout, num_blocks=rng.choice((26, 60)), **places, **settings)
    run.worker.host.fault = random_faults(random.Random(seed), rng.choice((0.0, 0.0, 0.1)))
    if "num_disk_pages" in places:
        run.read_disk()
    texts = [[150 * text + at if at > 9 else at for at in range(40)] for text in range(6)]
    for index in range(50):
        name, length, most = f"r{index}", rng.randrange(9, 40), rng.randrange(1, 6)
        if rng.random() < 0.04:
            run.worker.bad_from[name] = rng.randrange(2)
        run.add(name, rng.choice(texts)[:length], max_tokens=most)
        most_left = rng.randrange(5)
        while len(run.scheduler.table.requests) > most_left:
            run.random_step(rng)
        match rng.randrange(40):
            case 0:
                run.begin_worker_epoch()
            case 1:
                run.control("reset_prefix_cache")
            case 2 | 3 if run.scheduler.table.requests:
                run.abort(next(iter(run.scheduler.table.requests))[1])
    run.finish()
    assert run.replay_lines() is None

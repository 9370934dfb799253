"""Eviction by value: gains where turns differ, never loses much where they do not, and replays exactly."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256

import pytest
from kv_cases import full, layout_of
from log_replay import replay
from scheduler_driver import Driver
from tiers import thinned
from traced_runs import random_run

from quire.protocol.wire.front_end_messages import CallsTool
from quire.scheduler_proc.eviction.shadow import Shadow
from quire.scheduler_proc.eviction.turns import MAX_OPEN, NOT_ENDED, NUM_CLASSES, WAIT_S, Turn, Turns
from quire.scheduler_proc.eviction.value import ValueEviction
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.trace.keyframe import idle_state

SIZE = 4


def chain(*parts: object) -> list[bytes]:
    """Return the hashes of a prompt whose blocks are ``parts``."""
    running, found = sha256(), []
    for part in parts:
        running.update(repr(part).encode())
        found.append(running.digest())
    return found


# ---- what is learned


def test_turns_that_are_continued_have_a_higher_hazard() -> None:
    turns, now = Turns(), 0.0
    short, long = Turn(1, 100, 100, 50), Turn(1, 9000, 9000, 50)
    for number in range(60):
        now += 1.0
        first, second = chain("short", number), chain("long", number)
        turns.ended(first[-1], short, short.turn_class, now)
        turns.ended(second[-1], long, long.turn_class, now)
        assert turns.arrived(chain("short", number, "more"), now + 30) == (2, 100)
    turns.learn(now + WAIT_S)
    kept, lost = (turns.hazard(turn.turn_class, 5.0) for turn in (short, long))
    assert kept > 10 * lost
    assert kept > turns.hazard(short.turn_class, 50.0) > turns.hazard(short.turn_class, 500.0), "it falls with the age"
    assert turns.hazard(NOT_ENDED, 0.0) > lost, "an unknown class has the mean"


def test_prompts_that_several_requests_share_do_not_count_as_turns() -> None:
    turns = Turns()
    system = chain("system")
    turn = Turn(1, 100, 100, 50)
    assert turns.ended(system[-1], turn, turn.turn_class, 0.0) == turn.turn_class
    assert turns.ended(system[-1], turn, turn.turn_class, 1.0) != turn.turn_class
    assert turns.arrived(chain("system", "hello"), 2.0) == (1, 0)


def test_memory_of_turns_is_bounded() -> None:
    turns, turn = Turns(), Turn(1, 100, 100, 50)
    for number in range(MAX_OPEN + 100):
        turns.ended(b"%d" % number, turn, turn.turn_class, 1.0)
    turns.learn(1.0)
    assert turns.arrived([b"99"], 1.0) == (1, 0) and turns.arrived([b"100"], 1.0) == (2, 100)


def test_classes_are_distinct_and_in_range() -> None:
    turns = [
        Turn(number, prompt, new, output, tools)
        for number in (1, 2, 3, 9)
        for prompt in (9, 2000, 9000, 20_000, 100_000)
        for new in ((0,) if number == 1 else (0, 5000))
        for output in (1, 100)
        for tools in (False, True)
    ]
    found = {turn.turn_class for turn in turns}
    assert len(found) == len(turns) and min(found) > NOT_ENDED and max(found) < NUM_CLASSES


def test_the_shadow_of_lru_is_lru() -> None:
    """With all contents in the sample, its hits are those of a cache with the same number of contents."""
    rng, shadow = random.Random(3), Shadow(40, Turns())
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for _ in range(300):
        prompt = chain(*(rng.randrange(2) for _ in range(rng.randrange(1, 8))))
        for key in prompt:
            if key not in cache:
                break
            hits += 1
        for key in reversed(prompt):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > 40:
            cache.popitem(last=False)
        shadow.ended(prompt, len(prompt), 0, 0.0)
    assert shadow.num_lru_hits == hits > 300
    assert shadow.num_value_hits == hits, "with one class and one time, value is LRU"


# ---- with a pool

Workload = Iterator[tuple[float, list[int], int]]
"""Times, prompts and output lengths."""


def chats(rng: random.Random, count: int = 600) -> Workload:
    """Conversations of short prompts that continue, between long prompts that do not."""
    open_: list[list[int]] = []
    for number in range(count):
        if rng.random() < 0.5:
            yield number * 1.0, [number * 1000 + at for at in range(120)], 4
        else:
            if len(open_) < 12:
                open_.append([number * 1000 + at for at in range(20)])
            prompt = open_.pop(rng.randrange(len(open_)))
            yield number * 1.0, prompt, 40
            if len(prompt) < 60:
                open_.append(prompt + [number * 1000 + at for at in range(8)])


def unfavourable(rng: random.Random, count: int = 600) -> Workload:
    """Classes exchange their behaviour again and again, so that old estimates are wrong."""
    last: dict[int, list[int]] = {}
    for number in range(count):
        phase, kind = number // 150 % 2, number % 2
        length = 80 if kind else 16
        prompt = last.get(kind) if kind == phase and rng.random() < 0.9 else None
        last[kind] = prompt or [number * 1000 + at for at in range(length)]
        yield number * 1.0, last[kind], 4


class Prompt:
    """A CacheRequest for a prompt."""

    num_computed_tokens = num_acknowledged_tokens = tenant = 0
    skip_reading_prefix_cache = False

    def __init__(self, handle: int, tokens: list[int]) -> None:
        self.handle, self.num_tokens = handle, len(tokens)
        self.block_hashes = chain(*(tokens[at : at + SIZE] for at in range(0, len(tokens) - SIZE + 1, SIZE)))


def hit_tokens(workload: Workload, num_blocks: int, value: ValueEviction | None) -> int:
    """Serve one request after the other with the real pool. Returns the hits."""

    def pool(count: int, caching: bool) -> BlockPool:
        return BlockPool(count, caching, ranking=value)

    kv = KVCacheManager(layout_of(full(SIZE)), num_blocks + 1, True, pool_class=pool)
    found = 0
    for handle, (now, prompt, num_output) in enumerate(workload):
        request = Prompt(handle, prompt)
        if value is not None:
            value.clock(now)
            value.arrived(handle, request.block_hashes)
        hits, num_hits = kv.get_computed_blocks(request)
        found += num_hits
        assert kv.allocate_slots(request, len(prompt) - num_hits, hits, num_hits) is not None
        request.num_computed_tokens = len(prompt)
        kv.cache_blocks(request, len(prompt))
        turn = 0
        if value is not None:
            turn = value.ended(handle, request.block_hashes, Turn(0, len(prompt) * 16, 0, num_output))
            value.forget(handle)
        kv.free(request, turn_class=turn)
    kv.check()
    return found


def test_value_keeps_what_is_continued() -> None:
    value = ValueEviction(SIZE, 100)
    lru = hit_tokens(chats(random.Random(1)), 100, None)
    by_value = hit_tokens(chats(random.Random(1)), 100, value)
    assert by_value > 1.3 * lru, (lru, by_value)
    assert value.is_by_value and value.shadow.num_value_hits > value.shadow.num_lru_hits


@pytest.mark.parametrize("seed", thinned(range(6), keep=1))
@pytest.mark.parametrize("num_blocks", [40, *(pytest.param(size, marks=pytest.mark.full) for size in (24, 80))])
def test_the_guard_returns_to_lru(seed: int, num_blocks: int) -> None:
    lru = hit_tokens(unfavourable(random.Random(seed)), num_blocks, None)
    prompts = sum(len(prompt) for _, prompt, _ in unfavourable(random.Random(seed)))
    by_value = hit_tokens(unfavourable(random.Random(seed)), num_blocks, ValueEviction(SIZE, num_blocks))
    assert by_value >= lru - 0.003 * prompts, (lru, by_value)


# ---- in the scheduler


@pytest.mark.parametrize("seed", thinned(range(16), keep=1))
def test_a_run_with_eviction_by_value_replays_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value is forced, because so short a run does not convince the guard."""
    monkeypatch.setattr(ValueEviction, "is_by_value", property(lambda _: True, lambda *_: None), raising=False)
    driver = random_run(seed, 12, eviction_policy="value", enable_prefix_caching=True, num_speculative_tokens=0)
    assert replay(driver.header, list(driver.log), check=True) is None
    assert driver.replay_lines() is None
    assert idle_state(driver.scheduler) is None, "what was learned is in no keyframe"
    shadow = driver.scheduler.statistics().eviction_shadow
    assert shadow is not None and shadow.is_by_value and shadow.num_looked_up


def test_a_turn_that_follows_a_tool_has_another_class() -> None:
    """The tool is named after the end of the answer that calls it, so that it counts for the turn that follows."""
    driver = Driver(eviction_policy="value")

    def class_of_second_turn(job: str, tool: str) -> int:
        prompt = [len(job)] * 9
        driver.add(f"{job} 1", prompt, job_id=job, max_tokens=2)
        driver.run()
        driver.consume(CallsTool(f"{job} 1", tool))
        driver.add(f"{job} 2", [*prompt, 1, 2, 3, 4, 5], job_id=job, max_tokens=2)
        driver.run()
        releases = driver.scheduler.kv.pool.releases
        assert releases is not None
        return max(
            (freed for freed in releases.of_block if freed is not None), key=lambda freed: freed.order
        ).turn_class

    assert class_of_second_turn("plain", "") != class_of_second_turn("agentic", "grep")

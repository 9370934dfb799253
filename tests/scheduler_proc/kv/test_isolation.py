"""Isolation of tenants in the prefix cache: a tenant learns nothing of another's prompts, and keeps its share."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from log_replay import replay
from scheduler_driver import Answer, Driver, make_request
from tiers import thinned

from quire.protocol.block_hash import BlockHasher
from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.fair_pool import FairFreeQueue

PROMPT = list(range(1, 30))
NUM_HIT_TOKENS = 28


def found(driver: Driver, request_id: str, prompt: list[int] = PROMPT, **extra: Any) -> int:
    """Return the tokens that a request finds in the cache; also tells the fake worker what must not be shared."""
    owner = extra.get("tenant", 0) if driver.config.isolate_prefix_cache_by_key else 0
    driver.salts[request_id] = f"{extra.get('cache_salt', '')}/{owner}"
    driver.answers[request_id] = Answer()
    driver.consume(make_request(request_id, prompt, max_tokens=2, ignore_eos=True, **extra))
    driver.run()
    return driver.answers[request_id].num_cached_tokens


def isolated(**settings: Any) -> Driver:
    return Driver(isolate_prefix_cache_by_key=True, num_tenants=3, **settings)


# ---- sharing


@pytest.mark.parametrize("salt", ["", "s"])
@pytest.mark.parametrize("fair", [False, True])
def test_two_tenants_share_no_hit(salt: str, fair: bool) -> None:
    driver = isolated(fair_admission=fair)
    for tenant in (0, 1, 2, 3):
        assert found(driver, f"first{tenant}", tenant=tenant, cache_salt=salt) == 0
    for tenant in (3, 1, 0, 2):
        assert found(driver, f"again{tenant}", tenant=tenant, cache_salt=salt) == NUM_HIT_TOKENS
    driver.check_drained()


def test_tenants_share_the_cache_by_default() -> None:
    driver = Driver(num_tenants=2)
    assert found(driver, "first", tenant=1) == 0
    assert found(driver, "second", tenant=2) == NUM_HIT_TOKENS


def test_roots_of_salts_adapters_and_tenants_differ() -> None:
    """All roots differ: a salt cannot imitate a tenant or the absence of one."""
    hasher = BlockHasher("sha256", 4)
    salts = ["", "a", "\x01", "\x01\x00\x00\x00", "quire tenant's block chain 2\0", "a\0", "1", "é"]
    names = set()
    for salt in salts:
        for adapter in ("", "a", "lora"):
            for tenant in (0, 1, 2, 256, 2**31 - 1):
                chain = hasher.chain(salt, adapter, tenant=tenant)
                chain.extend(b"\1\0\0\0" * 4)
                names.add(chain.hashes[0])
    assert len(names) == len(salts) * 3 * 5


def test_replay_isolates_tenants() -> None:
    driver = isolated(fair_admission=True)
    for i, tenant in enumerate((1, 2, 1, 2)):
        found(driver, f"r{i}", tenant=tenant)
    assert replay(driver.header, list(driver.log), check=True) is None
    assert driver.replay_lines() is None


# ---- A39: probes of another tenant's cache


@pytest.mark.parametrize("seed", thinned(range(20), keep=2))
def test_a_probe_of_another_tenants_prompt_looks_like_a_miss(seed: int) -> None:
    """Whether or not the victim's prompt is cached, the prober sees equal steps, computed tokens and blocks."""
    rng = random.Random(seed)
    length = rng.randrange(5, 60)
    prompt = [rng.randrange(1000) for _ in range(length)]
    for probe in ({"cache_salt": "prober"}, {"tenant": 2}):
        seen = []
        for cached in (prompt, [token + 1000 for token in prompt]):
            driver = isolated(vocab_size=2000, max_num_batched_tokens=8, max_num_seqs=4)
            found(driver, "victim", cached, tenant=1)
            before = len(driver.diffs)
            num_hit_tokens = found(driver, "probe", prompt, **probe)
            steps = driver.diffs[before:]
            seen.append((len(steps), [d.counts for d in steps], num_hit_tokens))
        assert seen[0] == seen[1] and seen[0][2] == 0


# ---- A40: evictions by a flood


def hit_rate(
    *, flood: int, fair: bool = True, seed: int = 7, prompts: int = 5, size: int = 24, **settings: Any
) -> float:
    """Return the hit rate of a tenant that repeats ``prompts`` prompts while another tenant sends new ones."""
    driver = Driver(num_blocks=101, max_num_seqs=4, num_tenants=2, fair_admission=fair, **settings)
    rng = random.Random(seed)
    asked = got = 0
    own = [[500 + i] * size for i in range(prompts)]
    for turn in range(6):
        for i, prompt in enumerate(own):
            for k in range(flood):
                driver.add(f"f{turn}:{i}:{k}", [rng.randrange(400) for _ in range(30)], max_tokens=2, tenant=1)
            driver.add(f"v{turn}:{i}", prompt, max_tokens=2, ignore_eos=True, tenant=2)
            while driver.answers[f"v{turn}:{i}"].ended is None:
                driver.step()
            if turn:
                asked += size
                got += driver.answers[f"v{turn}:{i}"].num_cached_tokens
    driver.finish()
    return got / asked


@pytest.mark.parametrize("flood", thinned([5, 1, 2, 9], keep=1))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_flood_leaves_another_tenant_four_fifths_of_its_hits(seed: int, flood: int) -> None:
    solo, beside = hit_rate(flood=0, seed=seed), hit_rate(flood=flood, seed=seed)
    assert beside >= 0.8 * solo, (solo, beside)


def test_without_fair_admission_a_flood_evicts_other_tenants() -> None:
    """Shows that the previous test depends on fair admission."""
    assert hit_rate(flood=5, fair=False) < 0.8 * hit_rate(flood=0)


def test_a_single_tenant_can_use_the_whole_cache() -> None:
    """No blocks are reserved for other tenants."""
    assert hit_rate(flood=0, prompts=15) == hit_rate(flood=0, prompts=15, fair=False) > 0.8


def test_inactive_tenants_are_evicted_first() -> None:
    queue = FairFreeQueue(blocks(9))
    leave(queue, 1, queue.popleft_n(6))
    leave(queue, 2, queue.popleft_n(3))
    assert {b.block_id for b in queue.popleft_n(2)} == {0, 1}, "the oldest content of the tenant with the most blocks"
    queue.held[2] = 9
    for _ in range(40 * 9):
        leave(queue, 2, queue.popleft_n(1))
    assert list(queue._queues) == [2], "an inactive tenant loses all its contents"


# ---- the queue itself


def blocks(count: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(i) for i in range(count)]


def leave(queue: FairFreeQueue, tenant: int, left: Sequence[KVCacheBlock]) -> None:
    for block in left:
        block.block_hash = b"%d" % block.block_id
    queue.tenant = tenant
    queue.append_n(left)


@pytest.mark.parametrize("seed", thinned(range(30), keep=4))
def test_with_one_tenant_the_fair_queue_equals_the_plain_queue(seed: int) -> None:
    rng = random.Random(seed)
    fair, plain = FairFreeQueue(blocks(20)), FreeKVCacheBlockQueue(blocks(20))
    queues: list[FreeKVCacheBlockQueue] = [fair, plain]
    out: list[list[KVCacheBlock]] = [[], []]
    for _ in range(120):
        kind, n = rng.choice(["take", "leave", "drop", "hit", "hit"]), rng.randrange(1, 6)
        at = [rng.randrange(1000) for _ in range(n)]
        for queue, held in zip(queues, out, strict=True):
            if kind == "take" and n <= queue.num_free_blocks:
                held += queue.popleft_n(n)
                for block in held[-n:]:
                    block.block_hash = None
            elif kind == "hit":
                cached = [b for b in queue.blocks() if b.block_hash is not None]
                hits = list({i % len(cached): cached[i % len(cached)] for i in at}.values()) if cached else []
                queue.remove_n(hits)
                held += hits
            elif kind == "leave":
                for block in held[-n:]:
                    block.block_hash = b"x"
                queue.append_n(held[-n:])
                del held[-n:]
            elif kind == "drop":
                queue.prepend_n([b for b in held[-n:] if b.block_hash is None])
                held[-n:] = [b for b in held[-n:] if b.block_hash is not None]
            queue.check()
        assert [b.block_id for b in fair.blocks()] == [b.block_id for b in plain.blocks()]


def test_check_of_the_fair_queue_detects_violations() -> None:
    queue = FairFreeQueue(blocks(6))
    leave(queue, 1, queue.popleft_n(3))
    queue.check()
    queue._owners[queue.blocks()[-1].block_id] = 2
    with pytest.raises(AssertionError, match="not in the queue of its owner"):
        queue.check()

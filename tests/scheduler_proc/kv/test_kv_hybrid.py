"""Several KV groups that must agree on a hit, with scenarios of bugs of other engines."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from kv_cases import CacheCase, case, full, layout_of, shape, sliding, step

from quire.protocol.block_hash import group_key
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup
from quire.scheduler_proc.kv.manager import KVCacheManager


def manager_of(*groups: KVGroup, usable: int = 40, **options: bool) -> KVCacheManager:
    return KVCacheManager(layout_of(*groups), usable + 1, True, **options)  # type: ignore[arg-type]


def filled(*groups: KVGroup, num_tokens: int = 33, usable: int = 40, **options: bool) -> KVCacheManager:
    """Return a manager after one request computed ``num_tokens`` tokens in chunks of 8 and ended."""
    kv = manager_of(*groups, usable=usable, **options)
    first = case(1, num_tokens, kv.block_size)
    first.skip_reading_prefix_cache = True
    while first.num_computed_tokens < num_tokens:
        step(kv, first, min(num_tokens - first.num_computed_tokens, 8))
    kv.free(first)
    kv.check()
    return kv


def forget(kv: KVCacheManager, group: int, block: int) -> None:
    """Evict one block, given by its index in its group."""
    kv.pool.invalidate(group_key(case(0, 100, kv.block_size).block_hashes[block], group))


def hit(kv: KVCacheManager, num_tokens: int = 33) -> tuple[int, list[str]]:
    hits, num_hits = kv.get_computed_blocks(case(9, num_tokens, kv.block_size))
    return num_hits, ["".join(".#"[not b.is_null] for b in group) for group in hits]


def test_full_attention_and_windows_agree_on_one_hit() -> None:
    kv = filled(full(), sliding(6), sliding(2))
    assert hit(kv) == (32, ["########", "......##", ".......#"])
    request = case(2, 40)
    step(kv, request, 8)
    assert [shape(kv, request, g) for g in range(3)] == ["##########", "......####", ".......###"]
    step(kv, request, 1)
    assert [shape(kv, request, g) for g in range(3)] == ["###########", "........###", ".........##"]


def test_each_group_shortens_the_hit_until_all_agree() -> None:
    kv = filled(full(), sliding(6), sliding(2))
    # The wide window rejects 24, 28 and 32, the narrow one 20 and 16, and the wide one 12.
    forget(kv, 1, 6)
    forget(kv, 1, 5)
    assert hit(kv)[0] == 20
    forget(kv, 2, 4)
    forget(kv, 2, 3)
    forget(kv, 1, 2)
    assert hit(kv) == (8, ["##", "##", ".#"])
    forget(kv, 0, 1)
    assert hit(kv) == (4, ["#", "#", "#"])
    forget(kv, 2, 0)
    assert hit(kv) == (0, ["", "", ""])


@pytest.mark.parametrize("sizes", [(4, 8), (4, 6), (0, 0)], ids=str)
def test_unequal_blocks_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="block_size of all KV groups must be equal and at least 1"):
        manager_of(full(sizes[0]), sliding(5, sizes[1]))


def test_groups_of_one_kind_do_not_share_contents() -> None:
    kv = filled(full(), full(), sliding(6))
    hits, _ = kv.get_computed_blocks(case(2, 33))
    assert not {b.block_id for b in hits[0]} & {b.block_id for b in hits[1]}
    forget(kv, 1, 3)
    assert hit(kv)[0] == 12


def test_worked_example_of_the_docs() -> None:
    kv, a, b = manager_of(full(), sliding(6), usable=12), case(1, 14), CacheCase(2, [*range(14), 7, 7, 7])
    rows = []
    for num_tokens in (8, 6, 1, 1, 1):
        step(kv, a, num_tokens)
        if a.num_computed_tokens == 14:
            a.tokens += [100, 101, 102]
        rows.append(f"{row(kv.block_ids(a))} | {row([free_ids(kv)])}")
    assert rows[2] == rows[3]
    kv.free(a)
    rows.append(f"| | | {row([free_ids(kv)])}")
    hits, num_hits = kv.get_computed_blocks(b)
    assert num_hits == 12
    rows.append(row([[block.block_id for block in group] for group in hits]))
    step(kv, b, 5)
    rows.append(f"{row(kv.block_ids(b))} | {row([free_ids(kv)])}")
    page = (Path(__file__).parents[3] / "docs/kv_cache.md").read_text()
    assert all(line in page for line in rows), rows


def row(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(" ".join(map(str, group)) for group in groups)


def free_ids(kv: KVCacheManager) -> list[int]:
    return [b.block_id for b in kv.pool.free_block_queue.blocks()]

"""Replays of what each simulated scheduler recorded, by other schedulers that must decide the same."""

from math import lcm
from typing import TYPE_CHECKING, Any

from fake_worker import first_read
from lines_in_memory import numbered, record_log
from log_replay import plain_scheduler, replay
from sim_violation import Violation

from quire.protocol.block_hash import group_key
from quire.protocol.model.kv_layout import KVGroup
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.trace.event_log import Record, RecordKind, TraceHeader
from quire.scheduler_proc.trace.lines import decode_line, encode_line

if TYPE_CHECKING:
    from sim_scheduler import SimScheduler

KEYFRAME_STEPS = 40
"""Steps of a scheduler up to its keyframe: most have more, and some requests run or wait."""


def recorded(process: "SimScheduler") -> tuple[TraceHeader, list[Record]] | None:
    """Return what a scheduler recorded, or None if it ended before it had workers."""
    journal = process.loop and process.loop._journal
    if not journal or journal._header is None:
        return None
    assert not journal.log.dropped, "the ring is too small for a simulation"
    return journal._header, list(journal.log)


def check_hits(kv: KVCacheManager) -> None:
    """Let each hit of the prefix cache be compared with the longest that the pool's contents allow."""
    computed = kv.get_computed_blocks

    def checked(request: Any) -> tuple[GroupBlocks, int]:
        hits, num_hits = computed(request)
        assert num_hits == longest_hit(kv, request), f"{request}: a hit of {num_hits} tokens"
        return hits, num_hits

    kv.get_computed_blocks = checked  # type: ignore[method-assign]


def longest_hit(kv: KVCacheManager, request: Any) -> int:
    """Return the longest hit by trying every length."""
    if not kv.pool.enable_caching or request.skip_reading_prefix_cache:
        return 0
    cached, groups = {key for key, _ in kv.pool.cached_block_hash_to_block.blocks()}, kv.layout.groups
    unit = lcm(*(group.block_size for group in groups))

    def is_usable(length: int, number: int, group: KVGroup) -> bool:
        first = first_read(group, length)
        last = {position // group.block_size for position in range(first, length)}
        ends = [(index + 1) * group.block_size // kv.block_size - 1 for index in last]
        return all(group_key(request.block_hashes[end], number) in cached for end in ends)

    lengths = range((request.num_tokens - 1) // unit * unit, 0, -unit)
    fits = (n for n in lengths if all(is_usable(n, number, group) for number, group in enumerate(groups)))
    kept = (n for n in fits if kv.states is None or kv.states.longest(request.block_hashes, n) == n)
    return next(kept, 0)


def check_replays(process: "SimScheduler", seed: int) -> None:
    """Check that a scheduler without steady decode decides the same, and so does one that continues from the keyframe:
    with tokens, or from the lines of a trace, which have none. Raises Violation."""
    if (found := recorded(process)) is None:
        return
    header, records = found
    # Steady decode takes the blocks of many requests at once. Where content of a program is kept, those that windows
    # have just left come before it, so that a scheduler that takes them one by one uses other blocks.
    windows = any(group.kind != "full_attention" for group in header.kv_layout.groups)
    plain = None if header.config.uses_programs and windows else plain_scheduler(header)
    if plain is not None:
        check_hits(plain.kv)
    if difference := replay(header, records, beside=plain):
        raise Violation(f"other decisions without steady decode: {difference}")
    tail = next((records[at:] for at, each in enumerate(records) if each.kind == RecordKind.KEYFRAME), [])
    if not tail:
        return
    if seed % 2:
        difference = replay(header, tail)
    else:
        lines = [decode_line(encode_line(line)) for line in record_log(header, tail)]
        difference = replay_lines(numbered(lines))
    if difference:
        raise Violation(f"other decisions behind the keyframe: {difference}")

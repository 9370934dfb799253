"""A Scheduler at an idle moment: what is left of all that happened, so that a replay can begin there."""

import msgspec
import numpy as np

from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.kv.block_hash import SHORT_HASH_BYTES

PAUSES = ("", "pause_new", "pause")


class IdleState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that decides later on, while no request lives and no step is in flight.

    Counters of statistics are no part of it, and neither is what drafts have taught: with drafts there is no such
    state.

    Attributes:
        step: the last one decided.
        stale_until: results of steps up to this one are not applied.
        max_num_batched_tokens: less than configured once steps were halved.
        rows: handles of the last result that told any: the next one may mean them.
        removed: handles that the next diff removes.
        retired: handles that cannot be given again before that one is answered.
        free_blocks: all blocks but the null block, the next to be reused first.
        cached: (block, key) of each content that can be found; of equal keys the block that is found first, first.
        tenants: of a pool that is shared fairly: whose the last of the free blocks are; see ``FairFreeQueue.tenants``.
    """

    step: int
    stale_until: int
    max_num_batched_tokens: int
    pause: str = ""
    rows: list[int] = []
    removed: list[int] = []
    retired: list[int] = []
    free_blocks: list[int]
    cached: list[tuple[int, bytes]] = []
    tenants: list[tuple[int, int, int]] = []


_decoder = msgspec.msgpack.Decoder(IdleState)


def idle_state(scheduler: Scheduler) -> IdleState | None:
    """None where there is none: somebody lives, a step is in flight, or there are drafts. O(blocks)."""
    if not scheduler.is_idle or scheduler.config.num_speculative_tokens:
        return None
    removed, retired = scheduler.table.ended_handles
    pool = scheduler.kv.pool
    return IdleState(
        step=scheduler.last_step,
        stale_until=scheduler.results.stale_until,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        pause=scheduler.pause,
        rows=scheduler.in_flight.handles.tolist(),
        removed=removed,
        retired=retired,
        free_blocks=[block.block_id for block in pool.free_block_queue.blocks()],
        cached=pool.contents(),
        tenants=pool.left_by_tenant(),
    )


def restore(scheduler: Scheduler, state: IdleState) -> None:
    """Bring ``scheduler``, to which nothing has happened yet, to ``state``.

    Raises:
        ValueError: no Scheduler with its configuration can be in that state; it is of no use any more.
        OverflowError: some handle is no int32.
    """
    config = scheduler.config
    if not -1 <= state.stale_until <= state.step:
        raise ValueError(f"step {state.step}, and results up to {state.stale_until} are stale")
    if not config.max_num_seqs <= state.max_num_batched_tokens <= config.max_num_batched_tokens:
        raise ValueError(f"max_num_batched_tokens cannot be {state.max_num_batched_tokens}")
    if state.pause not in PAUSES or config.num_speculative_tokens:
        raise ValueError(f"a pause {state.pause!r} with {config.num_speculative_tokens} drafts")
    scheduler.config = msgspec.structs.replace(config, max_num_batched_tokens=state.max_num_batched_tokens)
    scheduler.pause = state.pause
    scheduler.results.stale_until = state.stale_until
    scheduler.in_flight.set_handles(np.array(state.rows, np.int32))
    scheduler.table.restore(state.removed, state.retired)
    scheduler.kv.pool.restore(state.free_blocks, state.cached, state.tenants)
    scheduler.resume_after(state.step)


def encode_state(state: IdleState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> IdleState:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)


def with_short_names(state: IdleState, hash_bytes: int) -> IdleState:
    """As a line has it. ``hash_bytes``: length of a whole name; what a key has beyond it is the group."""
    cached = [(block, key[:SHORT_HASH_BYTES] + key[hash_bytes:]) for block, key in state.cached]
    return msgspec.structs.replace(state, cached=cached)

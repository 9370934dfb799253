"""The state of an idle Scheduler, from which a replay can start."""

import msgspec
import numpy as np

from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.kv.block_hash import SHORT_HASH_BYTES

PAUSES = ("", "pause_new", "pause")


class IdleState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that affects later decisions while there are no requests and no steps in flight.

    Statistics counters are not included. With speculative decoding no keyframe exists, because the draft policy
    learns from results.

    Attributes:
        step: the last step decided.
        stale_until: results of steps up to this one are ignored.
        max_num_batched_tokens: less than configured after the token budget was halved.
        rows: handles of the last result that listed them; the next result may refer to them.
        removed: handles that the next diff removes.
        retired: handles that cannot be reused before the result of that diff.
        free_blocks: all blocks but the null block, in reuse order.
        cached: (block, key) of each cached content; blocks with equal keys in lookup order.
        tenants: owners of the last free blocks in a fairly shared pool; see ``FairFreeQueue.tenants``.
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
    """Return the state; None when requests exist, a step is in flight, or drafts are enabled. O(blocks)."""
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
    """Bring an unused ``scheduler`` to ``state``.

    Raises:
        ValueError: the state is impossible for this configuration. The Scheduler must be discarded.
        OverflowError: a handle is not an int32.
    """
    config = scheduler.config
    if not -1 <= state.stale_until <= state.step:
        raise ValueError(
            f"invalid keyframe: stale_until must be between -1 and step {state.step} (got {state.stale_until})"
        )
    if not config.max_num_seqs <= state.max_num_batched_tokens <= config.max_num_batched_tokens:
        raise ValueError(f"invalid keyframe: max_num_batched_tokens is {state.max_num_batched_tokens}")
    if state.pause not in PAUSES or config.num_speculative_tokens:
        raise ValueError(f"invalid keyframe: pause {state.pause!r} with {config.num_speculative_tokens} draft tokens")
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


def with_short_hashes(state: IdleState, hash_bytes: int) -> IdleState:
    """Return the state with cut hashes, as in a trace line.

    ``hash_bytes``: length of a whole hash; the rest of a key is the group.
    """
    cached = [(block, key[:SHORT_HASH_BYTES] + key[hash_bytes:]) for block, key in state.cached]
    return msgspec.structs.replace(state, cached=cached)

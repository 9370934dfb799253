"""The state of an idle Scheduler, from which a replay can start."""

import msgspec
import numpy as np

from quire.protocol.block_hash import SHORT_HASH_BYTES
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.costs.costs import CostState
from quire.scheduler_proc.programs.pins import PinsState
from quire.scheduler_proc.programs.programs import ProgramRecord, ProgramsState

PAUSES = ("", "pause_new", "pause")


class PagesState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pages of a tier, as of a pool of blocks, while no transfer is in flight.

    Attributes:
        free_pages: all pages but page 0, in reuse order.
        cached: (page, key) of each content.
        tenants: as in IdleState.
        is_open: see ``Tier``.
        num_safe, num_failures, retry_at: see ``Route``.
    """

    free_pages: list[int]
    cached: list[tuple[int, bytes]] = []
    tenants: list[tuple[int, int, int]] = []
    is_open: bool = True
    num_safe: int = 0
    num_failures: int = 0
    retry_at: int = 0


class TiersState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tiers behind the device while no transfer is in flight.

    Attributes:
        last_transfer: number of the newest transfer.
        forgotten: see ``DiskTier``.
        stores_yield_at: see ``Transfers.restore``.
        costs: what was learned.
    """

    pages: list[PagesState]
    last_transfer: int = 0
    forgotten: int = 0
    stores_yield_at: int = -1
    costs: CostState = CostState()


class AdaptersState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapters while no load is in flight.

    Attributes:
        last_number: number of the newest adapter.
        places: (number, adapter, slot or -1, last step that used it) of those in host memory.
        dropped: numbers of those whose copies the next load drops.
    """

    last_number: int
    places: list[tuple[int, AdapterRef, int, int]] = []
    dropped: list[int] = []


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
        releases: with pins, the releases of the last free blocks; see ``PinnedFreeQueue.left``.
        tiers: the tiers behind the device; None without any.
        adapters: None without LoRA adapters.
        programs: the known programs; None if no policy needs them.
        last_number: number of the newest request, if there are programs.
        pins: blocks kept while tools run, and what was learned for them; None if the policy keeps none.
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
    tiers: TiersState | None = None
    adapters: AdaptersState | None = None
    releases: list[tuple[int, int, int]] = []
    pins: PinsState | None = None
    programs: ProgramsState | None = None
    last_number: int = 0


_decoder = msgspec.msgpack.Decoder(IdleState)


def idle_state(scheduler: Scheduler) -> IdleState | None:
    """Return the state; None when requests exist, a step is in flight, or a policy learns too much. O(blocks)."""
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
        tiers=_tiers_state(scheduler) if scheduler.kv.tiers else None,
        adapters=_adapters_state(scheduler) if scheduler.config.enable_lora else None,
        releases=pool.left_by_release(),
        pins=scheduler.programs.pins.state if scheduler.programs.pins.is_enabled else None,
        programs=scheduler.programs.state if scheduler.programs.is_enabled else None,
        last_number=scheduler.table.last_number if scheduler.programs.is_enabled else 0,
    )


def _adapters_state(scheduler: Scheduler) -> AdaptersState:
    slots = scheduler.adapters.slots
    return AdaptersState(last_number=slots.last_number, places=slots.state, dropped=slots.dropped.copy())


def _tiers_state(scheduler: Scheduler) -> TiersState:
    last, routes, yield_at = scheduler.transfers.state
    disk = scheduler.kv.disk
    pages = [
        PagesState(
            free_pages=[page.block_id for page in tier.pages.free_block_queue.blocks()],
            cached=tier.pages.contents(),
            tenants=tier.pages.left_by_tenant(),
            is_open=tier.is_open,
            num_safe=num_safe,
            num_failures=num_failures,
            retry_at=retry_at,
        )
        for tier, (num_safe, num_failures, retry_at) in zip(scheduler.kv.tiers, routes, strict=True)
    ]
    forgotten = 0 if disk is None else disk.forgotten
    return TiersState(
        pages=pages,
        last_transfer=last,
        forgotten=forgotten,
        stores_yield_at=yield_at,
        costs=scheduler.transfers.costs.state,
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
        drafts = f"{config.num_speculative_tokens} draft tokens"
        raise ValueError(f"invalid keyframe: pause {state.pause!r} with {drafts}")
    scheduler.config = msgspec.structs.replace(config, max_num_batched_tokens=state.max_num_batched_tokens)
    scheduler.pause = state.pause
    scheduler.results.stale_until = state.stale_until
    scheduler.in_flight.set_handles(np.array(state.rows, np.int32))
    scheduler.table.restore(state.removed, state.retired)
    scheduler.kv.pool.restore(state.free_blocks, state.cached, state.tenants, state.releases)
    _restore_tiers(scheduler, TiersState(pages=[]) if state.tiers is None else state.tiers)
    if state.adapters is not None:
        if not config.enable_lora:
            raise ValueError("invalid keyframe: it has adapters, and the header disables them")
        known = state.adapters
        scheduler.adapters.slots.restore(known.last_number, known.places, known.dropped)
    if state.programs is not None:
        if not scheduler.programs.is_enabled:
            raise ValueError("invalid keyframe: it has programs, and no policy of the header needs them")
        scheduler.programs.restore(state.programs)
        scheduler.table.last_number = state.last_number
    if state.pins is not None:
        if not scheduler.programs.pins.is_enabled:
            raise ValueError("invalid keyframe: it has pins, and the policy of the header keeps none")
        scheduler.programs.pins.restore(state.pins)
    scheduler.resume_after(state.step)


def _restore_tiers(scheduler: Scheduler, state: TiersState) -> None:
    tiers = scheduler.kv.tiers
    if len(tiers) != len(state.pages):
        raise ValueError(f"invalid keyframe: it has {len(state.pages)} tiers, and the header has {len(tiers)}")
    for tier, pages in zip(tiers, state.pages, strict=True):
        tier.pages.restore(pages.free_pages, pages.cached, pages.tenants)
        tier.is_open = pages.is_open
    if scheduler.kv.disk is not None:
        scheduler.kv.disk.forgotten = state.forgotten
    routes = [(pages.num_safe, pages.num_failures, pages.retry_at) for pages in state.pages]
    scheduler.transfers.restore(state.last_transfer, routes, state.stores_yield_at)
    scheduler.transfers.costs.restore(state.costs)


def encode_state(state: IdleState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> IdleState:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)


def with_short_hashes(state: IdleState, hash_bytes: int) -> IdleState:
    """Return the state with cut hashes, as in a trace line.

    ``hash_bytes``: length of a whole hash; the rest of a key is the group.
    """

    def short(contents: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        return [(block, key[:SHORT_HASH_BYTES] + key[hash_bytes:]) for block, key in contents]

    tiers = state.tiers
    if tiers is not None:
        pages = [msgspec.structs.replace(each, cached=short(each.cached)) for each in tiers.pages]
        tiers = msgspec.structs.replace(tiers, pages=pages)
    programs = state.programs
    if programs is not None:
        programs = msgspec.structs.replace(programs, known=[_with_short_trail(each) for each in programs.known])
    return msgspec.structs.replace(state, cached=short(state.cached), tiers=tiers, programs=programs)


def _with_short_trail(program: ProgramRecord) -> ProgramRecord:
    trail = program.trail
    if trail is None:
        return program
    kept, moving = (
        [(name[:SHORT_HASH_BYTES], depth, is_common) for name, depth, is_common in names]
        for names in (trail.kept, trail.moving)
    )
    return msgspec.structs.replace(program, trail=msgspec.structs.replace(trail, kept=kept, moving=moving))

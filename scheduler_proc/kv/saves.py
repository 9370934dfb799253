"""Copies of contents to the next tier, before they are evicted: which are made, and what each holds until it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.protocol.block_hash import split_key, split_keys
from quire.protocol.config import EngineConfig
from quire.protocol.wire.transfer_messages import BlocksMoved, MoveBlocks, MoveKind
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.holds import Holds
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.states import StateSlots
from quire.scheduler_proc.kv.store_choice import StoreChoice
from quire.scheduler_proc.kv.tiers import Tier

MAX_FAILURES = 3
"""Copies to a tier that fail as a whole, one after the other, after which nothing is copied there for a while."""
RETRY_STEPS = 10_000
"""Steps after the last failure before the next copy."""
RETRY_BLOCKS = 16
"""Most blocks of that copy."""


class Numbers:
    """Numbers of transfers. They grow, also over restarts of the engine if there is a disk.

    Attributes:
        last: number of the newest transfer.
    """

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        self.last += 1
        return self.last


def move_blocks(
    number: int,
    kind: MoveKind,
    blocks: list[int],
    tiers: Sequence[Tier],
    pages: Sequence[KVCacheBlock],
    keys: Sequence[bytes],
) -> MoveBlocks:
    """Return the message of a transfer. ``blocks``: ids. ``tiers``: those of the pages."""
    hashes, groups = split_keys(keys)
    ids = np.array([page.block_id for page in pages], np.int32)
    generations = np.zeros(len(ids), np.int64)
    distinct = set(tiers)
    for tier in distinct:
        of_tier = np.array([each is tier for each in tiers]) if len(distinct) > 1 else slice(None)
        generations[of_tier] = tier.generations[ids[of_tier]]
        ids[of_tier] += tier.first_id
    return MoveBlocks(
        number,
        kind,
        np.array(blocks, np.int32),
        ids,
        generations,
        hashes,
        None if groups is None else np.array(groups, np.int32),
    )


class SaveRoute:
    """The way from a pool to the tier that keeps what the pool evicts.

    Attributes:
        source: the tier of the pool, or None for the device.
        states: the owner of the pool if its blocks are slots of states.
        num_open: blocks that are being copied.
        num_failures: whole copies that have failed since the last one that did not.
        retry_at: if these are too many, the step before which no copy begins.
    """

    def __init__(
        self,
        pool: BlockPool,
        holds: Holds,
        target: Tier,
        choice: StoreChoice,
        source: Tier | None,
        states: StateSlots | None = None,
    ) -> None:
        self.pool, self.holds, self.target, self.choice, self.source = pool, holds, target, choice, source
        self.states = states
        self.num_open = self.num_failures = self.retry_at = 0
        self.num_saved = self.num_failed = 0
        self.seconds = 0.0

    @property
    def num_pages(self) -> int:
        """Pages of one block."""
        return 1 if self.states is None else self.states.num_parts

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is copied, because all of the last copies have failed."""
        return self.num_failures >= MAX_FAILURES

    def answered(self, num_failed: int, count: int, seconds: float, step: int) -> None:
        """Count the end of a copy of ``count`` blocks, at ``step``."""
        self.num_failed += num_failed
        self.num_saved += count - num_failed
        self.seconds += seconds
        self.num_failures = self.num_failures + 1 if num_failed == count else 0
        if self.is_stopped:
            self.retry_at = step + RETRY_STEPS


@dataclass(slots=True, eq=False)
class Save:
    """A copy that was decided and is not complete.

    Attributes:
        blocks: sources.
        pages, keys: targets, ``num_pages`` of the route for each block, and their contents.
        hold: number of the hold of the sources.
        after_step: the newest step when it was decided.
        answered: if the step that wrote a content is not answered: the indices that failed.
    """

    number: int
    route: SaveRoute
    blocks: list[KVCacheBlock]
    pages: list[KVCacheBlock]
    keys: list[bytes]
    hold: int
    after_step: int
    answered: frozenset[int] | None = None

    @property
    def names(self) -> list[bytes]:
        """The contents of the sources."""
        if self.route.states is None:
            return self.keys
        return [split_key(key)[0] for key in self.keys[:: self.route.num_pages]]


class Saves:
    """Decides and follows copies from the device to the first tier (*stores*), and on to the disk (*demotions*).

    Invariants (``check``): a source is held and its page is not findable before every rank has answered, and before the
    step that wrote it is answered. Only contents of answered steps are copied to disk, where an engine finds them after
    any failure.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager, numbers: Numbers) -> None:
        self._numbers = numbers
        self._open: dict[int, Save] = {}
        self._unsent: list[Save] = []
        """Those to disk that wait for the result of the step that wrote their content."""
        self._messages: list[MoveBlocks] = []
        of_a_step = -(-config.max_num_batched_tokens // kv.block_size) * len(kv.coordinator.managers)
        self.routes: list[SaveRoute] = []
        # Each tier is filled from the one before it, so contents move down one step at a time and nothing is written to
        # disk that host memory would have kept.
        source: Tier | None = None
        for target in kv.tiers:
            pool = kv.pool if source is None else source.pages
            holds = kv.holds if source is None else Holds(pool)
            # A disk may stop answering for seconds, and its sources on the device stay held meanwhile. A quarter of the
            # pool is what requests can do without.
            most_held = 0.25 if source is None and target.is_slow else 0.5
            choice = StoreChoice(pool, target, of_a_step, config.pipeline_depth, most_held)
            self.routes.append(SaveRoute(pool, holds, target, choice, source))
            states = kv.states if source is None else None
            # In a tier with room for one state only, each would evict the one before it, and all blocks.
            if states is not None and target.pages.num_usable_blocks >= 2 * states.num_parts:
                # Each prompt takes a slot to compute in, and one for its checkpoint.
                slots = 2 * min(config.max_num_seqs, -(-config.max_num_batched_tokens // states.grid))
                choice = StoreChoice(states.pool, target, slots, config.pipeline_depth, most_held, states)
                self.routes.append(SaveRoute(states.pool, states.holds, target, choice, None, states))
            source = target

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    @property
    def delays_requests(self) -> bool:
        """Whether copies in flight hold blocks of the device that a request may wait for."""
        return any(route.num_open for route in self.routes if route.source is None and not route.target.is_slow)

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until a copy is answered, or a block is allocated or freed."""
        if self._unsent or any(save.answered is not None for save in self._open.values()):
            return False
        return not any(route.target.is_open and not route.choice.is_settled(route.num_open) for route in self.routes)

    def take(self) -> list[MoveBlocks]:
        """Return and clear the messages to send, after the step that was planned with them."""
        messages, self._messages = self._messages, []
        return messages

    def plan(self, sent: int, acknowledged: int) -> list[Save]:
        """Begin to save contents that will soon be evicted.

        Args:
            sent, acknowledged: numbers of the newest step sent and of the newest step answered.
        """
        planned = [save for route in self.routes if (save := self._begin(route, sent)) is not None]
        for save in planned:
            if save.route.source is None and save.route.target.is_slow and save.after_step > acknowledged:
                # A disk outlives this engine: a content of a step that fails after all would be found by the next one.
                # Host memory ends with the engine, so that its copies may begin at once, and only the *name* of the
                # page waits for the result (``answered``).
                self._unsent.append(save)
            else:
                self._send(save)
        return planned

    def _begin(self, route: SaveRoute, sent: int) -> Save | None:
        target = route.target
        if not target.is_open or (route.is_stopped and sent < route.retry_at):
            return None
        if not (chosen := route.choice.choose(route.num_open)):
            return None
        if route.is_stopped:
            # One small copy after a long while finds out whether a full or broken disk works again. A large one would
            # hold many blocks for an answer that is probably no.
            route.retry_at = sent + RETRY_STEPS
            chosen = chosen[: max(RETRY_BLOCKS // route.num_pages, 1)]
        # All pages of a block, or none: fewer would evict others and could not be used.
        chosen = chosen[: target.pages.num_free_blocks // route.num_pages]
        pages = target.take([route.pool.owner_of(block) for block, _ in chosen for _ in range(route.num_pages)])
        if not pages:
            return None
        blocks, names = map(list, zip(*chosen, strict=True))
        keys = names if route.states is None else list(chain.from_iterable(map(route.states.page_keys, names)))
        number = self._numbers.next()
        ids = [page.block_id for page in pages]
        source = route.source
        # A demotion keeps the generation of its content, because workers compare the page's header with it, and the
        # bytes are copied as they are.
        target.generations[ids] = number if source is None else source.generations[[b.block_id for b in blocks]]
        save = Save(number, route, blocks, pages, keys, route.holds.hold_sources(blocks), sent)
        route.num_open += len(blocks)
        self._open[number] = save
        return save

    def _send(self, save: Save) -> None:
        kind, first = MoveKind.STORE, 0
        if save.route.source is not None:
            kind, first = MoveKind.DEMOTE, save.route.source.first_id
        target = save.route.target
        ids = [first + block.block_id for block in save.blocks for _ in range(save.route.num_pages)]
        self._messages.append(move_blocks(save.number, kind, ids, [target] * len(ids), save.pages, save.keys))

    def moved(self, answer: BlocksMoved, acknowledged: int) -> bool:
        """Apply the answer of all ranks. Returns False, without any effect, if it cannot be the answer."""
        save, failed = self._open[answer.transfer], frozenset(answer.failed)
        if save.answered is not None or save in self._unsent or not failed <= set(range(len(save.pages))):
            return False
        route = save.route
        route.answered(len(failed), len(save.pages), answer.seconds, acknowledged)
        # The copy ended before the result of the step that wrote the content. If that step is void, its blocks lose
        # their keys, and the page must not have been named in between.
        if route.source is None and save.after_step > acknowledged:
            save.answered = failed
        else:
            self._complete(save, failed)
        return True

    def acknowledged(self, step: int) -> None:
        """Complete, or send, what only waited for the result of the step that wrote its content."""
        for save in [save for save in self._open.values() if save.answered is not None and save.after_step <= step]:
            assert save.answered is not None
            self._complete(save, save.answered)
        while self._unsent and self._unsent[0].after_step <= step:
            self._send(self._unsent.pop(0))

    def _complete(self, save: Save, failed: frozenset[int]) -> None:
        """Name the pages, except those whose source has lost its key: its content was invalidated."""
        route = save.route
        self._remove(save)
        pages, keys, bad = save.pages, save.keys, []
        # A content may have been invalidated while it was copied, for example because its logits were not finite. The
        # source lost its key then, and the copy must not bring the content back under it.
        if failed or [block.block_hash for block in save.blocks] != save.names:
            each = route.num_pages
            lost = {at // each for at in failed}
            lost |= {at for at, name in enumerate(save.names) if save.blocks[at].block_hash != name}
            good = [at for at in range(len(pages)) if at // each not in lost]
            bad = [pages[at] for at in sorted(set(range(len(pages))) - set(good))]
            pages, keys = [pages[at] for at in good], [keys[at] for at in good]
        route.target.publish(pages, keys)
        route.target.discard(bad)
        route.holds.end(save.hold)
        route.choice.stored(len(pages) // route.num_pages)

    def _remove(self, save: Save) -> None:
        del self._open[save.number]
        save.route.num_open -= len(save.blocks)

    def begin_epoch(self, *, new_workers: bool) -> None:
        """End what no message will end: all with new workers, otherwise what waits for the result of a step."""
        for save in list(self._open.values()):
            # With the same workers, copies in flight go on and will be answered. Those that only waited for the result
            # of a step wait in vain: the new epoch has voided that step.
            if new_workers or save.answered is not None or save in self._unsent:
                self._remove(save)
                save.route.target.discard(save.pages)
                save.route.holds.end(save.hold)
        self._unsent = []
        if new_workers:
            self._messages = []

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for route in self.routes:
            saves = [save for save in self._open.values() if save.route is route]
            num_open = sum(len(save.blocks) for save in saves)
            assert num_open == route.num_open, f"{num_open} blocks are saved, {route.num_open} counted"
            assert route.target.is_open or not saves, "contents are saved to pages that cannot be used"
            if route.source is not None:
                assert len(route.holds) == len(saves), "a hold of pages without its transfer"
        for save in self._open.values():
            assert len(save.blocks) * save.route.num_pages == len(save.pages), "another number of pages than of parts"
            for block in save.blocks:
                assert block.ref_cnt > 0, f"{block!r} is copied but not held"
            for page in save.pages:
                assert page.block_hash is None, f"{page!r} is named before it is written"

    def holders(self, tier: Tier) -> list[list[KVCacheBlock]]:
        """Return what copies hold of the pages of a tier."""
        held = [save.pages for save in self._open.values() if save.route.target is tier]
        return held + [blocks for route in self.routes if route.source is tier for blocks in route.holds.holders()]

    def num_holds(self, holds: Holds) -> int:
        """Return how many of these holds are those of sources."""
        return sum(save.route.holds is holds for save in self._open.values())

"""Copies of blocks between the device and the tiers behind it: loads for waiting requests, and saves."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from quire.protocol.block_hash import split_key
from quire.protocol.wire.front_end_messages import Statistics, TierState
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, MoveBlocks, MoveKind
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler
from quire.scheduler_proc.costs.choice import LoadChoice, Prefix, WorkAhead, choose
from quire.scheduler_proc.costs.costs import FULL_PAGES, Costs, Prefill
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.found import FoundContents, find_contents
from quire.scheduler_proc.kv.saves import Numbers, Saves, move_blocks
from quire.scheduler_proc.kv.tiers import Tier
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.events import HostMemory, LoadLate
from quire.scheduler_proc.requests.reasons import Decision, PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestPart, RequestStatus

CHOICE = RequestPart[LoadChoice | None]("choice", None)
"""Whether to load the part of a prefix that only tiers have, until the request was admitted with that part."""
SPLIT_AT = RequestPart("split_at", 0)
"""Position up to which a request computes while the rest of its cached prefix is loaded; 0 if nothing is."""
BEYOND_ALL = 2**40
"""Added to the number of the newest transfer, it is greater than that of any content on disk."""


@dataclass(slots=True)
class Load:
    """A load that was decided and is not answered.

    Attributes:
        blocks: targets on the device, one per page; they have no key before the load is answered. The last
            ``num_parts`` are one slot for the parts of a state.
        pages: sources, with the tier of each.
        keys: content of each page.
        hold: number of the hold of the device's blocks.
        choice: why it was decided.
        request: the request that waits; None when it no longer does, and if the load is a probe.
        is_late: whether it took too long, so that no request waits for it.
        is_void: contents were dropped meanwhile, so that the blocks are not named.
    """

    number: int
    blocks: list[KVCacheBlock]
    pages: list[tuple[Tier, KVCacheBlock]]
    keys: list[bytes]
    hold: int
    choice: LoadChoice
    state_hold: int = 0
    num_parts: int = 0
    request: Request | None = None
    is_late: bool = False
    is_void: bool = False


class LoadCounts:
    """Totals of a tier's loads since start, as in TierState."""

    def __init__(self) -> None:
        self.num_loaded = self.num_failed = self.num_late = 0
        self.seconds = 0.0


class Transfers(Feature):
    """Decides transfers and follows them. Without a tier behind the device it does nothing.

    *Saves* copy what is about to be evicted to the next tier. *Loads* copy the pages that continue the cached prefix of
    a waiting request to new blocks. Meanwhile the request is held (WaitReason.LOADING). When the load is answered its
    blocks are named, and kept until the request is admitted, which then finds them in the prefix cache. If the request
    is *split*, it runs meanwhile, up to ``SPLIT_AT``, where the load begins. Then it returns to the queue, and
    is held until the load is answered.

    Invariants (``check``): a page is held while it is read. A target is held and not findable before every rank has
    answered. Each transfer ends by its answer or with its workers, also if its request ends first.
    """

    name = "transfers"

    def __init__(self, core: Core, costs: Costs) -> None:
        config, kv = core.config, core.kv
        self._core, self._table, self._kv, self._clock = core, core.table, kv, core.clock
        self._decisions = core.decisions
        self._numbers = Numbers(0 if kv.disk is None else kv.disk.forgotten)
        self._saves = Saves(config, kv, self._numbers)
        self._open: dict[int, Load] = {}
        self._loading: dict[int, Load] = {}
        """Loads by the handle of the request that waits for them."""
        self._late: set[int] = set()
        """Handles of requests whose load was late: they compute what the device does not have."""
        self.costs = costs
        self.is_enabled = bool(kv.tiers) or config.scheduling_policy == "continuum"  # whose pins use the costs too
        self._choice: tuple[int, LoadChoice] | None = None
        """Handle of the request that is being admitted, and what was chosen for it, unless it is held."""
        self._can_split = kv.can_split and config.enable_chunked_prefill
        self._num_late_open = 0
        """Loads that are late and not answered. Meanwhile no load begins, because it may take as long."""
        self._loads: list[MoveBlocks] = []
        self._counts = {tier.name: LoadCounts() for tier in kv.tiers}
        self._stores_yield_at = -1
        """None begin up to this step, because a request lacked the blocks of stores in flight."""

    def __len__(self) -> int:
        """Number of transfers that are not answered, or hold blocks."""
        return len(self._open) + len(self._saves)

    def is_busy(self) -> bool:
        return len(self) > 0

    def consumes(self) -> Mapping[type, Handler]:
        return {
            BlocksMoved: self.moved,
            DiskContents: self._open_tier,
            HostMemory: self._open_tier,
            LoadLate: self._release_late,
        }

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until a transfer is answered, or a block is allocated or freed."""
        return self._saves.is_settled

    def take_loads(self) -> list[MoveBlocks]:
        """Return and clear the loads to send, before the step that was planned with them."""
        loads, self._loads = self._loads, []
        return loads

    def take_stores(self) -> list[MoveBlocks]:
        """Return and clear the stores and demotions to send, after the step that was planned with them."""
        return self._saves.take()

    # ---- loads

    def hits(
        self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int
    ) -> WaitReason | int | None:
        """Decide whether a waiting request loads what continues its hits. If it does, the load begins and it is held.

        Returns where the load begins if the request is to compute up to there meanwhile.
        """
        choice = self._choose(request, hits, num_hit_tokens, step_tokens)
        self._choice = None if choice is None else (request.handle, choice)
        if choice is None:
            return None
        return WaitReason.LOADING if choice.kind == "load" else choice.front

    def _choose(self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int) -> LoadChoice | None:
        """Return None if no page continues the hits, or the free blocks do not suffice for all known tokens."""
        if self._join(request):
            return LoadChoice("load")
        kv = self._kv
        # A load that is late shows that the tier does not answer. Others would wait for it too, each until its own
        # limit.
        if not kv.tiers or self._num_late_open or request.handle in self._late:
            return None
        found = find_contents(kv, request)
        fits = found.fits(kv) and kv.can_fit_full_sequence(request, request.num_tokens, hits)
        if found.num_tokens <= num_hit_tokens or not fits:
            return None
        pages = found.by_tier()
        block_size = kv.block_size if self._can_split else 0
        prefix = Prefix(num_hit_tokens, found.num_tokens, request.num_tokens, pages, block_size)
        prefills, num_others = self._prefills()
        load_seconds = sum(load.choice.pages_seconds for load in self._open.values())
        choice = choose(self.costs, prefix, WorkAhead(prefills, step_tokens, num_others, load_seconds))
        CHOICE.put(request, choice._replace(found=prefix))
        if choice.kind == "load":
            self._begin_load(request, found, choice)
            self._table.hold(request, WaitReason.LOADING)
            detail = f"{found.num_tokens - num_hit_tokens:,} tokens from {' and '.join(pages)}; {choice}"
            self._note("wait", request, WaitReason.LOADING, len(found.pages), detail)
        return choice

    def _prefills(self) -> tuple[Prefill, int]:
        """Return what running requests have to prefill, and the number of the other ones. O(unsteady)."""
        found = [request for request in self._table.unsteady.values() if request.num_tokens_to_compute > 1]
        parts = (Prefill.between(r.num_computed_tokens, SPLIT_AT.of(r) or r.num_tokens) for r in found)
        return sum(parts, Prefill()), len(self._table.running) - len(found)

    def version(self, request: Request) -> object:
        """What the tiers hold counts, and whether loads may begin. What a load takes is learned in each step and does
        not count: requests that wait for blocks would be looked at in each step."""
        changes = [tier.pages.num_changes for tier in self._kv.tiers]
        return (*changes, self._num_late_open, request.handle in self._late) if changes else ()

    def admitted(self, request: Request, num_hit_tokens: int, *, is_first: bool) -> None:
        """Count a choice other than to load; if it was to split, begin the load.

        Before hashes of the request are published: it looks for what the device lacks.
        """
        split_at = SPLIT_AT.of(request)
        if not is_first and split_at and num_hit_tokens > split_at:
            loaded = num_hit_tokens - split_at  # while it computed the tokens before
            request.num_cached_tokens += loaded
            self._core.stats.prefix_cache_hit_tokens += loaded
            self._table.waiting.charge_for(request, -loaded)
        SPLIT_AT.put(request, 0)
        chosen, self._choice = self._choice, None
        choice = chosen[1] if chosen is not None and chosen[0] == request.handle else None
        if choice is not None and choice.kind == "split":
            found = find_contents(self._kv, request, choice.front // self._kv.block_size)
            if found.fits(self._kv):
                self._begin_load(request, found, choice)
                SPLIT_AT.put(request, choice.front)
                self._note("choose", request, "split", len(found.pages), str(choice))
                return
        CHOICE.put(request, None)
        if choice is None:
            return
        most = min(FULL_PAGES, max(self._kv.pool.num_free_blocks // 2, 1))
        if self.costs.avoids_load() and (found := find_contents(self._kv, request).last(most)).fits(self._kv):
            self._load(found, LoadChoice("load"), request.account)
        self._note("choose", request, "compute", 0, str(choice))

    def _join(self, request: Request) -> bool:
        """Hold a waiting request for its load, if that began while it ran. Returns whether it is held."""
        if request.handle not in self._loading:
            return False
        self._table.hold(request, WaitReason.LOADING)
        return True

    def _begin_load(self, request: Request, found: FoundContents, choice: LoadChoice) -> None:
        load = self._load(found, choice, request.account)
        load.request, self._loading[request.handle] = request, load
        self.costs.num_avoided = 0

    def _load(self, found: FoundContents, choice: LoadChoice, account: int) -> Load:
        kv = self._kv
        # The hits on the device are held with the targets: they come before what is loaded, which would be useless
        # without them.
        hold, targets = kv.holds.hold_targets(found.cached, found.num_blocks, account)
        state_hold = 0
        if kv.states is not None:
            state_hold, slots = kv.states.holds.hold_targets(found.states, found.num_parts > 0, account)
            targets = targets + slots * found.num_parts
        tiers, pages = zip(*found.pages, strict=True)
        for tier in kv.tiers:
            # A page that is read must not be filled with another content meanwhile.
            tier.pages.touch(page for of, page in found.pages if of is tier)
        number = self._numbers.next()
        load = Load(number, targets, found.pages, found.keys, hold, choice, state_hold, found.num_parts)
        self._open[load.number] = load
        ids = [block.block_id for block in targets]
        self._loads.append(move_blocks(load.number, MoveKind.LOAD, ids, tiers, pages, found.keys))
        return load

    def load_limit(self, number: int) -> float:
        """Return the seconds after which a load in flight is late."""
        return self._open[number].choice.limit_s

    def _note(self, kind: str, request: Request, reason: str, num_blocks: int, detail: str) -> None:
        step = self._clock.sent + 1
        self._decisions.note(Decision(step, kind, request.request_id, reason, "", num_blocks, 0, detail))

    def stop_waiting(self, request: Request) -> None:
        """What is loaded for the request will be cached."""
        if request.handle in self._loading:
            SPLIT_AT.put(request, 0)
            CHOICE.put(request, None)
            self._end_wait(request)

    def _end_wait(self, request: Request) -> None:
        self._loading.pop(request.handle).request = None
        if request.wait_reason is WaitReason.LOADING:
            self._table.release(request)

    def ending(self, request: Request) -> None:
        self.stop_waiting(request)
        self._late.discard(request.handle)
        self._kv.holds.end_kept(request.handle)

    def _release_late(self, event: LoadLate, client: int) -> None:
        """Let the request of a load compute what has not arrived in time. What arrives later is cached."""
        load = self._open.get(event.transfer)
        if load is None or load.is_late:
            self._core.stats.num_stray_messages += 1
            return
        if load.request is not None:
            # Remembered until the request ends: it would otherwise be offered the same load at its next look-up, and
            # wait once more.
            self._late.add(load.request.handle)
            self.stop_waiting(load.request)
        # The load stays open: the copy may still write to its blocks, which must not be given to others before it is
        # answered.
        load.is_late = True
        self._num_late_open += 1
        for name in {tier.name for tier, _ in load.pages}:
            self._counts[name].num_late += 1

    def most_tokens(self, request: Request) -> int | None:
        """Compute up to where the load begins; then return to the queue, to continue behind what is loaded.

        The prefix cache keeps what it has computed.
        """
        if not SPLIT_AT.of(request):
            return None
        if request.num_computed_tokens < SPLIT_AT.of(request):
            return SPLIT_AT.of(request) - request.num_computed_tokens
        self._decisions.preempted(self._core.next_step, request, PreemptReason.JOINS_LOAD)
        self._table.preempt(request)
        self._kv.free(request)
        self._join(request)
        return 0

    # ---- answers

    def moved(self, answer: BlocksMoved, client: int) -> None:
        """Apply the answer of all ranks to a transfer; ``failed`` is the union."""
        load, is_expected = self._open.get(answer.transfer), False
        if load is not None and set(answer.failed) <= set(range(len(load.pages))):
            self._loaded(load, answer)
            is_expected = True
        elif answer.transfer in self._saves:
            is_expected = self._saves.moved(answer, self._clock.acknowledged)
        self._core.stats.num_stray_messages += not is_expected
        if not answer.failed:  # otherwise not before the next step: the same copies may fail again and again
            self._plan_stores()

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        """Continue with the saves that only waited for the result of the step that wrote their content."""
        self._saves.acknowledged(self._clock.acknowledged)
        if (prefill := record.prefill).tokens:
            self.costs.step_took(prefill, record.num_tokens - prefill.tokens, output.seconds)

    def applied(self) -> None:
        self._plan_stores()

    def _open_tier(self, contents: DiskContents | HostMemory, client: int) -> None:
        """Open or close host memory; or find this part of the disk's contents, unless the disk cannot be used."""
        if isinstance(contents, HostMemory):
            self._kv.open_host(contents.is_open)
        elif contents.reason or self._kv.disk is None or not self._kv.disk.open(contents):
            self._core.stats.num_stray_messages += not contents.reason
        else:
            self._numbers.last = max(self._numbers.last, int(contents.generations.max(initial=0)))

    def _loaded(self, load: Load, answer: BlocksMoved) -> None:
        kv, request, failed = self._kv, load.request, frozenset(answer.failed)
        del self._open[load.number]
        self._num_late_open -= load.is_late
        self._release_pages(load)
        parts = range(len(load.pages) - load.num_parts, len(load.pages))
        # Without one of its parts a state is lost, and its other pages are of no use.
        lost = failed if failed.isdisjoint(parts) else failed.union(parts)
        for tier in kv.tiers:
            of_tier = [at for at, (of, _) in enumerate(load.pages) if of is tier]
            counts, bad = self._counts[tier.name], [at for at in of_tier if at in failed]
            counts.num_failed += len(bad)
            counts.num_loaded += len(of_tier) - len(bad)
            seconds = answer.disk_seconds if tier is kv.disk else answer.seconds - answer.disk_seconds
            counts.seconds += seconds
            if of_tier and not bad:  # a page that is refused or missing takes another time
                self.costs.load_took(tier.name, len(of_tier), seconds)
            for at in [at for at in of_tier if at in lost]:
                # The page may have been filled with another content since, whose name must stay.
                if not load.is_void and load.pages[at][1].block_hash == load.keys[at]:
                    tier.pages.invalidate(load.keys[at])
        # A page without its name was invalidated while it was read.
        named = [at for at, (_, page) in enumerate(load.pages) if page.block_hash == load.keys[at]]
        good = [] if load.is_void else [at for at in named if at not in lost]
        blocks = [at for at in good if at not in parts]
        kv.cache_loaded(request, [load.blocks[at] for at in blocks], [load.keys[at] for at in blocks])
        if kv.states is not None:
            if load.num_parts and len(good) - len(blocks) == load.num_parts:
                kv.states.loaded(load.blocks[-1], split_key(load.keys[-1])[0])
            # Not kept for the request like blocks: it needs a free slot to be admitted, and takes a copy.
            kv.states.holds.end(load.state_hold)
        if request is not None and good:
            kv.holds.keep_for(load.hold, request.handle)
            if (choice := CHOICE.of(request)) is not None:
                num_loaded = 0 if failed else choice.num_loaded(request.num_tokens)
                self._decisions.follow(request, "loaded", "+".join(choice.found.pages), num_loaded)
            self._end_wait(request)
        else:
            kv.holds.end(load.hold)
            if request is not None:
                self.stop_waiting(request)

    def _release_pages(self, load: Load) -> None:
        for tier in self._kv.tiers:
            tier.release([page for of, page in load.pages if of is tier])

    # ---- saves

    def yields(self, *, others_run: bool) -> bool:
        """Whether only stores in flight hold the blocks that a request lacks: it waits, and no store begins."""
        delays = not others_run and self._saves.delays_requests
        if delays:
            self._stores_yield_at = self._clock.sent + 1
        return delays

    def after_step(self, *, is_quiet: bool) -> None:
        self._plan_stores()

    def _plan_stores(self) -> None:
        """Save contents that will soon be evicted. Called after each step and answer."""
        if self._stores_yield_at >= self._clock.sent:
            return
        for save in self._saves.plan(self._clock.sent, self._clock.acknowledged):
            name = save.route.target.name
            self._decisions.note(Decision(self._clock.sent, "store", "", name, num_blocks=len(save.pages)))

    # ---- statistics

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        return msgspec.structs.replace(found, tiers=self.tiers())

    def tiers(self) -> list[TierState]:
        """Return the state of each tier. A disk that is not open has no pages."""
        found = []
        for tier, counts in zip(self._kv.tiers, self._counts.values(), strict=True):
            routes = [route for route in self._saves.routes if route.target is tier]
            state = TierState(
                tier.name,
                tier.pages.num_usable_blocks if tier.is_open else 0,
                tier.pages.num_cached_blocks,
                num_evicted=tier.pages.num_evicted_blocks,
                num_loaded=counts.num_loaded,
                num_stored=sum(route.num_saved for route in routes),
                num_failed=counts.num_failed + sum(route.num_failed for route in routes),
                num_late=counts.num_late,
                num_unsaved=sum(route.choice.num_unsaved for route in routes),
                load_seconds=counts.seconds,
                store_seconds=sum(route.seconds for route in routes),
                is_stopped=any(route.is_stopped for route in routes),
            )
            found.append(state)
        return found

    # ---- the end of workers and contents

    def new_epoch(self, *, new_workers: bool) -> bool:
        """Release requests that wait for loads.

        With new workers no answer will come, so all transfers end now. Otherwise those end that were answered and only
        waited for the result of a step, which will not be applied.
        """
        for load in list(self._loading.values()):
            assert load.request is not None
            self.stop_waiting(load.request)
        for request in self._table.requests.values():
            SPLIT_AT.put(request, 0)
        self._drop_device_contents()
        self._saves.begin_epoch(new_workers=new_workers)
        if not new_workers:
            return False
        self._loads = []
        for load in self._open.values():
            self._release_pages(load)
            self._kv.holds.end(load.hold)
            if self._kv.states is not None:
                self._kv.states.holds.end(load.state_hold)
        self._open.clear()
        self._num_late_open = 0
        return False

    def _drop_device_contents(self) -> None:
        """The contents of the device were dropped: name nothing that is on its way to it, and keep nothing."""
        for route in self._saves.routes:
            if route.source is None:
                route.choice.forget()
        for load in self._open.values():
            load.is_void = True
        while self._kv.holds.end_one_kept():
            pass

    def contents_dropped(self) -> None:
        """Forget the contents on disk too, also those that are not known yet."""
        self._drop_device_contents()
        for route in self._saves.routes:
            route.choice.forget()
        if (disk := self._kv.disk) is not None:
            self._numbers.last += 0 if disk.is_open else BEYOND_ALL
            disk.forgotten = self._numbers.last

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        kv = self._kv
        assert kv.tiers or not len(self), "transfers without a tier"
        self._saves.check()
        expected = len(self._open) + self._saves.num_holds(kv.holds)
        assert expected == len(kv.holds) - kv.holds.num_kept, "a hold without its transfer"
        if kv.states is not None:
            expected = len(self._open) + self._saves.num_holds(kv.states.holds)
            assert expected == len(kv.states.holds), "a hold of a slot without its transfer"
        for load in self._open.values():
            for block, (_, page), key in zip(load.blocks, load.pages, load.keys, strict=True):
                assert block.ref_cnt > 0, f"{block!r} is loaded but not held"
                assert block.block_hash is None, f"{block!r} is named before it is loaded"
                assert page.block_hash in (key, None), f"{page!r} has another content while it is read"
        for tier in kv.tiers:
            read = [[page for of, page in load.pages if of is tier] for load in self._open.values()]
            tier.pages.check(read + self._saves.holders(tier))
        for handle, load in self._loading.items():
            assert load.request is not None and load.request.handle == handle
            assert SPLIT_AT.of(load.request) or handle in self._table.skipped_waiting, "a loading request is not held"
        assert self._num_late_open == sum(load.is_late for load in self._open.values())
        requests = self._table.requests.values()
        kv.holds.check({r.handle for r in requests if r.status is not RequestStatus.RUNNING or SPLIT_AT.of(r)})

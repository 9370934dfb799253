"""Copies of blocks between the device and the tiers behind it: loads for waiting requests, and saves."""

from dataclasses import dataclass

from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import TierState
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, MoveBlocks, MoveKind
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import Counters, LoadCounts, RecentDecisions
from quire.scheduler_proc.costs.choice import LoadChoice, Prefix, WorkAhead, choose
from quire.scheduler_proc.costs.costs import FULL_PAGES, Costs
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.found import FoundContents, find_contents
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.kv.saves import Numbers, Saves, move_blocks
from quire.scheduler_proc.kv.tiers import Tier
from quire.scheduler_proc.requests.events import HostMemory
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus

BEYOND_ALL = 2**40
"""Added to the number of the newest transfer, it is greater than that of any content on disk."""


@dataclass(slots=True)
class Load:
    """A load that was decided and is not answered.

    Attributes:
        blocks: targets on the device; they have no key before the load is answered.
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
    request: Request | None = None
    is_late: bool = False
    is_void: bool = False


class Transfers:
    """Decides transfers and follows them. Without a tier behind the device it does nothing.

    *Saves* copy what is about to be evicted to the next tier. *Loads* copy the pages that continue the cached prefix of
    a waiting request to new blocks. Meanwhile the request is held (WaitReason.LOADING). When the load is answered its
    blocks are named, and kept until the request is admitted, which then finds them in the prefix cache. If the request
    is *split*, it runs meanwhile, up to ``Request.split_at``, where the load begins. Then it returns to the queue, and
    is held until the load is answered.

    Invariants (``check``): a page is held while it is read. A target is held and not findable before every rank has
    answered. Each transfer ends by its answer or with its workers, also if its request ends first.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RequestTable,
        kv: KVCacheManager,
        decisions: RecentDecisions,
        stats: Counters,
        costs: Costs,
    ) -> None:
        self._table = table
        self._kv = kv
        self._clock = table.steady_decode.clock
        self._decisions = decisions
        self._stats = stats
        self._numbers = Numbers(0 if kv.disk is None else kv.disk.forgotten)
        self._saves = Saves(config, kv, self._numbers)
        self._open: dict[int, Load] = {}
        self._loading: dict[int, Load] = {}
        """Loads by the handle of the request that waits for them."""
        self._late: set[int] = set()
        """Handles of requests whose load was late: they compute what the device does not have."""
        self.costs = costs
        self._can_split = kv.can_split and config.enable_chunked_prefill
        self._num_late_open = 0
        """Loads that are late and not answered. Meanwhile no load begins, because it may take as long."""
        self._loads: list[MoveBlocks] = []
        self._counts = {tier.name: LoadCounts() for tier in kv.tiers}
        self._stores_yield_at = -1
        """None begin up to this step, because a request lacked the blocks of stores in flight."""

    def __len__(self) -> int:
        return len(self._open) + len(self._saves)

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

    def choose(self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int) -> LoadChoice | None:
        """Decide whether a waiting request loads what continues its hits. If it does, the load begins and it is held.

        ``step_tokens``: most tokens of prefills in a step. Returns None if no page continues the hits, or the free
        blocks do not suffice for all known tokens of the request.
        """
        if self.join(request):
            return LoadChoice("load")
        kv = self._kv
        if not kv.tiers or self._num_late_open or request.handle in self._late:
            return None
        found = find_contents(kv, request)
        fits = found.fits(kv) and kv.can_fit_full_sequence(request, request.num_tokens, hits)
        if found.num_tokens <= num_hit_tokens or not fits:
            return None
        pages = found.by_tier()
        block_size = kv.block_size if self._can_split else 0
        prefix = Prefix(num_hit_tokens, found.num_tokens, request.num_tokens, pages, block_size)
        prefills, num_others = self._table.prefills()
        load_seconds = sum(load.choice.pages_seconds for load in self._open.values())
        choice = choose(self.costs, prefix, WorkAhead(prefills, step_tokens, num_others, load_seconds))
        request.choice = choice._replace(found=prefix)
        if choice.kind == "load":
            self._begin_load(request, found, choice)
            self._table.hold(request, WaitReason.LOADING)
            detail = f"{found.num_tokens - num_hit_tokens:,} tokens from {' and '.join(pages)}; {choice}"
            self._note("wait", request, WaitReason.LOADING, len(found.pages), detail)
        return choice

    def admitted(self, request: Request, choice: LoadChoice | None) -> None:
        """Count a choice other than to load, after the request was admitted; if it was to split, begin the load."""
        if choice is not None and choice.kind == "split":
            found = find_contents(self._kv, request, choice.front // self._kv.block_size)
            if found.fits(self._kv):
                self._begin_load(request, found, choice)
                request.split_at = choice.front
                self._note("choose", request, "split", len(found.pages), str(choice))
                return
        request.choice = None
        if choice is None:
            return
        most = min(FULL_PAGES, max(self._kv.pool.num_free_blocks // 2, 1))
        if self.costs.avoids_load() and (found := find_contents(self._kv, request).last(most)).fits(self._kv):
            self._load(found, LoadChoice("load"), request.tenant)
        self._note("choose", request, "compute", 0, str(choice))

    def join(self, request: Request) -> bool:
        """Hold a waiting request for its load, if that began while it ran. Returns whether it is held."""
        if request.handle not in self._loading:
            return False
        self._table.hold(request, WaitReason.LOADING)
        return True

    def _begin_load(self, request: Request, found: FoundContents, choice: LoadChoice) -> None:
        load = self._load(found, choice, request.tenant)
        load.request, self._loading[request.handle] = request, load
        self.costs.num_avoided = 0

    def _load(self, found: FoundContents, choice: LoadChoice, tenant: int) -> Load:
        kv = self._kv
        hold, targets = kv.holds.hold_targets(found.cached, len(found.pages), tenant)
        tiers, pages = zip(*found.pages, strict=True)
        for tier in kv.tiers:
            tier.pages.touch(page for of, page in found.pages if of is tier)
        load = Load(self._numbers.next(), targets, found.pages, found.keys, hold, choice)
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
        """Let a request continue without its load, if it has one. What is loaded will be cached."""
        if request.handle in self._loading:
            request.split_at, request.choice = 0, None
            self._end_wait(request)

    def _end_wait(self, request: Request) -> None:
        self._loading.pop(request.handle).request = None
        if request.wait_reason is WaitReason.LOADING:
            self._table.release(request)

    def forget(self, request: Request) -> None:
        """Keep nothing for a request that ends."""
        self.stop_waiting(request)
        self._late.discard(request.handle)
        self._kv.holds.end_kept(request.handle)

    def release_late(self, number: int) -> None:
        """Let the request of a load compute what has not arrived in time. What arrives later is cached."""
        load = self._open.get(number)
        if load is None or load.is_late:
            self._stats.num_stray_messages += 1
            return
        if load.request is not None:
            self._late.add(load.request.handle)
            self.stop_waiting(load.request)
        load.is_late = True
        self._num_late_open += 1
        for name in {tier.name for tier, _ in load.pages}:
            self._counts[name].num_late += 1

    # ---- answers

    def moved(self, answer: BlocksMoved) -> None:
        """Apply the answer of all ranks to a transfer; ``failed`` is the union."""
        load, is_expected = self._open.get(answer.transfer), False
        if load is not None and set(answer.failed) <= set(range(len(load.pages))):
            self._loaded(load, answer)
            is_expected = True
        elif answer.transfer in self._saves:
            is_expected = self._saves.moved(answer, self._clock.acknowledged)
        self._stats.num_stray_messages += not is_expected

    def acknowledged(self) -> None:
        """Continue with the saves that only waited for the result of the step that wrote their content."""
        self._saves.acknowledged(self._clock.acknowledged)

    def open_tier(self, contents: DiskContents | HostMemory) -> None:
        """Open or close host memory; or find this part of the disk's contents, unless the disk cannot be used."""
        if isinstance(contents, HostMemory):
            self._kv.open_host(contents.is_open)
        elif contents.reason or self._kv.disk is None or not self._kv.disk.open(contents):
            self._stats.num_stray_messages += not contents.reason
        else:
            self._numbers.last = max(self._numbers.last, int(contents.generations.max(initial=0)))

    def _loaded(self, load: Load, answer: BlocksMoved) -> None:
        kv, request, failed = self._kv, load.request, frozenset(answer.failed)
        del self._open[load.number]
        self._num_late_open -= load.is_late
        self._release_pages(load)
        for tier in kv.tiers:
            of_tier = [at for at, (of, _) in enumerate(load.pages) if of is tier]
            counts, bad = self._counts[tier.name], [at for at in of_tier if at in failed]
            counts.num_failed += len(bad)
            counts.num_loaded += len(of_tier) - len(bad)
            seconds = answer.disk_seconds if tier is kv.disk else answer.seconds - answer.disk_seconds
            counts.seconds += seconds
            if of_tier and not bad:  # a page that is refused or missing takes another time
                self.costs.load_took(tier.name, len(of_tier), seconds)
            for at in bad:
                if not load.is_void and load.pages[at][1].block_hash == load.keys[at]:
                    tier.pages.invalidate(load.keys[at])
        good = [] if load.is_void else [at for at in range(len(load.pages)) if at not in failed]
        kv.cache_loaded(request, [load.blocks[at] for at in good], [load.keys[at] for at in good])
        if request is not None and good:
            kv.holds.keep_for(load.hold, request.handle)
            if (choice := request.choice) is not None:
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

    def yields(self, *, others_run: bool = False) -> bool:
        """Whether only stores in flight hold the blocks that a request lacks: it waits, and no store begins."""
        delays = not others_run and self._saves.delays_requests
        if delays:
            self._stores_yield_at = self._clock.sent + 1
        return delays

    def plan_stores(self) -> None:
        """Save contents that will soon be evicted. Called after each step and answer."""
        if self._stores_yield_at >= self._clock.sent:
            return
        for save in self._saves.plan(self._clock.sent, self._clock.acknowledged):
            name = save.route.target.name
            self._decisions.note(Decision(self._clock.sent, "store", "", name, num_blocks=len(save.pages)))

    # ---- statistics

    def tiers(self) -> list[TierState]:
        """Return the state of each tier. A disk that is not open has no pages."""
        return [
            TierState(
                route.target.name,
                route.target.pages.num_usable_blocks if route.target.is_open else 0,
                route.target.pages.num_cached_blocks,
                num_evicted=route.target.pages.num_evicted_blocks,
                num_loaded=counts.num_loaded,
                num_stored=route.num_saved,
                num_failed=counts.num_failed + route.num_failed,
                num_late=counts.num_late,
                num_unsaved=route.choice.num_unsaved,
                load_seconds=counts.seconds,
                store_seconds=route.seconds,
                is_stopped=route.is_stopped,
            )
            for route, counts in zip(self._saves.routes, self._counts.values(), strict=True)
        ]

    # ---- the end of workers and contents

    def begin_epoch(self, *, new_workers: bool) -> None:
        """Release requests that wait for loads; call after the device's contents were dropped.

        With new workers no answer will come, so all transfers end now. Otherwise those end that were answered and only
        waited for the result of a step, which will not be applied.
        """
        for load in list(self._loading.values()):
            assert load.request is not None
            self.stop_waiting(load.request)
        self.drop_device_contents()
        self._saves.begin_epoch(new_workers=new_workers)
        if not new_workers:
            return
        self._loads = []
        for load in self._open.values():
            self._release_pages(load)
            self._kv.holds.end(load.hold)
        self._open.clear()
        self._num_late_open = 0

    def drop_device_contents(self) -> None:
        """The contents of the device were dropped: name nothing that is on its way to it, and keep nothing."""
        for route in self._saves.routes[:1]:
            route.choice.forget()
        for load in self._open.values():
            load.is_void = True
        while self._kv.holds.end_one_kept():
            pass

    def drop_contents(self) -> None:
        """The contents of all tiers were dropped; those on disk are forgotten, also unknown ones."""
        self.drop_device_contents()
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
        expected = len(self._open) + self._saves.num_holds()
        assert expected == len(kv.holds) - kv.holds.num_kept, "a hold without its transfer"
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
            assert load.request.split_at or handle in self._table.skipped_waiting, "a loading request is not held"
        assert self._num_late_open == sum(load.is_late for load in self._open.values())
        requests = self._table.requests.values()
        kv.holds.check({r.handle for r in requests if r.status is not RequestStatus.RUNNING or r.split_at})

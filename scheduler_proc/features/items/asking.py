"""Asking: which requests get the rows of their items, and whose room is taken for them."""

from collections.abc import Sequence
from typing import Any

from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.features.items.encoder_cache import EncoderCache
from quire.scheduler_proc.features.items.request_items import RequestItems, items_of
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus

AHEAD_STEPS = 4
"""Items behind the next one that begin within this many full steps are asked for too, so that steps need not wait."""


class Asking:
    """Gives rows and room to requests with items.

    **Which items get room.** Each request's next item first, in the order of ``_rank``; those behind one that lacks
    room get none, because small items would pass a large one for ever. Then further items, ahead of time.

    **Why requests do not wait for each other for ever.** The first request in the order, T, can take the room of all
    others for its next item: rows that none needs soon, those that others need, and those that T itself needs later.
    Left are rows that are being encoded and rows that a step in flight uses. Both are answered, and then T gets room,
    because no item has more rows than the cache (``check_items``). Nothing takes room from T, and nothing else gets
    any before, so T's item is encoded, and its positions are computed. Then T's next item is next. Running requests
    come before waiting ones, which may wait for their KV blocks. Among waiting ones, the one at which admission stops
    for lack of rows comes first, whatever its place among the requests of its tenant: nothing is admitted before it.
    T may change while an item is encoded: a request that was held for it keeps its rows until one step was planned, so
    that it is admitted if it is next, and the two do not take the room from each other again and again.

    Attributes:
        requests: by handle, the requests that have items.
        first: the waiting request at which admission has stopped for lack of rows.
        spared: handles of requests that were held until now, and keep their rows until they could be admitted in a
            step.
        is_due: whether something has changed since all were asked.
        lacks_room: whether a request will get room when steps in flight are answered.
    """

    def __init__(self, core: Core, cache: EncoderCache) -> None:
        self._core, self._cache, self._table, self._kv = core, cache, core.table, core.kv
        self.requests: dict[int, Request] = {}
        self.first: Request | None = None
        self.spared: set[int] = set()
        self.is_due = self.lacks_room = False
        self.num_runs = self.num_hits = self.num_evicted = 0

    def is_held(self, request: Request) -> bool:
        """Whether a request is held until its next item is encoded."""
        return request.wait_reason is WaitReason.ENCODER and request.handle in self._table.skipped_waiting

    def room_may_be_free(self) -> None:
        """A step was answered, or no request is spared any more."""
        self.is_due |= self.lacks_room

    def give(self) -> None:
        """Give rows and room to requests: to each for its next item, and then for items ahead of it.

        Not while a step is planned: its rows use what may be dropped here.
        """
        if not self.is_due:
            return
        self.is_due = self.lacks_room = False
        if self.first is not None and self.first not in self._table.waiting:
            self.first = None
        asking = sorted(filter(self._asks, self.requests.values()), key=self._rank)
        for rank, request in enumerate(asking):
            own = self._located(request)
            if own.needed and not self._get(own, own.first, rank, asking):
                return
        for request in asking:
            for index in self._soon(request)[1:]:
                if not self._get(items_of(request), index, len(asking), asking):
                    return

    def _asks(self, request: Request) -> bool:
        """Whether a request needs rows, and nothing else for its next position but blocks and its turn."""
        can_run = request.handle in self._table.running or request in self._table.waiting or self.is_held(request)
        return can_run and bool(items_of(request).needed)

    def _rank(self, request: Request) -> tuple[Any, ...]:
        return request.status is not RequestStatus.RUNNING, request is not self.first, self._table.waiting.key(request)

    def _located(self, request: Request) -> RequestItems:
        """Return the items of a request, of which the first is the one that it will need first."""
        own = items_of(request)
        if not own.is_located and request.status is not RequestStatus.RUNNING:
            own.is_located = True
            found = max(self._kv.get_computed_blocks(request)[1], self._kv.find_in_all_tiers(request)[1])
            own.move_to(found)
        return own

    def _soon(self, request: Request) -> range:
        """Return the indices of the items that a request needs soon, with the next one first."""
        own = items_of(request)
        if not own.needed:
            return range(0)
        end = own.needed[0].begin + AHEAD_STEPS * self._core.config.step_tokens
        return range(own.first, sum(item.begin < end for item in own.items))

    def _get(self, own: RequestItems, index: int, rank: int, asking: Sequence[Request]) -> bool:
        """Have an item encoded if it is not there. Returns False if it must wait.

        Args:
            rank: of the request in ``asking``; all of them, if the item is not its next one.
        """
        item, cache = own.items[index], self._cache
        if item.key not in cache.rows:
            encoding = cache.num_encoding
            if encoding and encoding + item.num_rows > self._core.config.max_num_batched_tokens:
                return False
            if not self._make_room(item.num_rows, rank, asking):
                self.lacks_room = True
                return False
            self._core.side_jobs.append(cache.encode(item))
            self.num_runs += 1
        elif index >= own.asked:
            self.num_hits += 1
            cache.use(item)
        own.asked = max(own.asked, index + 1)
        return True

    def _make_room(self, num_rows: int, rank: int, asking: Sequence[Request]) -> bool:
        """Drop as few rows as suffice for ``num_rows`` more, or none and return False.

        First those that no request needs soon, the least recently used ones first. Then those that requests need from
        this rank on, but none before it and none that is spared: what the last request needs first.
        """
        cache, last = self._cache, len(asking)
        missing = cache.num_used + num_rows - cache.capacity
        if missing <= 0:
            return True
        needed: dict[bytes, int] = {}
        for at, request in enumerate(asking):
            place = -1 if request.handle in self.spared else at
            for index in self._soon(request):
                key = items_of(request).items[index].key
                needed[key] = min(needed.get(key, last), place)
        found = [key for key, rows in cache.rows.items() if cache.may_drop(rows) and needed.get(key, last) >= rank]
        if sum(cache.rows[key].item.num_rows for key in found) < missing:
            return False
        for key in sorted(found, key=lambda key: -needed.get(key, last)):
            if missing <= 0:
                break
            missing -= cache.rows[key].item.num_rows
            cache.drop(key)
            self.num_evicted += 1
        return True

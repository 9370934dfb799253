"""Asking: which requests get the rows of their items, and whose room is taken for them."""

from collections.abc import Iterator, Sequence
from typing import Any

from quire.protocol.wire.item_messages import Encode
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.features.items.encoder_cache import EncoderCache, ItemRows
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
    others for its next item: rows without a holder, those that others hold, and those that T itself holds for later.
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
        spared: requests that were held until now, and keep their rows until they could be admitted in a step.
        num_changes: number of changes by which a request may get rows or lose them.
        lacks_room: whether a request will get room when steps in flight are answered.
    """

    def __init__(self, core: Core, cache: EncoderCache) -> None:
        self._core, self._cache, self._table, self._kv = core, cache, core.table, core.kv
        self.requests: dict[int, Request] = {}
        self.first: Request | None = None
        self.spared: dict[int, Request] = {}
        self.num_changes = 0
        self.lacks_room = False
        self._is_due = False
        """Whether something has changed since all were asked."""
        self._encodes: list[Encode] = []
        self.num_runs = self.num_hits = 0

    @property
    def is_settled(self) -> bool:
        """Whether no request gets rows before something changes."""
        return not self._is_due and not self.lacks_room

    def changed(self) -> None:
        self._is_due = True
        self.num_changes += 1

    def room_may_be_free(self) -> None:
        """A step was answered."""
        self._is_due |= self.lacks_room

    def step_planned(self) -> None:
        """Requests that were held could be admitted in a step: their room may be taken again."""
        if self.spared:
            self.spared.clear()
            self._is_due |= self.lacks_room

    def forget(self, request: Request) -> None:
        """A request has ended."""
        del self.requests[request.handle]
        self.spared.pop(request.handle, None)
        if self.first is request:
            self.first = None

    def begin_again(self) -> None:
        """New workers have no rows."""
        self._encodes = []
        for request in self.requests.values():
            own = items_of(request)
            own.give_back(request, own.first)
        self._cache.drop_all()
        self.changed()

    def take_encodes(self) -> list[Encode]:
        """Return and clear the messages to send."""
        encodes, self._encodes = self._encodes, []
        return encodes

    def give(self) -> None:
        """Give rows and room to requests: to each for its next item, and then for items ahead of it.

        Not while a step is planned: its rows use what may be dropped here.
        """
        if not self._is_due:
            return
        self._is_due = self.lacks_room = False
        asking = sorted(filter(self._asks, self.requests.values()), key=self._rank)
        for request in asking:
            own = self._located(request)
            if not own.is_done and not self._get(request, own, own.first, asking):
                return
        for request in asking:
            own = items_of(request)
            if own.is_done:
                continue
            ahead = own.items[own.first].begin + AHEAD_STEPS * self._core.config.step_tokens
            for index in range(own.first + 1, len(own.items)):
                if own.items[index].begin >= ahead:
                    break
                if not self._get(request, own, index, ()):
                    return

    def _asks(self, request: Request) -> bool:
        """Whether a request needs rows, and nothing else for its next position but blocks and its turn."""
        table, handle = self._table, request.handle
        is_held = handle in table.skipped_waiting and request.wait_reason is WaitReason.ENCODER
        can_run = handle in table.running or request in table.waiting or is_held
        return can_run and not items_of(request).is_done

    def _rank(self, request: Request) -> tuple[Any, ...]:
        return request.status is not RequestStatus.RUNNING, request is not self.first, self._table.waiting.key(request)

    def _located(self, request: Request) -> RequestItems:
        """Return the items of a request, of which the first is the one that it will need first."""
        own = items_of(request)
        if not own.is_located and request.status is not RequestStatus.RUNNING:
            own.is_located = True
            found = max(self._kv.get_computed_blocks(request)[1], self._kv.find_in_all_tiers(request)[1])
            own.move_to(request, found)
        return own

    def _get(self, request: Request, own: RequestItems, index: int, asking: Sequence[Request]) -> bool:
        """Let a request hold an item, which is encoded if it is not there. Returns whether it does.

        ``asking``: those in the order of ``_rank`` which ask; the room of those behind ``request`` may be taken.
        """
        rows, item = own.rows[index], own.items[index]
        if not rows.is_cached:
            cache, most = self._cache, self._core.config.max_num_batched_tokens
            if cache.encoding and cache.encoding + rows.num_rows > most:
                return False
            taken = cache.make_room(rows.num_rows, self._takeable(request, asking))
            if taken is None:
                self.lacks_room = True
                return False
            for each in taken:
                self._take(each)
            self._encodes.append(cache.encode(rows, item))
            self.num_runs += 1
            self.num_changes += 1
        elif index >= own.asked:
            self.num_hits += 1
            self._cache.use(rows)
        if index >= own.asked:
            own.ask(request)
        return True

    def _takeable(self, request: Request, asking: Sequence[Request]) -> Iterator[ItemRows]:
        """Return the rows with holders whose room a request may take for its next item, those of the last ones first.

        They are rows that no request before it holds, in the order of ``_rank``.
        """
        if not asking:
            return
        ranks = {each.handle: at for at, each in enumerate(asking)}
        behind, last = ranks[request.handle], len(asking)
        spared = self.spared.keys()
        held = [rows for rows in self._cache.cached.values() if rows.holders and spared.isdisjoint(rows.holders)]
        first = {rows.number: min(ranks.get(handle, last) for handle in rows.holders) for rows in held}
        yield from sorted((r for r in held if first[r.number] >= behind), key=lambda r: -first[r.number])

    def _take(self, rows: ItemRows) -> None:
        """Drop rows for others; the requests that hold them ask for them again."""
        for handle in list(rows.holders):
            request = self.requests[handle]
            own = items_of(request)
            own.give_back(request, own.rows.index(rows, own.first))
        self._cache.evict(rows)

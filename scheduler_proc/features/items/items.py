"""Items: has the rows of requests' images computed, and lets no step compute a position before its rows are there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.protocol.block_hash import HashChain
from quire.protocol.wire.front_end_messages import EndReason, Rejected, Statistics
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem, RowItem, features_of
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.features.items.arriving_items import (
    PARAMS,
    check_items,
    is_atomic,
    longest_atom,
    most_atom_tokens,
)
from quire.scheduler_proc.features.items.encoder_cache import EncoderCache, ItemRows
from quire.scheduler_proc.features.items.request_items import ITEMS, RequestItems
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus

AHEAD_STEPS = 4
"""Items behind the next one that begin within this many full steps are asked for too, so that steps need not wait."""


class Items(Feature):
    """Asks workers to encode the items of requests, once for all requests with the same content.

    A request *asks* for its items in order, and holds the rows of those that it has asked for until the steps that
    compute their positions are sent, or it ends or returns to the queue. Rows without a holder stay until others need
    their room. A running request whose next position has no rows is not computed, and a waiting one whose
    first step lacks rows is held (WaitReason.ENCODER) while they are being computed.

    **Who gets room.** First each request's next item, in the order of ``_rank``; those behind one that lacks room get
    none, because small items would pass a large one for ever. Then further items, ahead of time.

    **Why requests do not wait for each other for ever.** The first request in the order, T, can take the room of all
    others for its next item: rows without a holder, those that others hold, and those that T itself holds for later.
    Left are rows that are being encoded and rows that a step in flight uses. Both are answered, and then T gets room,
    because no item has more rows than the cache (``check_items``). Nothing takes room from T, and nothing else gets
    any before, so T's item is encoded, and its positions are computed. Then T's next item is next. Running requests
    come before waiting ones, which may wait for their KV blocks. Among waiting ones, the one at which admission stops
    for lack of rows comes first, whatever its place among the requests of its tenant: nothing is admitted before it.
    T may change while an item is encoded: a request that was held for it keeps its rows until one step was planned, so
    that it is admitted if it is next, and the two do not take the room from each other again and again.

    Invariants (``check``): rows in steps in flight are there. A request is held exactly while its next item is being
    encoded. A request in steady decode needs no rows.
    """

    name = "items"
    pause_reason = WaitReason.ENCODER

    def __init__(self, core: Core) -> None:
        config, self._core = core.config, core
        self.is_enabled = bool(config.item_kinds)
        self._table, self._kv, self._clock = core.table, core.kv, core.clock
        self._grids_decide = config.model.vision is not None and bool(config.model.vision.mrope_section)
        """Whether the grids of images decide positions, so that rows need all items of their request."""
        self.cache = EncoderCache(config.encoder_cache_tokens, self._clock)
        self._with_items: dict[int, Request] = {}
        """By handle, the requests that have items."""
        self._held: dict[int, Request] = {}
        self._spared: dict[int, Request] = {}
        """Requests that were held until now, and keep their rows until they could be admitted in a step."""
        self._first: Request | None = None
        """The waiting request at which admission has stopped for lack of rows."""
        self._stopped_at = (-1, -1)
        """Changes here and of the pool when that was so."""
        self._encodes: list[Encode] = []
        self._is_due = False
        """Whether something changed by which a request may get room."""
        self._lacks_room = False
        """Whether a request will get room when steps in flight are answered."""
        self._num_changes = 0
        self.num_runs = self.num_failed = self.num_hits = 0
        self.encode_seconds = 0.0
        if core.kv.pool.events is not None:
            core.kv.pool.events.covers = self._covers

    def is_busy(self) -> bool:
        return self.cache.encoding > 0

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until an Encode is answered or a request is admitted."""
        return not self._is_due and not self._lacks_room

    # ---- requests

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        items: list[InputItem] = event.items
        if not items:
            return
        if event.forked_from:
            text = f"a forked request has the items of its parent, and none of its own (got {len(items)})"
            raise Refusal("invalid_value", "messages", text)
        config, most_tokens = self._core.config, event.sampling.max_tokens
        num_tokens = min(num_prompt_tokens + (most_tokens or config.max_model_len), config.max_model_len)
        check_items(items, num_prompt_tokens, config, self._kv.step_tokens(min(num_tokens, self._kv.max_tokens)))
        sizes = {item.digest: item.num_rows for item in items}
        for item in items:
            known = self.cache.known.get(item.digest)
            if item.num_rows != (expected := sizes[item.digest] if known is None else known.num_rows):
                text = f"items with one digest must have one number of rows (got {item.num_rows}, and {expected})"
                raise Refusal("invalid_value", PARAMS[item.kind], text)

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        """Give a request its items, or those of its parent.

        A new content is known from here on, although no request has it. So no feature may refuse the request after
        this one.
        """
        theirs = None if parent is None else ITEMS.of(parent)
        items = event.items if parent is None else ([] if theirs is None else theirs.items)
        if items:
            ITEMS.put(request, RequestItems(items, [self.cache.find(item) for item in items]))

    def hashing(self, event: Any, chain: Callable[..., HashChain]) -> Callable[..., HashChain]:
        return partial(chain, features=features_of(event.items)) if event.items else chain

    def _covers(self, request: Any, begin: int, end: int) -> tuple[str, ...]:
        """Return the digests of the items of which positions of a request are."""
        own = ITEMS.of(request)
        if own is None:
            return ()
        return tuple(item.digest.hex() for item in own.items if item.has_positions(begin, end))

    def added(self, request: Request) -> None:
        if (own := ITEMS.of(request)) is not None:
            for rows in own.rows:
                rows.num_items += 1
            self._with_items[request.handle] = request
            self._changed()

    def stopped(self, request: Request) -> None:
        """Need all rows again, as far as the prefix cache will not have their positions."""
        if (own := ITEMS.of(request)) is not None:
            own.give_back(request, own.first)
            own.first = own.asked = 0
            own.is_located = False
            self._changed()

    def stop_waiting(self, request: Request) -> None:
        if self._held.pop(request.handle, None) is not None:
            self._table.release(request)

    def ending(self, request: Request) -> None:
        self.stop_waiting(request)

    def ended(self, request: Request) -> None:
        if (own := ITEMS.of(request)) is None:
            return
        own.give_back(request, own.first)
        del self._with_items[request.handle]
        self._spared.pop(request.handle, None)
        if self._first is request:
            self._first = None
        for rows in own.rows:
            rows.num_items -= 1
            self.cache.forget_unused(rows)
        self._changed()

    def _changed(self) -> None:
        self._is_due = True
        self._num_changes += 1

    # ---- steps

    def obstacle(self, request: Request) -> WaitReason | None:
        """Return what ``hits`` has said, while nothing has changed: hits are not looked up in each step."""
        if request is not self._first:
            self._first = None  # admission has come to another one
        stops = self._first is not None and self._stopped_at == (self._num_changes, self._kv.pool.num_changes)
        return WaitReason.ENCODER if stops else None

    def hits(
        self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int
    ) -> WaitReason | int | None:
        """Hold a waiting request which lacks rows for its first step, if they are being computed.

        With a few tokens before an image it would otherwise take a row and blocks, and others could not run meanwhile.
        If the rows are not being computed, it stays in the queue, where those behind it wait too: they would use rows
        that are there, and so keep the room that it needs.
        """
        own = ITEMS.of(request)
        if own is None:
            return None
        own.is_located = True
        own.move_to(request, num_hit_tokens)
        if not _lacks_rows(own, num_hit_tokens + step_tokens - 1):
            return None
        rows = own.rows[own.first]
        if not rows.is_encoding:
            if self._first is not request:
                self._first = request
                self._changed()
            self._stopped_at = self._num_changes, self._kv.pool.num_changes
            return WaitReason.ENCODER
        self._table.hold(request, WaitReason.ENCODER)
        self._held[request.handle] = request
        step = self._clock.sent + 1
        detail = f"{rows.num_rows:,} rows of {rows.item.digest.hex()[:16]}"
        self._core.decisions.note(Decision(step, "wait", request.request_id, WaitReason.ENCODER, detail=detail))
        return WaitReason.ENCODER

    def started(self, request: Request) -> None:
        if self._first is request:
            self._first = None

    def can_run(self, request: Request) -> bool:
        own = ITEMS.of(request)
        return own is None or not _lacks_rows(own, request.num_computed_tokens)

    def chunk(self, request: Request, begin: int, num_tokens: int, most: int) -> int:
        """End a chunk before the first position without rows, and not inside what must be computed in one step.

        A hit may end there: the keys and values that it has were computed with the whole image, and the positions
        behind it attend to all of the image in the chunk that has the rest. So a chunk may begin inside a range.
        """
        own = ITEMS.of(request)
        if own is None:
            return num_tokens
        for index in range(own.first, len(own.items)):
            item, end = own.items[index], begin + num_tokens
            if item.begin >= end:
                break
            if item.end <= begin:
                continue
            if not own.rows[index].is_ready:
                return max(item.begin - begin, 0)
            if is_atomic(item, self._core.config):
                num_tokens = _whole_ranges(item, begin, num_tokens, most)
        return num_tokens

    def building(self, request: Request, data: NewRequestData) -> NewRequestData:
        own = ITEMS.of(request)
        if own is None:
            return data
        items = [
            RowItem(rows.number if item.end > data.num_computed_tokens else 0, item.ranges, item.grid)
            for item, rows in zip(own.items, own.rows, strict=True)
            if self._grids_decide or item.end > data.num_computed_tokens
        ]
        return msgspec.structs.replace(data, items=items) if items else data

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        """Let go of the rows whose last positions the step computes. They keep their room until it is answered."""
        for handle, row in plan.rows.items() if self._with_items else ():
            request = self._with_items.get(handle)
            own = None if request is None else ITEMS.of(request)
            if request is None or own is None or own.is_done:
                continue
            begin = request.num_computed_tokens
            end = begin + row.num_tokens
            own.move_to(request, begin)  # a forked request begins behind what its parent has computed
            for index in range(own.first, len(own.items)):
                if own.items[index].begin >= end:
                    break
                own.rows[index].last_step = plan.step
                self.cache.use(own.rows[index])
            own.move_to(request, end)
            self._changed()
        return diff

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        self._is_due |= self._lacks_room

    # ---- encoding

    def after_event(self) -> None:
        self._ask()

    def after_step(self, *, is_quiet: bool) -> None:
        if self._spared:
            self._spared.clear()
            self._is_due |= self._lacks_room
        self._ask()

    def _ask(self) -> None:
        """Give rows and room to requests: to each for its next item, and then for items ahead of it.

        Not while a step is planned: its rows use what may be dropped here.
        """
        if not self._is_due:
            return
        self._is_due = self._lacks_room = False
        asking = sorted(filter(self._asks, self._with_items.values()), key=self._rank)
        for request in asking:
            own = self._located(request)
            if not own.is_done and not self._get(request, own, own.first, asking):
                return
        for request in asking:
            own = self._located(request)
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
        own, table, handle = ITEMS.of(request), self._table, request.handle
        can_run = handle in table.running or request in table.waiting or handle in self._held
        return own is not None and not own.is_done and can_run

    def _rank(self, request: Request) -> tuple[Any, ...]:
        return request.status is not RequestStatus.RUNNING, request is not self._first, self._table.waiting.key(request)

    def _located(self, request: Request) -> RequestItems:
        """Return the items of a request, of which the first is the one that it will need first."""
        own = ITEMS.of(request)
        assert own is not None
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
            cache, most = self.cache, self._core.config.max_num_batched_tokens
            if cache.encoding and cache.encoding + rows.num_rows > most:
                return False
            taken = cache.make_room(rows.num_rows, self._takeable(request, own, asking))
            if taken is None:
                self._lacks_room = True
                return False
            for each in taken:
                self._take(each)
            self._encodes.append(cache.encode(rows, item))
            self.num_runs += 1
            self._num_changes += 1
        elif index >= own.asked:
            self.num_hits += 1
            self.cache.use(rows)
        if index >= own.asked:
            own.ask(request)
        return True

    def _takeable(self, request: Request, own: RequestItems, asking: Sequence[Request]) -> Iterator[ItemRows]:
        """Return the rows with holders whose room a request may take for its next item, those of the last ones first.

        They are rows that no request before it holds, in the order of ``_rank``.
        """
        if not asking:
            return
        ranks = {each.handle: at for at, each in enumerate(asking)}
        behind, last = ranks[request.handle], len(asking)
        spared = self._spared.keys()
        held = [rows for rows in self.cache.cached.values() if rows.holders and spared.isdisjoint(rows.holders)]
        first = {rows.number: min(ranks.get(handle, last) for handle in rows.holders) for rows in held}
        yield from sorted((r for r in held if first[r.number] >= behind), key=lambda r: -first[r.number])

    def _take(self, rows: ItemRows) -> None:
        """Drop rows for others; the requests that hold them ask for them again."""
        for handle in list(rows.holders):
            request = self._with_items[handle]
            own = ITEMS.of(request)
            assert own is not None
            own.give_back(request, own.rows.index(rows, own.first))
        self.cache.evict(rows)

    def take_encodes(self) -> list[Encode]:
        """Return and clear the messages to send."""
        encodes, self._encodes = self._encodes, []
        return encodes

    def consumes(self) -> Mapping[type, Handler]:
        return {Encoded: self._encoded}

    def _encoded(self, answer: Encoded, client: int) -> None:
        """Continue with the requests that need the rows, or end those whose file could not be encoded."""
        rows = self.cache.encoded(answer)
        if rows is None:
            self._core.stats.num_stray_messages += 1
            return
        self.encode_seconds += answer.seconds
        self._changed()
        for request in [each for each in self._held.values() if _next_rows(each) is rows]:
            self.stop_waiting(request)
            self._spared[request.handle] = request
        if answer.problem:
            self._failed(rows, answer.problem)

    def _failed(self, rows: ItemRows, problem: str) -> None:
        """End the requests that have asked for the rows of this file. Another file may have the same content: the
        requests with that one ask again, and each attempt ends at least those whose file it has read."""
        self.num_failed += 1
        for handle in list(rows.holders):
            request, own = self._with_items.get(handle), None
            if request is not None and (own := ITEMS.of(request)) is not None:
                index = own.rows.index(rows, own.first)
                own.give_back(request, index)
                if own.items[index].path == rows.item.path:
                    self._end(request.part_of or request, "image_not_encoded", own.items[index].kind, problem)

    def _end(self, request: Request, code: str, kind: str, text: str) -> None:
        if request.num_output_tokens or request.status is not RequestStatus.WAITING:
            self._core.finish(request, EndReason.ERROR, detail=f"{code}: {text}")
        else:
            self._core.reject(request, Rejected(request.request_id, code, PARAMS[kind], text))

    # ---- orders, epochs, statistics and checks

    def order(self, kind: str) -> bool | None:
        return self.cache.reset() if kind == "reset_encoder_cache" else None

    def new_epoch(self, *, new_workers: bool) -> bool:
        """Have the rows encoded again by new workers. End requests that no step of the smaller budget could compute."""
        if new_workers:
            self._encodes = []
            for request in list(self._held.values()):
                self.stop_waiting(request)
            for request in self._with_items.values():
                own = ITEMS.of(request)
                assert own is not None
                own.give_back(request, own.first)
            self.cache.drop_all()
            self._changed()
        config = self._core.config
        for request in [each for each in self._with_items.values() if each.part_of is None]:
            own = ITEMS.of(request)
            assert own is not None
            longest, most = max(longest_atom(item, config) for item in own.items), most_atom_tokens(config)
            if longest > most:
                text = f"steps had to become smaller, to {most} positions of an image, and it has {longest}"
                self._end(request, "item_too_large", "image", text)
        self._ask()
        return False

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        if not self.is_enabled:
            return found
        return msgspec.structs.replace(
            found,
            encoder_cache_tokens=self.cache.capacity,
            num_encoder_cache_tokens=self.cache.used,
            num_encoder_runs=self.num_runs,
            num_encoder_failures=self.num_failed,
            num_encoder_hits=self.num_hits,
            num_encoder_evictions=self.cache.num_evicted,
            encoder_seconds=self.encode_seconds,
        )

    def check(self) -> None:
        self.cache.check()
        holders: dict[int, dict[int, int]] = {rows.number: {} for rows in self.cache.known.values()}
        numbers = dict.fromkeys(holders, 0)
        for request in self._table.requests.values():
            own = ITEMS.of(request)
            assert (own is not None) == (self._with_items.get(request.handle) is request), f"{request!r}: not counted"
            if own is None:
                continue
            assert 0 <= own.first <= own.asked <= len(own.items), f"{request!r}: impossible items"
            assert not request.is_steady or own.is_done, f"{request!r} is in steady decode and needs rows"
            for index, rows in enumerate(own.rows):
                assert self.cache.known.get(rows.item.digest) is rows, f"{rows!r} has requests and was forgotten"
                numbers[rows.number] += 1
                if own.first <= index < own.asked:
                    assert rows.is_cached, f"{request!r} holds {rows!r}"
                    held = holders[rows.number]
                    held[request.handle] = held.get(request.handle, 0) + 1
            is_held = request.wait_reason is WaitReason.ENCODER and request.handle in self._table.skipped_waiting
            assert is_held == (request.handle in self._held), f"{request!r}: wrong place"
            assert not is_held or own.rows[own.first].is_encoding, f"{request!r} waits for nothing"
        for rows in self.cache.known.values():
            assert rows.holders == holders[rows.number], f"{rows!r}: wrong holders"
            assert rows.num_items == numbers[rows.number], f"{rows!r}: wrong number of items"


def _next_rows(request: Request) -> ItemRows | None:
    own = ITEMS.of(request)
    return None if own is None or own.is_done else own.rows[own.first]


def _lacks_rows(own: RequestItems, position: int) -> bool:
    """Whether positions of a request, from its next one to this one, need the rows of its next item before them."""
    return not own.is_done and own.items[own.first].begin <= position and not own.rows[own.first].is_ready


def _whole_ranges(item: InputItem, begin: int, num_tokens: int, most: int) -> int:
    """Return the length of a chunk that divides no range of an item.

    The first one may take more than the request's part of the step, up to ``most``: with less it would wait for as
    long as others decode.
    """
    for first, count in item.ranges:
        if max(first, begin) < begin + num_tokens < first + count:
            if first > begin:
                return first - begin
            return first + count - begin if first + count - begin <= most else 0
    return num_tokens

"""Items: has the rows of requests' images computed, and lets no step compute a position before its rows are there."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from quire.protocol.block_hash import HashChain
from quire.protocol.wire.front_end_messages import Statistics
from quire.protocol.wire.item_messages import Encoded, InputItem, features_of
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.features.items.arriving_items import (
    PARAMS,
    check_items,
    longest_atom,
    most_atom_tokens,
)
from quire.scheduler_proc.features.items.asking import Asking
from quire.scheduler_proc.features.items.encoder_cache import EncoderCache
from quire.scheduler_proc.features.items.request_items import ITEMS, RequestItems, items_of
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request


class Items(Feature):
    """Asks workers to encode the items of requests, once for all requests with the same content.

    A request needs its items in order, until the steps that compute their positions are sent. Rows that none needs stay
    until others need their room. A running request whose next position has no rows is not computed, and a waiting one
    whose first step lacks rows is held (WaitReason.ENCODER) while they are being computed.

    Invariants (``check``): A request is held only while its next item is being encoded. A request in steady decode
    needs no rows.
    """

    name = "items"

    def __init__(self, core: Core) -> None:
        config, self._core = core.config, core
        self.is_enabled = bool(config.item_kinds)
        self._table, self._kv, self._clock = core.table, core.kv, core.clock
        self._grids_decide = config.model.vision is not None and bool(config.model.vision.mrope_section)
        """Whether the grids of images decide positions, so that rows need all items of their request."""
        self.cache = EncoderCache(config.encoder_cache_tokens, self._clock)
        self.asking = Asking(core, self.cache)
        self.num_failed = 0
        self.encode_seconds = 0.0
        if core.kv.pool.events is not None:
            core.kv.pool.events.covers = self._covers

    def is_busy(self) -> bool:
        return self.cache.num_encoding > 0

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until an Encode is answered or a request is admitted."""
        return not (self.asking.is_due or self.asking.lacks_room)

    @property
    def names(self) -> set[bytes]:
        """What identifies contents in the state. A trace must not shorten them as it does with block hashes."""
        of_requests = (item for request in self.asking.requests.values() for item in items_of(request).items)
        items = [*of_requests, *(rows.item for rows in self.cache.rows.values())]
        return {name for item in items for name in (item.digest, item.key)}.union(self.cache.dropped)

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

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        """Give a request its items, or those of its parent."""
        theirs = None if parent is None else ITEMS.of(parent)
        items = event.items if parent is None else ([] if theirs is None else theirs.items)
        if items:
            ITEMS.put(request, RequestItems(items))

    def hashing(self, event: Any, chain: Callable[..., HashChain]) -> Callable[..., HashChain]:
        return partial(chain, features=features_of(event.items)) if event.items else chain

    def _covers(self, request: Any, begin: int, end: int) -> tuple[str, ...]:
        """Return the digests of the items that reach into these positions of a request."""
        own = ITEMS.of(request)
        if own is None:
            return ()
        return tuple(item.digest.hex() for item in own.items if item.begin < end and item.end > begin)

    def added(self, request: Request) -> None:
        if ITEMS.of(request) is not None:
            self.asking.requests[request.handle] = request
            self.asking.is_due = True

    def stopped(self, request: Request) -> None:
        """Need all rows again, as far as the prefix cache will not have their positions."""
        if (own := ITEMS.of(request)) is not None:
            own.first, own.is_located = 0, False
            self.asking.is_due = True

    def stop_waiting(self, request: Request) -> None:
        if self.asking.is_held(request):
            self._table.release(request)

    def ended(self, request: Request) -> None:
        if self.asking.requests.pop(request.handle, None) is not None:
            self.asking.is_due = True

    # ---- steps

    def version(self, request: Request) -> object:
        own = ITEMS.of(request)
        return None if own is None else tuple(map(self.cache.ready, own.needed))

    def hits(
        self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int
    ) -> WaitReason | int | None:
        """Hold a waiting request which lacks rows for its first step, if they are being computed.

        With a few tokens before an image it would otherwise take a row and blocks, and others could not run meanwhile.
        If the rows are not being computed, it stays in the queue, where those behind it wait too: they would use rows
        that are there, and so keep the room that it needs.
        """
        own, asking = ITEMS.of(request), self.asking
        if asking.first is not request:
            asking.first = None  # admission has come to another one
        if own is None:
            return None
        own.is_located = True
        own.move_to(num_hit_tokens)
        if not self._lacks_rows(own, num_hit_tokens + step_tokens - 1):
            return None
        item = own.items[own.first]
        if self.cache.ready(item) is None:
            if asking.first is None:
                asking.first, asking.is_due = request, True
            return WaitReason.ENCODER
        self._table.hold(request, WaitReason.ENCODER)
        step = self._clock.sent + 1
        detail = f"{item.num_rows:,} rows of {item.digest.hex()[:16]}"
        self._core.decisions.note(Decision(step, "wait", request.request_id, WaitReason.ENCODER, detail=detail))
        return WaitReason.ENCODER

    def pause_reason(self, request: Request) -> WaitReason | None:
        own = ITEMS.of(request)
        return WaitReason.ENCODER if own is not None and self._lacks_rows(own, request.num_computed_tokens) else None

    def _lacks_rows(self, own: RequestItems, position: int) -> bool:
        """Whether positions of a request, from its next one to this one, need the rows of its next item before them."""
        return any(item.begin <= position and not self.cache.ready(item) for item in own.needed[:1])

    def chunk(self, request: Request, begin: int, num_tokens: int, most: int) -> int:
        """End a chunk before the first position without rows, and not inside what must be computed in one step.

        A hit may end there: the keys and values that it has were computed with the whole image, and the positions
        behind it attend to all of the image in the chunk that has the rest. So a chunk may begin inside a range.
        """
        own = ITEMS.of(request)
        if own is None:
            return num_tokens
        for item in own.needed:
            if item.begin >= begin + num_tokens:
                break
            if item.end <= begin:
                continue
            if not self.cache.ready(item):
                return max(item.begin - begin, 0)
            if item.kind in self._core.config.whole_kinds:
                num_tokens = _whole_ranges(item, begin, num_tokens, most)
        return num_tokens

    def building(self, request: Request, data: NewRequestData) -> NewRequestData:
        own = ITEMS.of(request)
        if own is None:
            return data
        items = [item for item in own.items if self._grids_decide or item.end > data.num_computed_tokens]
        return msgspec.structs.replace(data, items=items) if items else data

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        """Need the rows no more whose last positions the step computes. They keep their room until it is answered."""
        requests = self.asking.requests
        for handle, row in plan.rows.items() if requests else ():
            request = requests.get(handle)
            if request is None or not (own := items_of(request)).needed:
                continue
            begin = request.num_computed_tokens
            end = begin + row.num_tokens
            own.move_to(begin)  # a forked request begins behind what its parent has computed
            for item in own.needed:
                if item.begin >= end:
                    break
                self.cache.use(item, plan.step)
            own.move_to(end)
            self.asking.is_due = True
        return diff

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        self.asking.room_may_be_free()

    # ---- encoding

    def after_event(self) -> None:
        self.asking.give()

    def after_step(self, *, is_quiet: bool) -> None:
        """Requests that were held could be admitted in the step: their room may be taken again."""
        if self.asking.spared:
            self.asking.spared.clear()
            self.asking.room_may_be_free()
        self.asking.give()

    def consumes(self) -> Mapping[type, Handler]:
        return {Encoded: self._encoded}

    def _encoded(self, answer: Encoded, client: int) -> None:
        """Continue with the requests that need the rows, or end those whose file could not be encoded."""
        item = self.cache.encoded(answer)
        if item is None:
            self._core.stats.num_stray_messages += 1
            return
        self.encode_seconds += answer.seconds
        self.asking.is_due = True
        for request in filter(self.asking.is_held, self.asking.requests.values()):
            if items_of(request).needed[0].key == item.key:
                self.stop_waiting(request)
                self.asking.spared.add(request.handle)
        if answer.problem:
            self._failed(item, answer.problem)

    def _failed(self, item: InputItem, problem: str) -> None:
        """End the requests that have asked for the rows of this file. Another file may have the same content: the
        requests with that one ask again, and each attempt ends at least those whose file it has read."""
        self.num_failed += 1
        for handle, request in list(self.asking.requests.items()):
            own = items_of(request)
            has_asked = any((i.key, i.path) == (item.key, item.path) for i in own.items[own.first : own.asked])
            if has_asked and handle in self.asking.requests:  # a part of a search may have ended with another part
                why = Refusal("image_not_encoded", PARAMS[item.kind], problem)
                self._core.fail(request.part_of or request, why)

    # ---- orders, epochs, statistics and checks

    def order(self, kind: str) -> bool:
        """Drop all rows, unless a request needs some or a step uses them."""
        if kind != "reset_encoder_cache":
            return False
        needed = {item.key for request in self.asking.requests.values() for item in items_of(request).needed}
        if not needed.isdisjoint(self.cache.rows) or not all(map(self.cache.may_drop, self.cache.rows.values())):
            return False
        for key in list(self.cache.rows):
            self.cache.drop(key)
        return True

    def new_epoch(self, *, new_workers: bool) -> bool:
        """Have the rows encoded again by new workers. End requests that no step of the smaller budget could compute."""
        if new_workers:
            for request in self.asking.requests.values():
                self.stop_waiting(request)
            self.cache.drop_all()
            self.asking.is_due = True
        config = self._core.config
        for request in [each for each in self.asking.requests.values() if each.part_of is None]:
            longest, most = max(longest_atom(i, config) for i in items_of(request).items), most_atom_tokens(config)
            if longest > most:
                text = f"steps had to become smaller, to {most} positions of an image, and it has {longest}"
                self._core.fail(request, Refusal("item_too_large", PARAMS["image"], text))
        self.asking.give()
        return False

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        return msgspec.structs.replace(
            found,
            encoder_cache_tokens=self.cache.capacity,
            num_encoder_cache_tokens=self.cache.num_used,
            num_encoder_runs=self.asking.num_runs,
            num_encoder_failures=self.num_failed,
            num_encoder_hits=self.asking.num_hits,
            num_encoder_evictions=self.asking.num_evicted,
            encoder_seconds=self.encode_seconds,
        )

    def check(self) -> None:
        self.cache.check()
        for request in self._table.requests.values():
            own, is_held = ITEMS.of(request), self.asking.is_held(request)
            is_counted = self.asking.requests.get(request.handle) is request
            assert (own is not None) == is_counted, f"{request!r}: not counted"
            if own is not None:
                assert not request.is_steady or not own.needed, f"{request!r} is in steady decode and needs rows"
                assert not is_held or self.cache.ready(own.needed[0]) is False, f"{request!r} waits for nothing"


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

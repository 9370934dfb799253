"""Items: has the rows of requests' images computed, and lets no step compute a position before its rows are there."""

from collections.abc import Callable, Mapping
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
from quire.scheduler_proc.features.items.asking import Asking
from quire.scheduler_proc.features.items.encoder_cache import EncoderCache, ItemRows
from quire.scheduler_proc.features.items.request_items import ITEMS, RequestItems, items_of
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class Items(Feature):
    """Asks workers to encode the items of requests, once for all requests with the same content.

    A request *asks* for its items in order, and holds the rows of those that it has asked for until the steps that
    compute their positions are sent, or it ends or returns to the queue. Rows without a holder stay until others need
    their room. A running request whose next position has no rows is not computed, and a waiting one whose
    first step lacks rows is held (WaitReason.ENCODER) while they are being computed.

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
        self.asking = Asking(core, self.cache)
        self._held: dict[int, Request] = {}
        self._stopped_at = (-1, -1)
        """Changes of rows and of the pool when admission stopped last for lack of rows."""
        self.num_failed = 0
        self.encode_seconds = 0.0
        if core.kv.pool.events is not None:
            core.kv.pool.events.covers = self._covers

    def is_busy(self) -> bool:
        return self.cache.encoding > 0

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until an Encode is answered or a request is admitted."""
        return self.asking.is_settled

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
            self.asking.requests[request.handle] = request
            self.asking.changed()

    def stopped(self, request: Request) -> None:
        """Need all rows again, as far as the prefix cache will not have their positions."""
        if (own := ITEMS.of(request)) is not None:
            own.give_back(request, own.first)
            own.first = own.asked = 0
            own.is_located = False
            self.asking.changed()

    def stop_waiting(self, request: Request) -> None:
        if self._held.pop(request.handle, None) is not None:
            self._table.release(request)

    def ending(self, request: Request) -> None:
        self.stop_waiting(request)

    def ended(self, request: Request) -> None:
        if (own := ITEMS.of(request)) is None:
            return
        own.give_back(request, own.first)
        self.asking.forget(request)
        for rows in own.rows:
            rows.num_items -= 1
            self.cache.forget_unused(rows)
        self.asking.changed()

    # ---- steps

    def version(self, request: Request) -> object:
        own = ITEMS.of(request)
        return None if own is None else tuple((rows.is_cached, rows.is_encoding) for rows in own.rows)

    def obstacle(self, request: Request) -> WaitReason | None:
        """Return what ``hits`` has said, while nothing has changed: hits are not looked up in each step."""
        if request is not self.asking.first:
            self.asking.first = None  # admission has come to another one
        stops = self.asking.first is not None and self._stopped_at == self._changes
        return WaitReason.ENCODER if stops else None

    @property
    def _changes(self) -> tuple[int, int]:
        return self.asking.num_changes, self._kv.pool.num_changes

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
            if self.asking.first is not request:
                self.asking.first = request
                self.asking.changed()
            self._stopped_at = self._changes
            return WaitReason.ENCODER
        self._table.hold(request, WaitReason.ENCODER)
        self._held[request.handle] = request
        step = self._clock.sent + 1
        detail = f"{rows.num_rows:,} rows of {rows.item.digest.hex()[:16]}"
        self._core.decisions.note(Decision(step, "wait", request.request_id, WaitReason.ENCODER, detail=detail))
        return WaitReason.ENCODER

    def started(self, request: Request) -> None:
        if self.asking.first is request:
            self.asking.first = None

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
        requests = self.asking.requests
        for handle, row in plan.rows.items() if requests else ():
            request = requests.get(handle)
            if request is None or (own := items_of(request)).is_done:
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
            self.asking.changed()
        return diff

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        self.asking.room_may_be_free()

    # ---- encoding

    def after_event(self) -> None:
        self.asking.give()

    def after_step(self, *, is_quiet: bool) -> None:
        self.asking.step_planned()
        self.asking.give()

    def take_encodes(self) -> list[Encode]:
        """Return and clear the messages to send."""
        return self.asking.take_encodes()

    def consumes(self) -> Mapping[type, Handler]:
        return {Encoded: self._encoded}

    def _encoded(self, answer: Encoded, client: int) -> None:
        """Continue with the requests that need the rows, or end those whose file could not be encoded."""
        rows = self.cache.encoded(answer)
        if rows is None:
            self._core.stats.num_stray_messages += 1
            return
        self.encode_seconds += answer.seconds
        self.asking.changed()
        for request in [each for each in self._held.values() if _next_rows(each) is rows]:
            self.stop_waiting(request)
            self.asking.spared[request.handle] = request
        if answer.problem:
            self._failed(rows, answer.problem)

    def _failed(self, rows: ItemRows, problem: str) -> None:
        """End the requests that have asked for the rows of this file. Another file may have the same content: the
        requests with that one ask again, and each attempt ends at least those whose file it has read."""
        self.num_failed += 1
        for handle in list(rows.holders):
            request = self.asking.requests.get(handle)  # absent: a part of a search that has ended with another part
            if request is not None:
                own = items_of(request)
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
            for request in list(self._held.values()):
                self.stop_waiting(request)
            self.asking.begin_again()
        config = self._core.config
        for request in [each for each in self.asking.requests.values() if each.part_of is None]:
            longest, most = max(longest_atom(i, config) for i in items_of(request).items), most_atom_tokens(config)
            if longest > most:
                text = f"steps had to become smaller, to {most} positions of an image, and it has {longest}"
                self._end(request, "item_too_large", "image", text)
        self.asking.give()
        return False

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        if not self.is_enabled:
            return found
        return msgspec.structs.replace(
            found,
            encoder_cache_tokens=self.cache.capacity,
            num_encoder_cache_tokens=self.cache.used,
            num_encoder_runs=self.asking.num_runs,
            num_encoder_failures=self.num_failed,
            num_encoder_hits=self.asking.num_hits,
            num_encoder_evictions=self.cache.num_evicted,
            encoder_seconds=self.encode_seconds,
        )

    def check(self) -> None:
        self.cache.check()
        holders: dict[int, dict[int, int]] = {rows.number: {} for rows in self.cache.known.values()}
        numbers = dict.fromkeys(holders, 0)
        for request in self._table.requests.values():
            own = ITEMS.of(request)
            assert (own is not None) == (self.asking.requests.get(request.handle) is request), (
                f"{request!r}: not counted"
            )
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

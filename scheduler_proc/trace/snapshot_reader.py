"""Brings a new Scheduler to a snapshot, also to one of an earlier Quire.

The new Scheduler has the same configuration, and its components have their settings and callbacks. An object of the
snapshot that is the only one of its class becomes the only one of this class in the new Scheduler, wherever it is, so
that components may move. For the others the reader follows the same fields in both: where the new Scheduler has an
object of this class in the same field or at the same index of a list, that one is used. All others are made without
their constructors. Then all get the fields of the snapshot; what is not in it, such as callbacks, stays.
"""

import enum
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as fields_of
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.tokens import TokenStore
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.snapshot import (
    ABSENT,
    CONTAINERS,
    SENTINEL,
    Column,
    ObjectTable,
    PoolState,
    Snapshot,
    Value,
    objects_of,
    pools_of,
    state_name,
)

Cell: TypeAlias = Value | bytes
MakeTokens: TypeAlias = Callable[[Any, int, list[bytes]], TokenStore]
"""Makes a token store from the live one, if known, its number of tokens and the hashes of its full blocks."""

_WITHOUT_PLACES = (dict, Counter, OrderedDict, set, frozenset, deque, FreeKVCacheBlockQueue)
"""New ones are made of these: what two of them have at the same place need not belong together."""
_STATE = ("core.", "features.", "messages.steps", "requests.", "kv.", "costs.", "scheduler")
_PACKAGES = (
    *(f"quire.protocol.{name}." for name in ("request", "wire", "model")),
    *(f"quire.scheduler_proc.{name}" for name in _STATE),
)
"""Those with the classes of the state: they have no side effects."""
_RENAMED = {
    "adapters.Adapters._loads": "",
    "choice.Choice": "choice.LoadChoice",
    "decode_blocks.SteadyBlockAllocator._window": "",
    "drafting.NoDrafts": "drafting.DraftPolicy",
    "holds.Hold": "holds.BlockHold",
    "holds.BlockHold.tenant": "account",
    "in_flight.InFlightStep": "steps.InFlightStep",
    "steps.InFlightStep.pooled": "without_tokens",
    "request.Request.leader": "part_of",
    "request.Request.tenant": "account",
    "releases.Line": "releases.ReleaseLine",
    "saves.Route": "saves.SaveRoute",
    "search.Choice": "search.BeamChoice",
    "single_type.FullAttentionManager.granules": "",
    "tools.Choice": "tools.KeepChoice",
    "turns.Turns": "turns.AdapterTurns",
    "statistics.Counters": "decisions.Counters",
    "statistics.LoadCounts": "transfers.LoadCounts",
    "step.StepRow": "steps.StepRow",
    "steps.StepRow.forked_from": "shares_with",
    "steps.StepRow.pools": "completes",
    "steps.StepRow.side_bytes": "",
    "tenants.TenantShares": "tenants.Tenants",
    "windowed.SlidingWindowManager.granules": "",
}
"""Classes and fields in snapshots of an earlier Quire, with their names of today; empty for what is no state now."""
_MOVED = {
    "scheduler.Scheduler._drafting": "drafts._policy",
    "request_table.RequestTable.rows": "tenants.rows",
    "request_table.RequestTable._chosen": "beams._chosen",
    "results.Results.num_pooled": "core.num_without_tokens",
    "request.Request.draft_state": "drafts._states",
}
"""Fields in snapshots of an earlier Quire, with their place in today's Scheduler; those of requests are in a dict by
handle."""
_PARTS = {
    *("adapter", "adapter_name", "choice", "diverges", "is_overdue", "job_id", "parent", "pooling"),
    *("program", "row_bytes", "split_at"),
}
"""Fields that requests in snapshots of an earlier Quire had, and which are parts of them today (``RequestPart``)."""
_SHARED = {
    *("_adapters", "_beams", "_cache", "_decisions", "_drafting", "_forks", "_in_flight", "_kv", "_programs"),
    *("_pooling", "_results", "_stats", "_suspects", "_tenants", "_transfers", "_vocab_size", "kv", "tenants"),
}
"""Fields with which objects of an earlier Quire referred to settings, or to objects that have places of their own."""


def continue_tokens(store: Any, num_tokens: int, hashes: list[bytes]) -> TokenStore:
    made: TokenStore = store.fork(num_tokens)
    return made


def continue_from(
    scheduler: Scheduler, snapshot: Snapshot, live: Iterable[Any] = (), make_tokens: MakeTokens = continue_tokens
) -> None:
    """Bring an unused ``scheduler`` to the state. ``live``: the objects that it refers to.

    Raises:
        ValueError, TypeError, LookupError: the state is impossible. The Scheduler must be discarded.
    """
    try:
        for pool, state in zip(pools_of(scheduler), snapshot.pools, strict=True):
            _restore_blocks(pool, state)
        _Reader(snapshot, scheduler, live, make_tokens).read()
    except (AttributeError, RecursionError) as error:
        raise ValueError(f"invalid keyframe: {error}") from None
    budget = snapshot.max_num_batched_tokens
    scheduler.config = msgspec.structs.replace(scheduler.config, max_num_batched_tokens=budget)
    for request in scheduler.table.requests.values():
        scheduler.table.stops.add(request.stop_tokens)


def _restore_blocks(pool: BlockPool, state: PoolState) -> None:
    several = {block for block, _ in state.duplicates}
    for block, holders, key in zip(pool.blocks, state.holders, state.keys, strict=True):
        block.prev_free_block = block.next_free_block = None
        block.ref_cnt, block.block_hash = holders, key
    cached = [(at, key) for at, key in enumerate(state.keys) if key is not None and at not in several]
    cached += state.duplicates
    blocks = [pool.blocks[at] for at, _ in cached]
    pool.cached_block_hash_to_block.insert_blocks([key for _, key in cached], blocks)


class _Row:
    """One object of a table. ``begin``, ``end``: where a container has its content."""

    __slots__ = ("at", "begin", "end", "table")

    def __init__(self, table: ObjectTable, at: int, begin: int, end: int) -> None:
        self.table, self.at, self.begin, self.end = table, at, begin, end


class _Reader:
    """Makes objects from tables, or fills those that the Scheduler has at the same place."""

    def __init__(self, snapshot: Snapshot, scheduler: Scheduler, live: Iterable[Any], make_tokens: MakeTokens) -> None:
        self._scheduler, self._live, self._make_tokens = scheduler, iter(live), make_tokens
        self._made: dict[int, Any] = dict(enumerate(block for pool in pools_of(scheduler) for block in pool.blocks))
        self._made[SENTINEL] = KVCacheBlock(-1)
        self._first = len(self._made) - 1
        self._rows = [row for table in snapshot.tables for row in _rows(table)]
        self._kinds = _state_classes()
        self._own: dict[int, Any] = {self._first: scheduler}
        self._match_classes(snapshot.tables)
        self._empty: list[int] = []

    def read(self) -> None:
        for number, row in enumerate(self._rows, self._first):
            if row.table.name in ("tokens", "live"):
                self._made[number] = self._next_live(row)
            elif (own := self._own.get(number)) is not None:
                self._match_parts(own, row)
        # Objects refer to each other in circles, so each is made empty before any is filled. The stack replaces a
        # recursion, which a long chain of objects in an altered keyframe would make too deep.
        self._make(self._first)
        while self._empty:
            self._fill(self._empty.pop())

    def _next_live(self, row: _Row) -> Any:
        if row.table.name == "live":
            return next(self._live)
        _, hashes, counts = row.table.columns
        size: Any = counts.values[row.at]
        return self._make_tokens(next(self._live, None), size, hashes.data[row.begin : row.end])

    def _match_classes(self, tables: list[ObjectTable]) -> None:
        """Note which objects become the Scheduler's only ones of their class."""
        only = {kind: objects[0] for kind, objects in objects_of(self._scheduler).items() if len(objects) == 1}
        counts = Counter[str]()
        for table in tables:
            counts[table.name] += table.num_objects
        number = self._first
        for table in tables:
            own = only.get(self._kinds.get(_name_of_today(table.name), Any))
            if own is not None and counts[table.name] == 1:
                self._own[number] = own
            number += table.num_objects

    def _match_parts(self, own: Any, row: _Row) -> None:
        """Note which objects of the Scheduler, to which ``own`` refers, become those to which ``row`` refers."""
        if isinstance(own, list | tuple):
            parts = list(own)
        else:
            parts = [getattr(own, field, None) for field in row.table.fields]
        for part, cell in zip(parts, _cells(row), strict=False):
            if isinstance(cell, list) and cell and cell[0] >= self._first:
                name = self._rows[cell[0] - self._first].table.name
                kind = CONTAINERS.get(name) or (self._class(name) if "." in name else None)
                if kind is not None and kind not in _WITHOUT_PLACES and isinstance(part, kind):
                    self._own.setdefault(cell[0], part)

    def _make(self, number: int) -> Any:
        if number not in self._made:
            row = self._rows[number - self._first]
            made = self._whole(row)
            if made is None:
                kind: Any = CONTAINERS.get(row.table.name) or self._class(row.table.name)
                # A new list: the Scheduler's own may have content from its start, and is only added to.
                is_own = kind is not list and number in self._own
                made = self._own[number] if is_own else kind.__new__(kind)
                self._empty.append(number)
            self._made[number] = made
        return self._made[number]

    def _whole(self, row: _Row) -> Any:
        """Return an object that is made with its content, or None for one that is filled later."""
        name, cells = row.table.name, _cells(row)
        first: Any = cells[0] if cells else None
        match name:
            case "bytes":
                return first
            case "float":
                return float(first)
            case "ndarray":
                dtype, *shape = first.split()
                sizes, data = list(map(int, shape)), row.table.columns[1].data[row.at]
                return np.frombuffer(data, dtype).reshape(sizes).copy() if data else np.zeros(sizes, dtype)
            case "config":
                return msgspec.structs.replace(self._scheduler.config, max_num_batched_tokens=first)
            case "tuple" | "frozenset" | "queue":
                return CONTAINERS[name](list(map(self._value, cells)))
        if name in CONTAINERS:
            return None
        kind = self._class(name)
        if issubclass(kind, enum.Enum | tuple):
            return kind(*map(self._value, cells))
        if issubclass(kind, msgspec.Struct):
            return kind(**dict(zip(row.table.fields, map(self._value, cells), strict=True)))
        return None

    def _value(self, cell: Cell) -> Any:
        if isinstance(cell, list):
            return self._make(cell[0]) if cell else ABSENT
        return cell

    def _class(self, name: str) -> type:
        found = self._kinds.get(_name_of_today(name))
        if found is None:
            raise ValueError(f"invalid keyframe: {name[:100]!r} does not belong to a scheduler's state")
        return found

    def _set(self, number: int, field: str, value: Any) -> None:
        """Set a field, at its place of today."""
        made = self._made[number]
        if number in self._own and not hasattr(made, field):
            name = f"{state_name(type(made))}.{field}"
            if field in _SHARED and name not in _MOVED:
                return
            if name not in _MOVED:
                raise ValueError(f"invalid keyframe: {name[:100]!r} is not a part of a scheduler's state")
            owner, _, field = _MOVED[name].rpartition(".")
            made = attrgetter(owner)(self._scheduler)
        object.__setattr__(made, field, value)

    def _fill(self, number: int) -> None:
        row, made = self._rows[number - self._first], self._made[number]
        values = list(map(self._value, _cells(row)))
        if row.table.fields:
            kind = state_name(type(made))
            fields = [_RENAMED.get(f"{kind}.{field}", field) for field in row.table.fields]
            parts = {field: value for field, value in zip(fields, values, strict=True) if field and value is not ABSENT}
            if isinstance(made, Request) and "parts" not in parts:
                self._bring_up_to_date(parts)
            if is_dataclass(made) and number not in self._own:  # what an earlier Quire did not have
                for each in fields_of(made):
                    if each.name not in parts and each.default is not MISSING:
                        object.__setattr__(made, each.name, each.default)
            for name, value in parts.items():
                self._set(number, name, value)
            if isinstance(made, Request):
                self._scheduler.arrivals.follow(made)
        elif isinstance(made, dict):
            made.clear()
            dict.update(made, zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True))
        elif isinstance(made, set):
            made.update(values)
        elif isinstance(made, list | deque):
            made.extend(values)

    def _bring_up_to_date(self, fields: dict[str, Any]) -> None:
        """Move what a request of an earlier Quire had for features to where it is today."""
        fields["parts"] = {name: value for name in _PARTS if (value := fields.pop(name, None))}
        fields["generates"] = "pooling" not in fields["parts"]
        for name in fields.keys() - dir(Request):
            attrgetter(_MOVED[f"request.Request.{name}"])(self._scheduler)[fields["handle"]] = fields.pop(name)


def _rows(table: ObjectTable) -> Iterator[_Row]:
    ends = [0] * table.num_objects
    if table.name in CONTAINERS or table.name == "tokens":
        lengths: Any = table.columns[0].values
        ends = list(accumulate(lengths))
    for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield _Row(table, at, begin, end)


def _cells(row: _Row) -> list[Cell]:
    """Return the values of the fields, or what a container has; a dict first all keys, then all values."""
    if row.table.name in CONTAINERS:
        return [_cell(column, at) for column in row.table.columns[1:] for at in range(row.begin, row.end)]
    return [_cell(column, row.at) for column in row.table.columns]


def _cell(column: Column, at: int) -> Cell:
    if column.numbers:
        return [column.numbers[at]]
    return column.data[at] if column.data else column.values[at]


def _name_of_today(name: str) -> str:
    """Return the name of a class; in a trace of before version 4 it has all folders of its module."""
    short = ".".join(name.rsplit(".", 2)[-2:])
    return _RENAMED.get(short, short)


def _state_classes() -> dict[str, type]:
    """Return the classes of the state by name. A keyframe may be altered: it must not name any other."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_PACKAGES)]
    found = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    return {state_name(kind): kind for kind in found if kind.__module__.startswith(_PACKAGES)}

"""The whole state of a Scheduler, at any moment between two events, as plain data from which another one continues.

Its objects are found by following references, so that no owner lists its fields twice and no new field is forgotten.

``take`` numbers the objects: first the blocks of all pools, then each object that is referred to, the Scheduler first.
Objects of one class that are found together are a table with a column for each field: thousands of programs take tens
of calls, not a loop for each. Settings and callbacks are left out, and so is what affects no decision.
"""

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from math import isfinite
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.protocol.block_hash import BlockHasher
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Calls
from quire.scheduler_proc.core.scheduler import BareScheduler
from quire.scheduler_proc.features.beams.search import BeamSearch
from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_map import BlockHashToBlockMap
from quire.scheduler_proc.kv.block_metrics import BlockMetrics
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.messages.outputs import OutputCollector
from quire.scheduler_proc.requests.decisions import RecentDecisions
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.stop_table import StopTable
from quire.scheduler_proc.scheduler import Scheduler

Value: TypeAlias = bool | int | float | str | list[int] | None
"""A scalar; a list with the number of an object; or an empty list for what is left out."""
SENTINEL = -1
"""Number of the ends of a free queue. A copied block may have one as the place before it."""
CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, dict, Counter, OrderedDict, defaultdict)
}
CONTAINERS["queue"] = FreeKVCacheBlockQueue
_NAMES = {kind: name for name, kind in CONTAINERS.items()}
_NOT_STATE = (
    *(FunctionType, MethodType, BuiltinMethodType, partial, type, EngineConfig, KVLayout, BlockHasher, StopTable),
    *(Calls, OutputCollector, RecentDecisions, BlockMetrics, BlockHashToBlockMap, KVEventRecorder),
)
_WITH_TOKENS = (BeamSearch, RepetitionWatch)
"""Not in a trace, whose recorded endings decide instead."""
_LEFT_OUT = {BlockPool: ("blocks",), Core: ("replies", "side_jobs"), BareScheduler: ("features",)}
"""Fields that ``PoolState`` has, that affect no decision, or whose parts have names beside them."""


class _Absent:
    """The value of a field that an object does not have, or that is no state."""


ABSENT = _Absent()
_NO_OBJECTS = frozenset((type(None), bool, int, float, str, _Absent))


class Column(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """One field of all objects of a table: their ``values``, or ``numbers`` of objects only, or ``data`` only."""

    values: list[Value] = []
    numbers: list[int] = []
    data: list[bytes] = []


class ObjectTable(msgspec.Struct, array_like=True, frozen=True):
    """Objects of one class, which have successive numbers.

    Attributes:
        name: of a class with ``fields`` (``state_name``), a container, or another kind of values.
        columns: by field; of containers, their lengths and then their contents, one after the other.
    """

    name: str
    num_objects: int
    fields: list[str]
    columns: list[Column]


class PoolState(msgspec.Struct, array_like=True, frozen=True):
    """By block, its number of holders and its key; and (block, key) of keys with several blocks, in lookup order."""

    holders: list[int]
    keys: list[bytes | None]
    duplicates: list[tuple[int, bytes]] = []


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state. The only object of the first table is the Scheduler."""

    step: int
    max_num_batched_tokens: int
    tables: list[ObjectTable]
    pools: list[PoolState]


_decoder = msgspec.msgpack.Decoder(Snapshot)


def take(scheduler: Scheduler, public: Callable[[Any], Any] | None = None) -> tuple[Snapshot, list[Any]]:
    """Return the state, and the objects that it refers to: token stores, which only grow, and frozen structs.

    Costs O(blocks + requests + programs): docs/traces.md has the seconds.

    Args:
        public: converts frozen structs to what a trace may have of them; the state then refers to no object.
    """
    pools = pools_of(scheduler)
    writer = _Writer(pools, public)
    states = [
        PoolState(
            list(map(attrgetter("ref_cnt"), pool.blocks)),
            list(map(attrgetter("block_hash"), pool.blocks)),
            pool.cached_block_hash_to_block.duplicates(),
        )
        for pool in pools
    ]
    budget = scheduler.config.max_num_batched_tokens
    tables = writer.tables(scheduler)
    found = Snapshot(step=scheduler.last_step, max_num_batched_tokens=budget, tables=tables, pools=states)
    return found, writer.live


def state_name(kind: type) -> str:
    """Return the name of a class in a snapshot: with its file, but without its folders, between which files move."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def decode_snapshot(data: bytes) -> Snapshot:
    return _decoder.decode(data)


def objects_of(scheduler: Scheduler) -> dict[type, list[Any]]:
    """Return the objects to which a Scheduler refers, by class."""
    writer = _Writer(pools_of(scheduler), None)
    writer.tables(scheduler)
    found: dict[type, list[Any]] = {}
    for kind, objects in writer.found:
        found.setdefault(kind, []).extend(objects)
    return found


def pools_of(scheduler: Scheduler) -> list[BlockPool]:
    kv = scheduler.kv
    slots = [] if kv.states is None else [kv.states.pool]
    return [kv.pool, *(tier.pages for tier in kv.tiers), *slots]


class _Writer:
    """Makes tables."""

    def __init__(self, pools: list[BlockPool], public: Callable[[Any], Any] | None) -> None:
        self.live: list[Any] = []
        self._public = public
        blocks = [block for pool in pools for block in pool.blocks]
        self._numbers = dict(zip(map(id, blocks), count()))
        self._next = len(blocks)
        self.found: list[tuple[type, list[Any]]] = []
        """All objects by table, which also keeps them: the id of a deleted object may become another one's."""
        self._public_forms: list[Any] = []
        self._is_state: dict[type, bool] = {}

    def tables(self, scheduler: Scheduler) -> list[ObjectTable]:
        self._column([scheduler])
        # Each table may number objects that it is the first to refer to, so that ``found`` grows meanwhile.
        return [self._table(kind, objects) for kind, objects in self.found]

    def _column(self, parts: Sequence[Any]) -> Column:
        kinds = set(map(type, parts))
        if kinds == {bytes}:
            return Column(data=list(parts))
        if any(issubclass(kind, np.generic) for kind in kinds):
            return self._column([each.item() if isinstance(each, np.generic) else each for each in parts])
        if self._public is not None and not kinds.isdisjoint(_WITH_TOKENS):
            return self._column([None if isinstance(each, _WITH_TOKENS) else each for each in parts])
        if kinds <= {int, str, bool}:
            return Column(list(parts))
        if kinds.isdisjoint(_NO_OBJECTS):
            numbers = self._number(parts)
            return Column(numbers=[numbers[id(each)] for each in parts])
        numbers = self._number(filter(_is_object, parts))
        return Column([[numbers[id(e)]] if _is_object(e) else [] if e is ABSENT else e for e in parts])

    def _number(self, objects: Iterable[Any]) -> dict[int, int]:
        """Give numbers to objects that have none: the next ones, in a table for each class. Returns all by id."""
        numbers = self._numbers
        new: dict[Any, dict[int, Any]] = {}
        for each in objects:
            if id(each) not in numbers:
                new.setdefault(type(each), {})[id(each)] = each
        for kind, found in new.items():
            if kind is KVCacheBlock:
                numbers.update(dict.fromkeys(found, SENTINEL))
            else:
                numbers.update(zip(found, count(self._next), strict=False))
                self._next += len(found)
                self.found.append((kind, list(found.values())))
        return numbers

    def _table(self, kind: Any, objects: list[Any]) -> ObjectTable:
        name, fields = state_name(kind), list[str]()
        if kind in _NAMES:
            name, columns = _NAMES[kind], self._contents(kind, objects)
        elif kind is float or kind is bytes:
            name, columns = kind.__name__, [Column(list(map(str, objects))) if kind is float else Column(data=objects)]
        elif kind is np.ndarray:
            # In a trace, those with two dimensions are zeros: the tokens of SteadyDecode by step and request.
            data = [b"" if self._public and each.ndim == 2 else each.tobytes() for each in objects]
            shapes = [" ".join(map(str, (each.dtype.str, *each.shape))) for each in objects]
            name, columns = "ndarray", [Column(list(shapes)), Column(data=data)]
        elif kind is EngineConfig:  # of what was planned with it
            name, columns = "config", [Column([each.max_num_batched_tokens for each in objects])]
        elif hasattr(kind, "follow") and hasattr(kind, "tail"):
            self.live += objects
            hashes = [each.block_hashes if self._public else [] for each in objects]
            name, columns = "tokens", [*self._contents(list, hashes), Column(list(map(len, objects)))]
        elif issubclass(kind, enum.Enum):
            columns = [self._column([each.value for each in objects])]
        elif issubclass(kind, tuple):
            columns = list(map(self._column, zip(*objects, strict=True)))
        elif issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen and self._public is None:
            self.live += objects
            name, columns = "live", []
        else:
            if issubclass(kind, msgspec.Struct) and self._public is not None:
                objects = list(map(self._public, objects))
                self._public_forms += objects
            fields, columns = self._fields(objects)
        return ObjectTable(name, len(objects), fields, columns)

    def _contents(self, kind: Any, containers: list[Any]) -> list[Column]:
        if kind is FreeKVCacheBlockQueue:
            containers = [each.blocks() for each in containers]
        elif issubclass(kind, set | frozenset):
            containers = list(map(sorted, containers))  # the order of a set is not kept
        columns = [Column(list(map(len, containers))), self._column([part for each in containers for part in each])]
        if issubclass(kind, dict):
            columns.append(self._column([part for each in containers for part in each.values()]))
        return columns

    def _fields(self, objects: list[Any]) -> tuple[list[str], list[Column]]:
        """Return the fields that are state, with their values."""
        kind = type(objects[0])
        names = getattr(kind, "__struct_fields__", None)
        if names is None:
            slots = (slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ()))
            names = dict.fromkeys([*slots, *(name for each in objects for name in getattr(each, "__dict__", ()))])
        left_out = {field for base, fields in _LEFT_OUT.items() if issubclass(kind, base) for field in fields}
        found = {}
        for name in [name for name in names if name not in left_out]:
            parts = [getattr(each, name, ABSENT) for each in objects]
            if not all(map(self._counts, set(map(type, parts)))):
                parts = [each if self._counts(type(each)) else ABSENT for each in parts]
            if any(each is not ABSENT for each in parts):
                found[name] = self._column(parts)
        return list(found), list(found.values())

    def _counts(self, kind: type) -> bool:
        if kind not in self._is_state:
            self._is_state[kind] = not issubclass(kind, _NOT_STATE) and not hasattr(kind, "block_filled")
        return self._is_state[kind]


def _is_object(each: Any) -> bool:
    return type(each) not in _NO_OBJECTS or (type(each) is float and not isfinite(each))

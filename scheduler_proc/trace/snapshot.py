"""The whole state of a Scheduler, at any moment between two events, as plain data from which another one continues.

Its objects are found by following references, so that no owner lists its fields twice and no new field is forgotten.
Settings and callbacks are left out: the Scheduler that continues has its own.
"""

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.protocol.block_hash import BlockHasher
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.beams.search import BeamSearch
from quire.scheduler_proc.core.arrivals import Arrivals
from quire.scheduler_proc.core.outputs import OutputCollector
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.core.statistics import RecentDecisions
from quire.scheduler_proc.kv.block import FreeKVCacheBlockQueue, KVCacheBlock
from quire.scheduler_proc.kv.block_map import BlockHashToBlockMap
from quire.scheduler_proc.kv.block_metrics import BlockMetrics
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.stop_table import StopTable
from quire.scheduler_proc.requests.tokens import TokenStore

Value: TypeAlias = bool | int | float | str | list[int] | None
"""A scalar, or a list with the index of a node."""
MakeTokens: TypeAlias = Callable[[Any, int, list[bytes]], TokenStore]
"""Makes a token store from the live one, if known, its number of tokens and the hashes of its full blocks."""

_SCALARS = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, dict, Counter, OrderedDict, defaultdict)
}
_NOT_STATE = (
    *(FunctionType, MethodType, BuiltinMethodType, partial, type, EngineConfig, KVLayout, BlockHasher, StopTable),
    *(OutputCollector, RecentDecisions, BlockMetrics, BlockHashToBlockMap, KVEventRecorder),
)
_WITH_TOKENS = (BeamSearch, RepetitionWatch)
"""Not in a trace, whose recorded endings decide instead."""
_LEFT_OUT = {BlockPool: ("blocks", "null_block"), Arrivals: ("replies",)}
"""Fields that ``PoolState`` has, or that affect no decision."""
_PACKAGES = (
    *(f"quire.protocol.{name}." for name in ("request", "wire", "model")),
    *(f"quire.scheduler_proc.{name}." for name in ("core", "requests", "kv", "adapters", "programs", "beams", "costs")),
)
"""Those with the classes of the state: they have no side effects."""


class Node(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """An object. ``kind``: index of its class and fields. ``data``: hashes, or the content of an array."""

    kind: int
    values: list[Value] = []
    data: list[bytes] = []


class PoolState(msgspec.Struct, array_like=True, frozen=True):
    """By block, its number of holders and its key; and (block, key) of keys with several blocks, in lookup order."""

    holders: list[int]
    keys: list[bytes | None]
    duplicates: list[tuple[int, bytes]] = []


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state. ``kinds``: (class, fields) of the nodes, of which the first is the Scheduler."""

    step: int
    max_num_batched_tokens: int
    kinds: list[tuple[str, list[str]]]
    nodes: list[Node]
    pools: list[PoolState]


_decoder = msgspec.msgpack.Decoder(Snapshot)


def take(scheduler: Scheduler, public: Callable[[Any], Any] | None = None) -> tuple[Snapshot, list[Any]]:
    """Return the state, and the objects that it refers to: token stores, which only grow, and frozen structs.

    Costs O(blocks + requests): some 40 ms with 65,536 blocks and 256 requests.

    Args:
        public: converts frozen structs to what a trace may have of them; the state then refers to no object.
    """
    pools = _pools(scheduler)
    writer = _Writer(pools, public)
    writer.value(scheduler)
    nodes = [writer.node(each) for each in writer.found]  # grows meanwhile
    states = [
        PoolState(
            list(map(attrgetter("ref_cnt"), pool.blocks)),
            list(map(attrgetter("block_hash"), pool.blocks)),
            pool.cached_block_hash_to_block.duplicates(),
        )
        for pool in pools
    ]
    kinds = [(name, list(fields)) for name, fields in writer.kinds]
    budget = scheduler.config.max_num_batched_tokens
    found = Snapshot(step=scheduler.last_step, max_num_batched_tokens=budget, kinds=kinds, nodes=nodes, pools=states)
    return found, writer.live


def decode_snapshot(data: bytes) -> Snapshot:
    return _decoder.decode(data)


def _pools(scheduler: Scheduler) -> list[BlockPool]:
    return [scheduler.kv.pool, *(tier.pages for tier in scheduler.kv.tiers)]


class _Writer:
    """Makes nodes. ``found``: the objects of all nodes, in the order in which they are referred to first."""

    def __init__(self, pools: list[BlockPool], public: Callable[[Any], Any] | None) -> None:
        self._pools, self._public = pools, public
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}
        self.found: list[Any] = []
        self.live: list[Any] = []
        self._indices: dict[int, int] = {}
        self._names: dict[type, list[str]] = {}
        self._is_state: dict[type, bool] = {}

    def value(self, each: Any) -> Value:
        if type(each) in _SCALARS and (type(each) is not float or isfinite(each)):
            return each  # type: ignore[no-any-return]
        if isinstance(each, np.generic):
            return self.value(each.item())
        if self._public is not None and isinstance(each, _WITH_TOKENS):
            return None
        index = self._indices.get(id(each))
        if index is None:
            index = self._indices[id(each)] = len(self.found)
            self.found.append(each)
        return [index]

    def node(self, each: Any) -> Node:
        kind = type(each)
        name = kind.__name__
        if _CONTAINERS.get(name) is kind:
            return self._container(name, each)
        if kind in _SCALARS:
            return self._node(name, [str(each)])
        if kind is bytes:
            return self._node(name, [], [each])
        if kind is np.ndarray:
            has_tokens = each.ndim == 2  # the steps by requests of SteadyDecode
            data = [] if has_tokens and self._public else [each.tobytes()]
            return self._node(name, [each.dtype.str, *each.shape], data)
        if kind is EngineConfig:  # of what was planned with it
            return self._node("config", [each.max_num_batched_tokens])
        if kind is KVCacheBlock:
            return self._node("blocks", [0, *self._ids([each])])
        if kind is FreeKVCacheBlockQueue:
            return self._node("queue", self._ids(each.blocks()))
        if hasattr(kind, "follow") and hasattr(kind, "tail"):
            self.live.append(each)
            return self._node("tokens", [len(each)], each.block_hashes if self._public else [])
        name = f"{kind.__module__}.{name}"
        if isinstance(each, enum.Enum):
            return self._node(name, [self.value(each.value)])
        if isinstance(each, tuple):
            return self._node(name, [self.value(part) for part in each])
        if isinstance(each, msgspec.Struct) and each.__struct_config__.frozen:
            if self._public is None:
                self.live.append(each)
                return self._node("live", [])
            each = self._public(each)
        fields = [(field, getattr(each, field)) for field in self._fields(each)]
        fields = [(field, part) for field, part in fields if self._counts(part)]
        return self._node(name, [self.value(part) for _, part in fields], fields=tuple(field for field, _ in fields))

    def _container(self, name: str, each: Any) -> Node:
        kinds = set(map(type, each)) if name == "list" else ()
        if len(kinds) == 1:  # many are long
            if int in kinds:
                return self._node(name, each.copy())
            if bytes in kinds:
                return self._node("hashes", [], each.copy())
            if KVCacheBlock in kinds:
                return self._node("blocks", [1, *self._ids(each)])
        parts = each if not isinstance(each, dict) else (part for item in each.items() for part in item)
        return self._node(name, [self.value(part) for part in parts])

    def _node(self, name: str, values: list[Any], data: Iterable[bytes] = (), fields: tuple[str, ...] = ()) -> Node:
        return Node(self.kinds.setdefault((name, fields), len(self.kinds)), values, list(data))

    def _ids(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Return the number of the pool, and the ids of the blocks. Sentinels are in none."""
        at = blocks[0].block_id if blocks else -1
        numbers = (i for i, p in enumerate(self._pools) if 0 <= at < p.num_blocks and p.blocks[at] is blocks[0])
        return [next(numbers, -1), *[block.block_id for block in blocks]]

    def _fields(self, each: Any) -> list[str]:
        kind = type(each)
        if kind not in self._names:
            slots = [slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())]
            self._names[kind] = list(getattr(kind, "__struct_fields__", slots))
        names = [name for name in self._names[kind] if hasattr(each, name)]
        left_out = {name for base, found in _LEFT_OUT.items() if issubclass(kind, base) for name in found}
        return names + [name for name in getattr(each, "__dict__", ()) if name not in left_out]

    def _counts(self, part: Any) -> bool:
        kind = type(part)
        if kind not in self._is_state:
            self._is_state[kind] = not issubclass(kind, _NOT_STATE) and not hasattr(kind, "block_filled")
        return self._is_state[kind]


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
        for pool, state in zip(_pools(scheduler), snapshot.pools, strict=True):
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
    for block, count, key in zip(pool.blocks, state.holders, state.keys, strict=True):
        block.prev_free_block = block.next_free_block = None
        block.ref_cnt, block.block_hash = count, key
    cached = [(at, key) for at, key in enumerate(state.keys) if key is not None and at not in several]
    cached += state.duplicates
    blocks = [pool.blocks[at] for at, _ in cached]
    pool.cached_block_hash_to_block.insert_blocks([key for _, key in cached], blocks)


class _Reader:
    """Makes objects from nodes, or fills those that the Scheduler has at the same place."""

    def __init__(self, snapshot: Snapshot, scheduler: Scheduler, live: Iterable[Any], make_tokens: MakeTokens) -> None:
        self._nodes, self._kinds = snapshot.nodes, snapshot.kinds
        self._pools, self._scheduler = _pools(scheduler), scheduler
        self._live, self._make_tokens = iter(live), make_tokens
        self._own: dict[int, Any] = {0: scheduler}
        self._made: dict[int, Any] = {}
        self._empty: list[int] = []

    def read(self) -> None:
        for index, node in enumerate(self._nodes):
            name, fields = self._kinds[node.kind]
            if name == "tokens":
                count: Any = node.values[0]
                self._made[index] = self._make_tokens(next(self._live, None), count, node.data)
            elif name == "live":
                self._made[index] = next(self._live)
            elif (own := self._own.get(index)) is not None:
                is_list = isinstance(own, list | tuple)
                parts = list(own) if is_list else [getattr(own, field, None) for field in fields]
                for part, value in zip(parts, node.values, strict=False):
                    self._match(part, value)
        self._make(0)
        while self._empty:
            self._fill(self._empty.pop())

    def _match(self, part: Any, value: Value) -> None:
        """Note that the Scheduler has ``part`` where the state has ``value``, if these are components."""
        if not isinstance(value, list):
            return
        name, _ = self._kinds[self._nodes[value[0]].kind]
        known = _CONTAINERS.get(name) or (_class(name) if "." in name else ())
        if isinstance(part, known) and name not in ("dict", "Counter", "set", "deque", "OrderedDict", "frozenset"):
            self._own.setdefault(value[0], part)

    def _make(self, index: int) -> Any:
        if index in self._made:
            return self._made[index]
        node = self._nodes[index]
        name, fields = self._kinds[node.kind]
        made = self._whole(name, node, fields)
        if made is None:
            kind: Any = _CONTAINERS.get(name) or _class(name)
            is_own = kind is not list and index in self._own
            made = self._own[index] if is_own else kind.__new__(kind)
            self._empty.append(index)
        self._made[index] = made
        return made

    def _whole(self, name: str, node: Node, fields: list[str]) -> Any:
        """Return an object that is made at once, or None for one that is filled later."""
        values: list[Any] = node.values
        match name:
            case "hashes":
                return node.data.copy()
            case "bytes":
                return node.data[0]
            case "float":
                return float(values[0])
            case "ndarray":
                dtype, *shape = values
                return np.frombuffer(node.data[0], dtype).reshape(shape).copy() if node.data else np.zeros(shape, dtype)
            case "config":
                return msgspec.structs.replace(self._scheduler.config, max_num_batched_tokens=values[0])
            case "queue":
                return FreeKVCacheBlockQueue(self._blocks(values))
            case "blocks":
                blocks = self._blocks(values[1:])
                return blocks if values[0] else blocks[0]
            case "tuple" | "frozenset":
                return _CONTAINERS[name](map(self._value, values))
        if name in _CONTAINERS:
            return None
        kind = _class(name)
        if issubclass(kind, enum.Enum | tuple):
            return kind(*map(self._value, values))
        if issubclass(kind, msgspec.Struct):
            return kind(**dict(zip(fields, map(self._value, values), strict=True)))
        return None

    def _blocks(self, ids: list[int]) -> list[KVCacheBlock]:
        if ids[0] < 0:
            return [KVCacheBlock(-1) for _ in ids[1:]]
        blocks = self._pools[ids[0]].blocks
        return [blocks[block_id] for block_id in ids[1:]]

    def _value(self, value: Value) -> Any:
        return self._make(value[0]) if isinstance(value, list) else value

    def _fill(self, index: int) -> None:
        node, made = self._nodes[index], self._made[index]
        values = list(map(self._value, node.values))
        if fields := self._kinds[node.kind][1]:
            for field, value in zip(fields, values, strict=True):
                object.__setattr__(made, field, value)
            if isinstance(made, Request):
                self._scheduler.arrivals.follow(made)
        elif isinstance(made, dict):
            made.clear()
            dict.update(made, zip(values[::2], values[1::2], strict=True))
        elif isinstance(made, set):
            made.update(values)
        elif isinstance(made, list | deque):
            made.extend(values)


def _class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    found = vars(sys.modules[module]).get(attribute) if name.startswith(_PACKAGES) and module in sys.modules else None
    if not isinstance(found, type):
        raise ValueError(f"invalid keyframe: {name[:100]!r} does not belong to a scheduler's state")
    return found

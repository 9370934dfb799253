"""The Router: consumes messages of front ends and events of engines, and answers which engine gets each request."""

from collections import Counter, OrderedDict
from typing import assert_never

from quire.protocol.process.router_figures import RouterFigures
from quire.protocol.routing import KEY_BYTES, EnginePlace, RoutingConfig
from quire.protocol.wire.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from quire.protocol.wire.router_messages import ClientJob, Placed, Progress, Route, Routed
from quire.router_proc.core.choice import Option, RoutingQuestion, choose, set_paces
from quire.router_proc.core.events import (
    CacheChanged,
    CacheForgotten,
    EngineMeasured,
    EnginesKnown,
    FrontEndDropped,
    RouterEvent,
)
from quire.router_proc.core.index import NO_HIT, BlockIndex, CachedPrefix, keys_of
from quire.router_proc.core.load import EngineLoad, Placement, Ticket

MAX_JOBS = 65_536
"""Jobs whose last engine is remembered, those with the newest requests."""


class Router:
    """Sans-I/O and deterministic: the same events give the same answers.

    Owns the index of contents, and the placements of all requests that front ends have routed and not ended. An engine
    that was replaced, or whose scheduler was, has none of them: front ends route them once more.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self.config = config
        self.index = BlockIndex()
        self._places: dict[int, EnginePlace] = {}
        self._loads: dict[int, EngineLoad] = {}
        self._accepting: list[int] = []
        """Engines that serve, by number."""
        self._placements: dict[Ticket, Placement] = {}
        self._jobs: OrderedDict[ClientJob, int] = OrderedDict()
        self._num_choices = 0
        self._choices: Counter[tuple[int, str]] = Counter()
        self._messages: list[tuple[int, Routed]] = []

    def consume(self, event: RouterEvent, client: int = 0) -> None:
        """Process a message of a front end, with its number ``client``, or an event of the process."""
        match event:
            case Route():
                self._messages.append((client, self._route(event, client)))
            case Progress():
                self._progress(event, client)
            case CacheChanged():
                self._cache_changed(event)
            case Placed():
                self._placed(event, client)
            case EnginesKnown():
                self._engines_known(event)
            case CacheForgotten():
                self.index.forget(event.engine)
            case EngineMeasured():
                self._engine_measured(event)
            case FrontEndDropped():
                self.drop_client(event.client)
            case _:
                assert_never(event)

    def take_messages(self) -> list[tuple[int, Routed]]:
        """Return the answers since the last call, with the clients that get them."""
        messages, self._messages = self._messages, []
        return messages

    def drop_client(self, client: int) -> None:
        """Forget the requests of a front end that has disconnected, and its answers."""
        for ticket in [ticket for ticket in self._placements if ticket[0] == client]:
            self._remove(ticket)
        self._messages = [each for each in self._messages if each[0] != client]

    # ---- requests

    def _route(self, route: Route, client: int) -> Routed:
        ticket, job = (client, route.ticket), route.job
        self._remove(ticket)
        # A front end that asks once more, because an engine has died, replaces its earlier question.
        options = self._options(route)
        if not options:
            self._choices[-1, ""] += 1
            return Routed(route.ticket, -1, "")
        question = RoutingQuestion(route.num_tokens, route.adapter, self._jobs.get(job, -1) if route.job_id else -1)
        option, reason = choose(self.config.policy, question, options)
        num_cached = min(option.num_cached, route.num_tokens)
        # The first key that the engine does not have names what this request will add to its cache.
        at = option.num_cached // (self._places[option.engine].block_size or 1) * KEY_BYTES
        placement = Placement(option.engine, route.num_tokens - num_cached, route.keys[at : at + KEY_BYTES])
        self._add(ticket, placement, job, route.keys)
        if route.adapter:
            option.load.use_adapter(route.adapter, self.config.max_loras)
        self._choices[option.engine, reason] += 1
        return Routed(route.ticket, option.engine, reason, num_cached)

    def _options(self, route: Route) -> list[Option]:
        """Return the engines that accept the request; excluded ones only if there is no other."""
        engines = self._accepting
        if route.excluded:
            # An engine that has just refused is better than none: it may have room again, and its refusal reaches the
            # client otherwise.
            engines = [engine for engine in engines if engine not in route.excluded] or engines
        if not route.keys or self.config.policy != "cache":
            return [Option(engine, self._loads[engine]) for engine in engines]
        hits = self._hits(route.keys, engines)
        options = []
        for engine in engines:
            load, hit = self._loads[engine], hits.get(engine, NO_HIT)
            num_blocks, keys_per_block = hit.num_blocks, load.keys_per_block
            # Prompts of one conversation or one system prompt often arrive together. Without the blocks that waiting
            # requests are about to cache, each of them would be sent to another engine, which computes them once more.
            if load.num_waiting:
                num_blocks = load.num_expected(route.keys, num_blocks * keys_per_block) // keys_per_block
            size = self._places[engine].block_size * keys_per_block
            options.append(Option(engine, load, num_blocks * size, *hit.elsewhere(size)))
        return options

    def _hits(self, raw: bytes, engines: list[int]) -> dict[int, CachedPrefix]:
        keys = keys_of(raw)
        sizes = {self._loads[engine].keys_per_block for engine in engines}
        if sizes == {1}:
            return self.index.hits(keys)
        hits: dict[int, CachedPrefix] = {}
        for size in sorted(sizes):  # a block's hash is that of its last part
            found = self.index.hits(keys[size - 1 :: size])
            hits |= {engine: hit for engine, hit in found.items() if self._loads[engine].keys_per_block == size}
        return hits

    def _placed(self, placed: Placed, client: int) -> None:
        ticket = client, placed.ticket
        self._remove(ticket)
        # A front end reports where its requests are when a router was replaced. Engines that ended meanwhile are not
        # known.
        if placed.engine in self._loads:
            placement = Placement(placed.engine, placed.num_tokens, has_started=placed.has_started)
            self._add(ticket, placement, placed.job, b"")

    def _progress(self, progress: Progress, client: int) -> None:
        """Tickets that are not known belong to an engine that was replaced, or to none yet."""
        for number in progress.started:
            ticket = client, number
            if (placement := self._placements.get(ticket)) is not None:
                self._loads[placement.engine].start(ticket, placement)
        for number in progress.ended:
            self._remove((client, number))

    def _add(self, ticket: Ticket, placement: Placement, job: ClientJob, keys: bytes) -> None:
        load = self._loads[placement.engine]
        self._placements[ticket] = placement
        load.add(ticket, placement, keys)
        self._num_choices += 1
        # A count and not a time, so that a replay chooses the same.
        load.last_chosen = self._num_choices
        if job[1]:
            self._jobs[job] = placement.engine
            self._jobs.move_to_end(job)
            if len(self._jobs) > MAX_JOBS:
                self._jobs.popitem(last=False)

    def _remove(self, ticket: Ticket) -> None:
        placement = self._placements.pop(ticket, None)
        if placement is not None:
            self._loads[placement.engine].remove(ticket, placement)

    # ---- engines

    def _engines_known(self, event: EnginesKnown) -> None:
        before, self._places = self._places, {place.engine: place for place in event.engines}
        for engine, old in before.items():
            new = self._places.get(engine)
            if new is None or (new.directory, new.incarnation) != (old.directory, old.incarnation):
                self._forget_engine(engine)
        for engine in self._places:
            self._loads.setdefault(engine, EngineLoad())
        self._set_paces()
        self._accepting = sorted(engine for engine, place in self._places.items() if place.state == "serving")

    def _forget_engine(self, engine: int) -> None:
        for ticket in [ticket for ticket, placement in self._placements.items() if placement.engine == engine]:
            del self._placements[ticket]
        del self._loads[engine]
        self.index.forget(engine)

    def _engine_measured(self, event: EngineMeasured) -> None:
        if event.engine not in self._loads:
            return
        if event.pace > 0:
            self._loads[event.engine].measured = event.pace
            self._set_paces()
        if event.max_blocks > 0:
            self.index.limit(event.engine, event.max_blocks)

    def _set_paces(self) -> None:
        set_paces([(self._places[engine].device, load) for engine, load in self._loads.items()])

    def _cache_changed(self, event: CacheChanged) -> None:
        if event.engine in self._loads:
            for change in event.events:
                self._change(event.engine, change)

    def _change(self, engine: int, change: KVEvent) -> None:
        match change:
            case BlocksStored():
                self.index.stored(engine, change.hashes, change.medium)
                block_size = self._places[engine].block_size
                # Learned from events, because only the engine knows which of its groups has larger blocks.
                self._loads[engine].keys_per_block = max(1, change.block_size // block_size) if block_size else 1
            case BlocksRemoved():
                self.index.removed(engine, change.hashes, change.medium)
            case AllBlocksCleared():
                self.index.cleared(engine, change.medium)
            case _:
                assert_never(change)

    # ---- figures

    def figures(self) -> RouterFigures:
        """Return the Router's part of the figures."""
        return RouterFigures(
            policy=self.config.policy,
            choices=[(*key, number) for key, number in sorted(self._choices.items()) if key[0] >= 0],
            num_unplaced=self._choices[-1, ""],
            indexed_blocks={engine: self.index.num_blocks(engine) for engine in sorted(self._places)},
            index_bytes=self.index.num_bytes,
        )

    def check(self) -> None:
        """Assert the invariants. O(size)."""
        self.index.check()
        assert self._loads.keys() == self._places.keys() and set(self._accepting) <= self._loads.keys()
        for engine, load in self._loads.items():
            own = [placement for placement in self._placements.values() if placement.engine == engine]
            waiting = [placement for placement in own if not placement.has_started]
            assert load.num_waiting == len(waiting) and load.num_running == len(own) - len(waiting)
            assert load.queue_tokens == sum(placement.num_uncached for placement in waiting)
            load.check()
        assert all(placement.engine in self._loads for placement in self._placements.values())
        assert len(self._jobs) <= MAX_JOBS

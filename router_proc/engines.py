"""The engines that the router follows: their events, and their counters once a second."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.process.log import event_logger
from quire.protocol.routing import EnginePlace, RoutingConfig
from quire.protocol.wire.front_end_messages import Statistics
from quire.protocol.wire.kv_events import HASH_BYTES
from quire.router_proc.core.events import CacheChanged, CacheForgotten, EngineMeasured
from quire.router_proc.core.pace import Pace, compare
from quire.router_proc.core.tenants import TenantBook
from quire.router_proc.engine_link import EngineLink
from quire.router_proc.follower import Follower
from quire.router_proc.sockets import RouterSockets

log = event_logger("router")

MAX_MESSAGES = 64
"""Messages of an engine that are processed before the questions of front ends are."""
SLACK_BLOCKS = 65_536
"""Blocks that an engine may report beyond twice its pools, whose size is known a second later than its events."""

Consume = Callable[[CacheChanged | CacheForgotten | EngineMeasured], None]


class Feed:
    """The events of one engine's KV cache: the subscription, and the state of following it."""

    def __init__(self, place: EnginePlace, config: EngineConfig, sockets: RouterSockets, consume: Consume) -> None:
        layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype).with_block_size(place.block_size)
        self._sockets = sockets
        self._peer = sockets.open_events(place)
        hash_bytes = HASH_BYTES[config.prefix_caching_hash_algo]
        self.follower = Follower(place.engine, layout, hash_bytes, consume, self._peer.request)

    def receive(self, now: float) -> None:
        """Process messages of both sockets, MAX_MESSAGES of each at most."""
        # Answers before live messages: they close a gap, and what was published after it can then be applied at once
        # instead of being queued.
        for receive, process in (
            (self._peer.receive_answer, self.follower.answered),
            (self._peer.receive, self.follower.published),
        ):
            for _ in range(MAX_MESSAGES):
                if (frames := receive()) is None:
                    break
                process(frames, now)

    def close(self) -> None:
        self._sockets.close_events(self._peer)


class KnownEngine:
    """One engine, from its start to its end: a replacement is another object. Without events it has no feed."""

    def __init__(self, place: EnginePlace, sockets: RouterSockets, consume: Consume, pid: int) -> None:
        """Raises EngineError if its configuration cannot be read."""
        self.place = place
        self._consume = consume
        config = _read_config(place)
        self.feed = Feed(place, config, sockets, consume) if config.feeds_router else None
        self.link = EngineLink(lambda: sockets.open_link(place), pid)
        self.pace = Pace()
        self._max_blocks = 0
        self._measured = EngineMeasured(place.engine)
        self._logged = ""

    def tick(self, now: float) -> Statistics | None:
        """Return the newest statistics, and ask for the next ones. Call once a second."""
        if self.feed is not None:
            self.feed.follower.tick(now)
        newest = None
        # The newest counts. Older ones, which have queued while the router was busy, would make it believe in loads
        # that have passed.
        while (statistics := self.link.receive()) is not None:
            newest = statistics
        self.link.poll()
        if newest is not None:
            self.pace.update(newest)
            # Only a bound against damage or malice: an engine that reports ever more blocks would otherwise fill the
            # router's memory.
            pools = newest.num_usable_blocks + newest.num_pages
            self._max_blocks = 2 * pools + SLACK_BLOCKS
        return newest

    def report(self, pace: float) -> None:
        """Let the Router know what has been measured, ``pace`` to two digits: a trace has a line for each change."""
        measured = EngineMeasured(self.place.engine, round(pace, 2), self._max_blocks)
        if measured != self._measured:
            self._measured = measured
            self._consume(measured)

    def log_distrust(self, follower: Follower) -> None:
        """Log once why the engine is not indexed."""
        reason = follower.not_indexed
        if reason and reason != self._logged:
            until = "until it restarts" if follower.has_given_up else "for a while"
            log.warning(f"the cache of an engine is not indexed {until}", engine=self.place.engine, reason=reason)
        self._logged = reason

    def close(self) -> None:
        self.link.close()
        if self.feed is not None:
            self.feed.close()


class KnownEngines:
    """Owns one Engine per place at which an engine runs."""

    def __init__(self, config: RoutingConfig, sockets: RouterSockets, consume: Consume, pid: int) -> None:
        self._config = config
        self._sockets = sockets
        self._consume = consume
        self._pid = pid
        self._engines: dict[int, KnownEngine] = {}
        self._tenants = TenantBook()
        self._unreadable: dict[int, str] = {}

    def update(self, places: list[EnginePlace]) -> None:
        """Follow exactly the engines that run at these places. Called after the Router knows them."""
        running = {place.engine: place for place in places if place.directory and place.block_size}
        for number, engine in list(self._engines.items()):
            place = running.get(number)
            # A restarted engine has an empty cache and new sockets under the same number, so that it is followed as
            # another one.
            if place is None or _identity(place) != _identity(engine.place):
                self._engines.pop(number).close()
                self._tenants.forget(number)
        self._unreadable = {number: reason for number, reason in self._unreadable.items() if number in running}
        for number, place in running.items():
            if number not in self._engines:
                self._follow(place)

    def _follow(self, place: EnginePlace) -> None:
        try:
            self._engines[place.engine] = KnownEngine(place, self._sockets, self._consume, self._pid)
        except EngineError as error:
            self._unreadable[place.engine] = str(error)
            log.warning("the cache of an engine is not indexed", engine=place.engine, reason=error)
        else:
            self._unreadable.pop(place.engine, None)

    def receive(self, now: float) -> None:
        for engine in self._engines.values():
            if engine.feed is not None:
                engine.feed.receive(now)

    def tick(self, now: float, overfull: set[int]) -> None:
        """Do what is due once a second. ``overfull``: engines that have reported more blocks than they can have."""
        for number, follower in self._followers():
            if number in overfull:
                follower.distrust("it has reported more blocks than its pool has", now)
        for number, engine in self._engines.items():
            statistics = engine.tick(now)
            if statistics is not None and self._config.num_tenants > 1:
                self._tenants.report(number, dict(statistics.tenant_service))
                if served := self._tenants.take(number):
                    engine.link.send(served)
        engines = list(self._engines.values())
        for engine, pace in zip(engines, compare([engine.pace for engine in engines]), strict=True):
            engine.report(pace)
        for number, follower in self._followers():
            self._engines[number].log_distrust(follower)

    def _followers(self) -> Iterator[tuple[int, Follower]]:
        for number, engine in self._engines.items():
            if engine.feed is not None:
                yield number, engine.feed.follower

    @property
    def gaps(self) -> dict[int, int]:
        return {number: follower.num_gaps for number, follower in self._followers()}

    @property
    def damaged(self) -> dict[int, int]:
        return {number: follower.num_damaged for number, follower in self._followers()}

    @property
    def not_indexed(self) -> dict[int, str]:
        """Why engines are not indexed now, by number."""
        found = {
            number: "it sends no events" if engine.feed is None else engine.feed.follower.not_indexed
            for number, engine in self._engines.items()
        }
        return self._unreadable | {number: reason for number, reason in found.items() if reason}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def _identity(place: EnginePlace) -> tuple[str, int, int]:
    return place.directory, place.incarnation, place.block_size


def _read_config(place: EnginePlace) -> EngineConfig:
    file = Path(place.directory) / "config"
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(f"its configuration cannot be read: {error}") from None

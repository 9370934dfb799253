"""The engines of a server with several: their links, states and pause. No I/O."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from quire.frontend.engine.routed_stream import RoutedStream
from quire.frontend.engine.session import Session
from quire.protocol.routing import EnginePlace

LINKED = ("serving", "draining", "drained")
"""States of engines that have a link."""


class LinkOpener(Protocol):
    """The links to the engines."""

    def open(self, place: EnginePlace) -> Session:
        """Return the session of a new link to this engine, whose messages are given to ``EngineSet.take``."""
        ...

    def close(self, engine: int) -> None:
        """Close the link; nothing that is posted on it afterwards is sent."""
        ...

    def report_drained(self, engine: int) -> None:
        """Report to the fleet that no stream is left on a draining engine."""
        ...


class LinkedEngine:
    """One engine: its place, and its session while it has a link."""

    def __init__(self, place: EnginePlace) -> None:
        self.place = place
        self.session: Session | None = None
        self.given_up: tuple[str, int] | None = None
        """Directory and incarnation of a scheduler that has failed, to which no link is opened again."""
        self.drain_until: float | None = None
        self.has_reported_drained = False

    @property
    def is_usable(self) -> bool:
        """Whether it can compute new requests now."""
        session = self.session
        return self.place.state == "serving" and session is not None and session.accepts and session.state == "ready"

    @property
    def num_streams(self) -> int:
        return 0 if self.session is None else len(self.session.table)

    def has(self, request_id: str) -> bool:
        """Whether it has a request of this id, which may be ending."""
        return self.session is not None and self.session.table.get(request_id) is not None

    @property
    def is_linkable(self) -> bool:
        """Whether there is a scheduler to which a link can be open."""
        return self.place.state in LINKED and bool(self.place.directory) and self.key != self.given_up

    @property
    def key(self) -> tuple[str, int]:
        return self.place.directory, self.place.incarnation


class LinkedEngines:
    """Owns the links to the engines. Does not know which streams are on them.

    Attributes:
        places: the engines, as the fleet announced them last.
        pause: the pause that an operator has set, as of Session.
        was_ready: an engine has been usable, so "loading" means "recovering".
        since: when the present state began.
    """

    def __init__(self, opener: LinkOpener, drain_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``drain_timeout``: seconds after which the streams of a draining engine are moved."""
        self._opener, self._drain_timeout, self._clock = opener, drain_timeout, clock
        self._by_number: dict[int, LinkedEngine] = {}
        self.places: list[EnginePlace] = []
        self.pause = ""
        self.was_ready = False
        self._last_state = self.state
        self.since = clock()

    def __getitem__(self, number: int) -> LinkedEngine:
        return self._by_number[number]

    def get(self, number: int) -> LinkedEngine | None:
        return self._by_number.get(number)

    @property
    def all(self) -> list[tuple[int, LinkedEngine]]:
        return list(self._by_number.items())

    @property
    def state(self) -> str:
        """loading, ready or recovering: ready if any engine is."""
        if any(engine.is_usable for engine in self._by_number.values()):
            return "ready"
        return "recovering" if self.was_ready else "loading"

    @property
    def sessions(self) -> list[Session]:
        return [engine.session for engine in self._by_number.values() if engine.session is not None]

    @property
    def accepting(self) -> list[int]:
        """The engines that answer questions."""
        return [n for n, each in self._by_number.items() if each.session is not None and each.session.accepts]

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 0 while no engine has been ready."""
        return next((place.block_size for place in self.places if place.block_size), 0)

    def described(self) -> list[EnginePlace]:
        """Return the places, with a reason for each serving engine that cannot compute requests now."""
        return [
            place
            if place.state != "serving" or place.detail or self._by_number[place.engine].is_usable
            else msgspec.structs.replace(place, detail="its scheduler or its workers are being replaced")
            for place in self.places
        ]

    def without(self, request_id: str, refused_by: set[int]) -> list[int]:
        """Return the usable engines that have no request of this id, and have not refused it."""
        return [
            number
            for number, engine in self._by_number.items()
            if engine.is_usable and number not in refused_by and not engine.has(request_id)
        ]

    def set_places(self, places: list[EnginePlace]) -> list[LinkedEngine]:
        """Apply a new list. Return the engines whose link is to be closed: their scheduler has ended."""
        self.places = places
        gone = self._by_number.keys() - {place.engine for place in places}
        lost = [self._by_number.pop(number) for number in sorted(gone)]
        for place in places:
            engine = self._by_number.setdefault(place.engine, LinkedEngine(place))
            before, engine.place = engine.key, place
            if place.state != "draining":
                engine.drain_until, engine.has_reported_drained = None, False
            elif engine.drain_until is None:
                engine.drain_until = self._clock() + self._drain_timeout
            if engine.key != before or not engine.is_linkable:
                lost.append(engine)
        return lost

    def open_links(self) -> None:
        for engine in self._by_number.values():
            if engine.is_linkable and engine.session is None:
                engine.session = self._opener.open(engine.place)

    def close_link(self, engine: LinkedEngine) -> None:
        engine.session = None
        self._opener.close(engine.place.engine)

    def note_state(self) -> None:
        """Note when the state has changed; call after each change of an engine."""
        if self.state != self._last_state:
            self._last_state, self.since = self.state, self._clock()
        self.was_ready |= self.state == "ready"

    def take_pause(self, session: Session, *, is_new: bool) -> None:
        """Follow the pause of the engines. A scheduler that was started since it was set or ended gets the same."""
        has_others = any(each.accepts for each in self.sessions if each is not session)
        if is_new and session.pause != self.pause and (self.pause or has_others):
            session.set_pause(self.pause or "resume")
        else:
            self.pause = session.pause

    def report_drained(self, streams: Iterable[RoutedStream]) -> None:
        """Report each draining engine once, when none of the streams in flight is on it."""
        draining = {
            number: engine
            for number, engine in self._by_number.items()
            if engine.drain_until is not None and not engine.has_reported_drained
        }
        if not draining:
            return
        for number in sorted(draining.keys() - {each.engine for each in streams}):
            draining[number].has_reported_drained = True
            self._opener.report_drained(number)

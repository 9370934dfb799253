"""Several engines from a front end's side: which of them has each stream, and when a stream is moved. No I/O.

A stream waits until the router, or this front end itself without a router, has chosen its engine. It leaves an engine
that dies, loses its workers or is drained, and is submitted to another one with the tokens that it has so far.
"""

import time
from collections.abc import Callable

from quire.frontend.engine.linked_engines import LinkedEngine, LinkedEngines, LinkOpener
from quire.frontend.engine.routed_stream import NOWHERE, RoutedStream
from quire.frontend.engine.router_link import RouterLink
from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.process.log import event_logger
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, EngineState, Rejected, StepOutputs
from quire.protocol.wire.link_messages import Heartbeat, Message, Refused, Welcome
from quire.protocol.wire.router_messages import Routed

log = event_logger("frontend")


class EngineSet:
    """Owns the streams in flight of one front end of a server with several engines.

    Attributes:
        engines: the engines and their links.
        detail: the reason, if the state is failed.
    """

    def __init__(
        self,
        transport: LinkOpener,
        router: RouterLink,
        waiting: Session,
        drain_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            waiting: a session of which no link is opened, for the streams without an engine.
            drain_timeout: as of LinkedEngines.
        """
        self._router, self._waiting, self._clock = router, waiting, clock
        self._waiting.begin_link()
        self.engines = LinkedEngines(transport, drain_timeout, clock)
        self._streams: dict[str, RoutedStream] = {}
        self._next_ticket = 0
        self._mode = ""
        """draining or failed; otherwise the state is that of the engines."""
        self.detail = ""
        self._progress_at = clock()

    # ---- state

    @property
    def state(self) -> str:
        return self._mode or self.engines.state

    @property
    def seconds_without_progress(self) -> float:
        """As of Session: since the last token of any engine, or since no engine is ready."""
        now, sessions = self._clock(), self.engines.sessions
        latest = max([self._progress_at, *(session.progress_at for session in sessions)])
        waiting = now - latest if self.num_in_flight and not self.engines.pause else 0.0
        return max(waiting, now - self.engines.since if self.state == "recovering" else 0.0)

    @property
    def requests(self) -> list[AddRequest]:
        """Those of all streams in flight, which may wait for an engine."""
        return [each.stream.request for each in self._streams.values()]

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    def drain(self) -> None:
        """Start to refuse new requests."""
        self._mode = self._mode or "draining"

    def fail(self, reason: str) -> None:
        """End every stream with ``reason``: no engine can be started any more."""
        self._mode, self.detail = "failed", reason
        for session in (*self.engines.sessions, self._waiting):
            session.fail(reason)

    def require_alive(self) -> None:
        if self._mode == "failed":
            raise EngineError(self.detail)

    # ---- requests

    def add(
        self, request: AddRequest, on_update: Callable[[], None] | None, parent: Stream | None = None, keys: bytes = b""
    ) -> Stream:
        """Submit a request to an engine, now or as soon as one is chosen.

        Args:
            parent: a stream that begins with the same tokens; the request goes to its engine and becomes its fork.
            keys: as of Route; those of ``parent`` if there is one.

        Raises:
            InvalidRequest: the request id is in use.
            EngineError: the engines have failed.
        """
        self.require_alive()
        if request.request_id in self._streams:
            raise InvalidRequest("request_id is in use", "request_id", "duplicate_request_id")
        if not self._streams:
            self._progress_at = self._clock()  # no token was expected until now
        stream = Stream(request, on_update, parent, self, self._forget)
        self._waiting.adopt(stream)
        first = None if parent is None else self._streams.get(parent.request_id)
        self._next_ticket += 1
        routed = RoutedStream(stream, self._next_ticket, keys if first is None else first.keys, self._waiting)
        self._streams[request.request_id] = routed
        self._place(routed)
        return stream

    def abort(self, stream: Stream) -> None:
        if (routed := self._routed(stream)) is not None:
            routed.session.abort(stream)

    def stop_at(self, stream: Stream, num_output_tokens: int) -> None:
        if (routed := self._routed(stream)) is not None:
            routed.session.stop_at(stream, num_output_tokens)

    def calls_tool(self, stream: Stream, tool: str) -> None:
        for session in self.engines.sessions:  # only the one on whose link the stream was submitted has an effect
            session.calls_tool(stream, tool)

    def shut_down(self, detail: str) -> None:
        """End every answer in flight with an error."""
        for session in (*self.engines.sessions, self._waiting):
            session.shut_down(detail)

    # ---- where streams are

    def _routed(self, stream: Stream) -> RoutedStream | None:
        routed = self._streams.get(stream.request_id)
        return routed if routed is not None and routed.stream is stream else None

    # ---- the engines

    def set_places(self, places: list[EnginePlace]) -> None:
        """Apply a new list of engines: open and close links, and move the streams of engines that have ended."""
        for engine in self.engines.set_places(places):
            self._lose(engine)
        self.engines.open_links()
        self._note_change()

    def take(self, number: int, message: Message | ProtocolError) -> bool:
        """Process a message of an engine, as ``Session.take``."""
        engine = self.engines.get(number)
        if engine is None or (session := engine.session) is None:
            return True  # it was lost in the meantime
        if isinstance(message, Rejected) and self._try_elsewhere(number, session, message):
            return True
        if isinstance(message, EngineState) and message.kind == "failed":
            return self._give_up(engine, message.detail)
        if isinstance(message, Refused) and message.final:
            return self._give_up(engine, message.reason)
        was_ready, before = session.was_ready, session.state
        is_intact = session.take(message)
        if not is_intact:
            session.accepts = False
            self._note_change()
        elif isinstance(message, StepOutputs):
            self._note_started(number, message)
        elif isinstance(message, EngineState):
            if session.state == "recovering" and before != "recovering":
                self._note_loss(number)
            self.engines.take_pause(session, is_new=session.was_ready and not was_ready)
            self._note_change()
        return is_intact

    def _note_started(self, number: int, message: StepOutputs) -> None:
        for introduced in message.introduced:
            routed = self._streams.get(introduced.request_id)
            if routed is not None and routed.engine == number:  # not the rest of a stream that has left it
                routed.has_started = True
                self._router.started(routed)

    def _give_up(self, engine: LinkedEngine, reason: str) -> bool:
        """Leave an engine whose scheduler will not serve any more; the fleet replaces it."""
        log.warning("engine failed", engine=engine.place.engine, reason=reason)
        engine.given_up = engine.key
        self._lose(engine)
        self._note_change()
        return True

    def _lose(self, engine: LinkedEngine) -> None:
        """Close the link to a scheduler that has ended, and take back its streams."""
        if (session := engine.session) is None:
            return
        self._progress_at = max(self._progress_at, session.progress_at)
        if engine.place.state != "stopped":  # by an order
            session.count_scheduler_death()
        self.engines.close_link(engine)
        for stream in session.table.streams:
            routed = self._routed(stream)
            if stream.muted or routed is None:  # its end would have been a message on this link
                session.table.drop(stream)
            else:
                self._take_back(routed)

    def _note_loss(self, number: int) -> None:
        """Choose which streams of an engine that lost its workers stay.

        The scheduler finds out which request makes workers die, by running suspects alone. A request that has been on
        two engines when they lost their workers, with no token in between, stays for that.
        """
        for routed in self._on(number):
            count = len(routed.stream.tokens)
            routed.stays, routed.num_tokens_at_loss = routed.num_tokens_at_loss == count, count

    def _note_change(self) -> None:
        """Move streams and place waiting ones, as the engines now are."""
        self.engines.note_state()
        self._relieve()
        self._place_waiting()

    def _relieve(self) -> None:
        """Take back the streams of engines that cannot compute them now, if others can."""
        if self.engines.state != "ready":
            return
        now = self._clock()
        for number, engine in self.engines.all:
            session = engine.session
            if session is None or engine.is_usable:
                continue
            is_late = engine.drain_until is not None and now >= engine.drain_until
            for routed in self._on(number) if is_late or not session.accepts or session.state == "recovering" else ():
                if is_late or not routed.stays:
                    self._take_back(routed)

    def _on(self, number: int) -> list[RoutedStream]:
        """Return the streams on an engine that are still read."""
        return [each for each in self._streams.values() if each.engine == number and not each.stream.muted]

    def _take_back(self, routed: RoutedStream) -> None:
        """Let a stream wait for another engine."""
        routed.refused_by.clear()
        routed.session.release(routed.stream)
        self._wait(routed)

    def _wait(self, routed: RoutedStream) -> None:
        self._router.ended(routed)
        routed.engine, routed.session = NOWHERE, self._waiting
        self._waiting.adopt(routed.stream)

    def _try_elsewhere(self, number: int, session: Session, message: Rejected) -> bool:
        """Submit a request to another engine if the queue of this one is full; return False if there is no other."""
        routed = self._streams.get(message.request_id)
        if message.code != "queue_full" or routed is None or routed.session is not session or routed.stream.muted:
            return False
        routed.refused_by.add(number)
        if not self._candidates(routed):
            return False
        session.table.remove(routed.stream)
        if not routed.stream.was_introduced:
            routed.stream.link_number = 0  # not a resubmission: the other engine's queue has a limit too
        self._wait(routed)
        self._place(routed)
        return True

    def _candidates(self, routed: RoutedStream) -> list[int]:
        """Return the engines that can have a stream now: not those where its earlier request has not ended yet."""
        return self.engines.without(routed.stream.request_id, routed.refused_by)

    def _place_waiting(self) -> None:
        """Place the streams that wait and of which the router has not been asked, the oldest first."""
        if len(self._waiting.table):
            waiting = [self._streams[stream.request_id] for stream in self._waiting.table.streams]
            for routed in sorted(waiting, key=lambda each: each.ticket):
                if routed.engine == NOWHERE and not self._router.is_asked(routed):
                    self._place(routed)

    def _place(self, routed: RoutedStream) -> None:
        """Find an engine for a waiting stream: that of its parent, or the router's choice, or an own choice."""
        if not (candidates := self._candidates(routed)):
            routed.refused_by.clear()  # those that refused it may be all that are left
            return
        parent = None if routed.stream.parent is None else self._routed(routed.stream.parent)
        if parent is not None and not parent.stream.muted:
            if parent.engine == NOWHERE:
                parent.followers[routed.ticket] = routed
                return
            if parent.engine in candidates:
                self._put(routed, parent.engine, "fork")
                return
        if self._router.answers:
            excluded = [number for number, _ in self.engines.all if number not in candidates]
            self._router.ask(routed, excluded, self._clock())
        else:
            self._choose(routed, candidates)

    def _choose(self, routed: RoutedStream, candidates: list[int]) -> None:
        """Put a stream on the engine with the fewest streams of this front end."""
        least = min(candidates, key=lambda number: self.engines[number].num_streams)
        self._put(routed, least, "no router")

    def _put(self, routed: RoutedStream, number: int, reason: str, num_cached_tokens: int | None = None) -> None:
        """Submit a waiting stream to an engine. ``num_cached_tokens``: as of Routed, if the router chose."""
        session = self.engines[number].session
        assert session is not None
        self._waiting.release(routed.stream)
        routed.engine, routed.session = number, session
        routed.has_started = routed.stays = False
        session.adopt(routed.stream)
        earlier = routed.stream.engines
        routed.stream.engines = f"{earlier}, {number} {reason}" if earlier else f"{number} {reason}"
        if num_cached_tokens is None:
            self._router.place(routed)
        log.debug("engine chosen", id=routed.stream.request_id, engine=number, reason=reason, cached=num_cached_tokens)
        followers, routed.followers = routed.followers, {}
        for each in followers.values():
            if each.engine == NOWHERE and not each.stream.over and not self._router.is_asked(each):
                self._place(each)

    # ---- the router

    def begin_router_link(self) -> None:
        """Begin a link to another router. What the previous one was asked is chosen here."""
        self._router.begin()
        self._place_waiting()

    def take_from_router(self, message: Message | ProtocolError) -> bool:
        """Process a message. If False, the link is broken: the caller opens a new one and begins it."""
        self._router.is_silent = False
        match message:
            case Welcome():
                self._router.is_open = True
                for routed in self._streams.values():
                    if routed.engine != NOWHERE:
                        self._router.place(routed)
            case Routed():
                self._take_choice(message)
            case Heartbeat():
                pass
            case Refused(final=True, reason=reason):
                log.warning("the router refuses this front end, which chooses engines itself", reason=reason)
                self._router.close()
                self._place_waiting()
            case _:
                return False
        return True

    def _take_choice(self, choice: Routed) -> None:
        routed = self._router.answered(choice)
        if routed is None:
            return
        if choice.engine in (candidates := self._candidates(routed)):
            self._put(routed, choice.engine, choice.reason, choice.num_cached_tokens)
        elif candidates:  # the router did not know yet what has happened to the engines
            self._choose(routed, candidates)
        else:
            self._router.ended(routed)

    # ---- time

    def beat(self) -> None:
        """Send heartbeats; call about once a second."""
        for session in self.engines.sessions:
            session.beat()
        self._router.beat(self._clock())

    def tick(self) -> None:
        """Do what is due; call every TICK_S."""
        self._router.give_up_late(self._clock())
        self._relieve()
        self._place_waiting()
        self.engines.report_drained(self._streams.values())
        self._router.flush()

    def _forget(self, stream: Stream) -> None:
        """Forget a stream that is over."""
        self._router.ended(self._streams.pop(stream.request_id))

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError unless each stream in flight is in exactly one table, and no table has another."""
        tables = {number: each.session.table for number, each in self.engines.all if each.session is not None}
        tables[NOWHERE] = self._waiting.table
        for name, routed in self._streams.items():
            holders = [number for number, table in tables.items() if table.get(name) is routed.stream]
            assert holders == [routed.engine], f"{name}: on {holders}, {routed.engine}"
        for number, table in tables.items():
            for stream in table.streams:
                assert stream.muted or self._routed(stream) is not None, f"{stream.request_id} on {number} is unknown"
        self._router.check()

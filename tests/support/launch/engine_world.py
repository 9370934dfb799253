"""Several engines and a router in memory behind an ``EngineSet``: each message is delivered when the test wants it."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np

from quire.frontend.engine.engine_set import EngineSet
from quire.frontend.engine.router_link import RouterLink
from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    CallsTool,
    Control,
    Ended,
    EndReason,
    EngineState,
    Introduced,
    Rejected,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Welcome
from quire.protocol.wire.router_messages import Placed, Progress, Route, Routed

PROMPT = np.arange(1, 4, dtype=np.int32)


def token(name: str, index: int) -> int:
    """Return output token ``index`` of a request, the same on every engine."""
    return (sum(name.encode()) * 31 + index * 7) % 1000


def length(name: str) -> int:
    """Return the number of output tokens with which a request ends."""
    return 3 + sum(name.encode()) % 9


@dataclass
class Scheduler:
    """The scheduler of one engine: requests of the present link with their numbers of tokens. Each has a handle."""

    place: EnginePlace
    queue_limit: int = 1000
    state: str = "ready"
    pause: str = ""
    is_linked: bool = False
    """It has read the Hello of the present link, so that what it sends arrives there."""
    inbox: "deque[Message]" = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    requests: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Handle, number of output tokens and answer's name by request id."""
    handles: Any = field(default_factory=lambda: count(1))

    def take(self, message: Message) -> None:
        match message:
            case Hello():
                self.requests.clear()
                self.outbox.clear()
                self.is_linked = True
                self.outbox += [Welcome(1, ""), EngineState("ready", pause=self.pause)]
                self.outbox.append(EngineState(self.state, pause=self.pause))
            case AddRequest():
                self._add(message)
            case Abort():
                for name in message.request_ids:
                    self._end(name, EndReason.ABORTED)
            case Stop():
                self._end(message.request_id, EndReason.STOPPED)
            case Control():
                self.pause = message.kind if message.kind.startswith("pause") else ""
                self.send(EngineState(self.state, pause=self.pause))
            case Heartbeat() | CallsTool():
                pass
            case _:
                raise AssertionError(message)

    def send(self, message: Message) -> None:
        if self.is_linked:
            self.outbox.append(message)

    def _add(self, request: AddRequest) -> None:
        name = request.request_id
        assert name not in self.requests, f"{name} is submitted twice"
        if len(self.requests) >= self.queue_limit and not request.resubmitted:
            self.send(Rejected(name, "queue_full", "", "the queue is full"))
            return
        if request.forked_from and request.forked_from not in self.requests:
            self.send(Rejected(name, "parent_not_found", "forked_from", "no such request"))
            return
        known = [] if request.output_token_ids is None else request.output_token_ids.tolist()
        assert known == [token(name, index) for index in range(len(known))], "it is resubmitted with its tokens"
        handle = next(self.handles)
        self.requests[name] = (handle, len(known), name)
        self.send(StepOutputs([Introduced(handle, name, 0)], None, None, []))

    def _end(self, name: str, reason: EndReason) -> None:
        if name in self.requests:
            handle, known, _ = self.requests.pop(name)
            self.send(StepOutputs([], None, None, [Ended(handle, int(reason), known)]))

    def step(self, names: list[str]) -> None:
        """Compute one token of each of these requests."""
        if self.state != "ready" or self.pause == "pause":
            return
        names = [name for name in names if name in self.requests]
        handles, tokens, ended = [], [], []
        for name in names:
            handle, known, _ = self.requests[name]
            handles.append(handle)
            tokens.append(token(name, known))
            self.requests[name] = (handle, known + 1, name)
            if known + 1 == length(name):
                ended.append(Ended(handle, int(EndReason.LENGTH), known + 1))
                del self.requests[name]
        if names:
            self.send(StepOutputs([], np.array(handles, np.int32), np.array(tokens, np.int32), ended))


@dataclass
class Answer:
    """What a client has received."""

    stream: Stream
    tokens: list[int] = field(default_factory=list)
    ended: EndReason | None = None
    refused: str = ""
    detail: str = ""
    left: bool = False


class World:
    """Owns the set, the schedulers, the router and the clock; implements ``engines.Transport``."""

    def __init__(self, num_engines: int = 3, drain_timeout: float = 10.0) -> None:
        self.now = 0.0
        self.schedulers: dict[int, Scheduler] = {}
        self.linked: dict[int, Scheduler] = {}
        self.places = [self._fresh(number, 1) for number in range(num_engines)]
        self.drained: list[int] = []
        self.router_inbox: deque[Message] = deque()
        self.asked: list[Route] = []
        self.on_engine: dict[int, int] = {}
        """Where the router believes each ticket to be."""
        self.answers: dict[str, Answer] = {}
        self.deaths = 0
        self._links = count(1)
        waiting = Session(lambda message: None, 1, clock=self.clock, link_numbers=self._links)
        router = RouterLink(self.router_inbox.append, 1, 0)
        self.set = EngineSet(self, router, waiting, drain_timeout, self.clock)

    def clock(self) -> float:
        return self.now

    def _fresh(self, number: int, starts: int) -> EnginePlace:
        place = EnginePlace(number, f"/engine-{number}.{starts}", 1, "serving", 16, starts)
        self.schedulers[number] = Scheduler(place)
        return place

    # ---- Transport

    def open(self, place: EnginePlace) -> Session:
        scheduler = self.schedulers[place.engine]
        assert scheduler.place.directory == place.directory and scheduler.place.incarnation == place.incarnation
        self.linked[place.engine] = scheduler

        def post(message: Message) -> None:
            if isinstance(message, AddRequest) and (answer := self.answers.get(message.request_id)) is not None:
                assert not answer.left, "a request is submitted for a client that has left"
            if self.linked.get(place.engine) is scheduler:
                scheduler.inbox.append(message)

        session = Session(post, 1, clock=self.clock, link_numbers=self._links)
        session.begin_link()
        return session

    def close(self, engine: int) -> None:
        del self.linked[engine]

    def report_drained(self, engine: int) -> None:
        self.drained.append(engine)

    # ---- the fleet

    def announce(self) -> None:
        self.set.set_places(list(self.places))
        self.check()

    def change(self, number: int, **fields: Any) -> None:
        self.places[number] = msgspec.structs.replace(self.places[number], **fields)
        self.announce()

    def kill(self, number: int) -> None:
        """End an engine's process; the next one is starting."""
        self.deaths += 1
        starts = self.places[number].num_starts + 1
        self.places[number] = EnginePlace(number, "", 0, "starting", 16, starts)
        self.schedulers.pop(number, None)
        self.announce()

    def kill_scheduler(self, number: int) -> None:
        self.deaths += 1
        place = self.places[number]
        self.places[number] = msgspec.structs.replace(place, incarnation=place.incarnation + 1)
        self.schedulers[number] = Scheduler(self.places[number])
        self.announce()

    def start(self, number: int) -> None:
        self.places[number] = self._fresh(number, self.places[number].num_starts)
        self.announce()

    def set_state(self, number: int, state: str) -> None:
        """Let an engine lose its workers (recovering), or get new ones (ready)."""
        scheduler = self.schedulers[number]
        scheduler.state = state
        scheduler.send(EngineState(state, pause=scheduler.pause))

    # ---- delivery

    def to_engine(self, number: int, most: int = 1000) -> None:
        scheduler = self.schedulers.get(number)
        for _ in range(most if scheduler is not None else 0):
            if not scheduler.inbox:
                return
            scheduler.take(scheduler.inbox.popleft())

    def to_front(self, number: int, most: int = 1000) -> None:
        for _ in range(most):
            scheduler = self.linked.get(number)
            if scheduler is None or not scheduler.outbox:
                return
            assert self.set.take(number, scheduler.outbox.popleft())
            self.check()

    def break_link(self, number: int) -> None:
        """Damage a message to the front end, which begins a new link."""
        scheduler = self.linked[number]
        assert not self.set.take(number, ProtocolError("gap", "message 3 after message 1"))
        self.check()
        engine = self.set.engines.get(number)
        assert engine is not None and engine.session is not None
        scheduler.inbox.clear()
        scheduler.outbox.clear()
        scheduler.is_linked = False
        engine.session.begin_link()

    def new_router(self) -> None:
        self.router_inbox.clear()
        self.asked.clear()
        self.on_engine.clear()
        self.set.begin_router_link()
        self.check()

    def to_router(self) -> None:
        while self.router_inbox:
            match self.router_inbox.popleft():
                case Hello():
                    assert self.set.take_from_router(Welcome(1, ""))
                case Route() as route:
                    assert route.ticket not in self.on_engine, "it has left its engine"
                    self.asked.append(route)
                case Placed() as placed:
                    self.asked = [route for route in self.asked if route.ticket != placed.ticket]
                    self.on_engine[placed.ticket] = placed.engine
                case Progress(started=started, ended=ended):
                    assert set(started) <= set(self.on_engine)
                    for ticket in ended:
                        self.on_engine.pop(ticket, None)
                        self.asked = [route for route in self.asked if route.ticket != ticket]
                case Heartbeat():
                    pass
                case other:
                    raise AssertionError(other)

    def answer(self, index: int, engine: int, reason: str = "load") -> None:
        route = self.asked.pop(index)
        if engine >= 0:
            self.on_engine[route.ticket] = engine
        assert self.set.take_from_router(Routed(route.ticket, engine, reason))
        self.check()

    # ---- clients

    def add(self, name: str, parent: str = "") -> Answer:
        request = AddRequest(name, PROMPT, SamplingParams(), 0)
        root = self.answers[parent].stream if parent else None
        answer = self.answers[name] = Answer(self.set.add(request, None, root))
        self.check()
        return answer

    def leave(self, name: str, *, stop: bool = False) -> None:
        self.read()
        answer = self.answers[name]
        answer.left = True
        if stop:
            self.set.stop_at(answer.stream, len(answer.tokens))
        else:
            self.set.abort(answer.stream)

    def read(self) -> None:
        """Take all updates, and check that each token is the next one and that nothing follows an end."""
        for name, answer in self.answers.items():
            if answer.left or answer.refused:
                continue
            try:
                update = answer.stream.take()
            except InvalidRequest as error:
                answer.refused = error.code
                continue
            if update is None:
                continue
            assert answer.ended is None, f"{name}: an update after its end"
            first = len(answer.tokens)
            answer.tokens += update.token_ids
            assert update.token_ids == [token(name, index) for index in range(first, len(answer.tokens))], name
            if update.ended is not None:
                answer.ended, answer.detail = update.ended, update.detail

    def check(self) -> None:
        self.set.check()
        self.read()
        for number, scheduler in self.linked.items():
            self._check_wanted(number, scheduler)

    def _check_wanted(self, number: int, scheduler: Scheduler) -> None:
        """Check that each request that a scheduler has is read, or that the message which ends it is on its way."""
        session = self.set.engines[number].session
        assert session is not None
        ending = {"*"} if any(isinstance(message, Hello) for message in scheduler.inbox) else set()
        for message in scheduler.inbox:
            ending |= set(message.request_ids) if isinstance(message, Abort) else set()
            ending |= {message.request_id} if isinstance(message, Stop) else set()
        for name in scheduler.requests if "*" not in ending else ():
            stream = session.table.get(name)
            is_read = stream is not None and not stream.muted
            assert is_read or name in ending, f"{name} runs on engine {number} for no client"

    # ---- until nothing is left

    def round(self) -> None:
        """Deliver everything, let the router choose the first allowed engine, and compute a token of each request."""
        self.to_router()
        while self.asked:
            excluded = self.asked[0].excluded
            self.answer(0, next(n for n in range(len(self.places)) if n not in excluded))
        for number in list(self.linked):
            self.to_engine(number)
            self.schedulers[number].step(list(self.schedulers[number].requests))
            self.to_front(number)
        self.now += 0.05
        self.set.tick()
        self.check()

    def finish(self) -> None:
        """Let all engines serve, and run until no stream is in flight."""
        for number, place in enumerate(self.places):
            if number not in self.schedulers:
                self.start(number)
            elif place.state != "serving":
                self.change(number, state="serving")
            scheduler = self.schedulers[number]
            scheduler.queue_limit = 1000
            scheduler.take(Control("resume"))
            if scheduler.state != "ready":
                self.set_state(number, "ready")
        for _ in range(200):
            self.round()
            if not self.set.num_in_flight:
                break
        assert not self.set.num_in_flight
        for _ in range(3):
            self.round()  # the ends of requests that streams have left
        assert not any(scheduler.requests for scheduler in self.schedulers.values()), "a request runs for no client"
        self.to_router()
        assert not self.on_engine, "the router believes that requests are in flight"

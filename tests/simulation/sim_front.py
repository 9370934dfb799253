"""A simulated front end process: the real Session, and clients that check every token."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from sim_answers import most_output_tokens
from sim_process import SimProcess
from sim_scenario import SimRequest
from sim_sessions import SimSessions
from sim_wire import WireChannel

from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.process.child import Command, Report
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, CallsTool, Control, EndReason, Hypothesis, Rejected
from quire.protocol.wire.link_messages import Message

if TYPE_CHECKING:
    from sim_world import World

RELINK_S = 0.05
HEARTBEAT_S = 1.0


@dataclass(eq=False)
class SimClient:
    """The client of one request, and what it received.

    Attributes:
        left: it aborted or stopped the request; nothing may arrive after that.
        lost: its front end died.
        last_token_at: time of its last token, or of its arrival.
        num_forked: output tokens of the parent that are its first tokens.
    """

    request: SimRequest
    stream: Stream
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[int, float]] = field(default_factory=dict)
    pooled: list[list[float]] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    ended: EndReason | None = None
    detail: str = ""
    num_counted: int = -1
    error: QuireError | None = None
    left: bool = False
    stopped_at: int | None = None
    lost: bool = False
    last_token_at: float = 0.0
    num_forked: int = 0

    @property
    def forked_tokens(self) -> list[int]:
        return self.tokens[: self.num_forked]

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.error is not None or self.left or self.lost


class SimFront(SimProcess):
    """One front end. Owns its link to the scheduler and its clients.

    Attributes:
        scheduler_deaths: times at which it connected to another scheduler.
    """

    role = "frontend"

    def __init__(self, world: "World", index: int) -> None:
        super().__init__(world)
        self.index = index
        self.session = Session(self._post, self.pid, index, world.events)
        self.clients: list[SimClient] = []
        self.sessions = SimSessions(world)
        self.submitted: Counter[str] = Counter()
        self.scheduler_deaths: list[float] = []
        self._forks: dict[str, tuple[Stream, list[int]]] = {}
        """Request → the stream from which it is forked, and the output tokens that it continues."""
        self._incarnation = 0
        self._peer = b""
        self._channel: WireChannel | None = None
        self._is_ready = self._relinking = False
        world.events.after(world.shape.start_s, self._started)

    def _started(self) -> None:
        if self.alive:
            self.report(Report("started"))
            self._listen_and_beat()

    def _listen_and_beat(self) -> None:
        if self.alive:
            self.session.beat()
            self.world.events.after(HEARTBEAT_S, self._listen_and_beat)

    def on_command(self, command: Command) -> None:
        match command.kind:
            case "scheduler":
                is_another = 0 < self._incarnation < command.incarnation
                self._incarnation = command.incarnation
                if is_another:
                    self.scheduler_deaths.append(self.world.events.now)
                self._link(after_death=is_another)
            case "engine_failed":
                self.session.fail("the engine failed")

    def control(self, kind: str) -> None:
        """Send a command of an operator to the scheduler."""
        if self.session.accepts:
            self._post(Control(kind))

    def unload_adapter(self, adapter: AdapterRef) -> None:
        """Ask the scheduler to drop an adapter, as an operator does."""
        if self.session.accepts:
            self._post(UnloadAdapter(adapter.name, adapter.digest))

    # ---- the link

    def _link(self, *, after_death: bool = False) -> None:
        self._relinking = False
        if self._channel is not None:
            self._channel.close()
        self.world.net.disconnect(self._peer)
        self._peer, self._channel = self.world.net.front_end(self._incarnation, self._wake)
        self.session.begin_link(after_death=after_death)

    def _post(self, message: Message) -> None:
        if self._channel is None:
            return  # no link yet: the session sends everything needed after connecting
        if isinstance(message, AddRequest):
            message = self._with_fork(message)
            self.submitted[message.request_id] += 1
            self.world.num_submissions[message.request_id] += 1
        self._channel.send(message)

    def _with_fork(self, request: AddRequest) -> AddRequest:
        """Return a request as it is submitted: a child names its parent, if the scheduler may have it, once."""
        parent, known = self._forks.get(request.request_id, (None, []))
        if parent is None:
            return request
        if not request.resubmitted and not parent.over and parent.link_number == self.session.link_number:
            num_known = len(request.prompt_token_ids) + len(known)
            fork = {"forked_from": parent.request_id, "num_forked_tokens": num_known}
            return replace(request, prompt_token_ids=np.zeros(0, np.int32), items=[], **fork)
        delivered = [] if request.output_token_ids is None else request.output_token_ids.tolist()
        return replace(request, output_token_ids=np.array([*known, *delivered], np.int32))

    def _take_message(self, message: Message) -> bool:
        """Give a message to the session. A child of a request that has ended is submitted with its tokens."""
        if isinstance(message, Rejected) and message.code == "parent_not_found":
            stream = next((s for s in self.session.table.streams if s.request_id == message.request_id), None)
            if stream is not None and not stream.muted:
                self.world.num_orphans += 1
                self._post(stream.submission(self.session.link_number))
                return True
        return self.session.take(message)

    def _wake(self) -> None:
        if self.alive and not self._relinking:
            self._read()

    def _read(self) -> None:
        assert self._channel is not None
        while not self._relinking:
            try:
                received = self._channel.receive()
            except ProtocolError as error:
                going_on = self.session.take(error)
            else:
                if received is None:
                    break
                going_on = self._take_message(received.message)
            if not going_on:
                self._relinking = True
                self.world.events.after(RELINK_S, partial(self._link_again, self._incarnation))
        if self.session.state == "ready" and not self._is_ready:
            self._is_ready = True
            self.report(Report("ready"))

    def _link_again(self, incarnation: int) -> None:
        if self.alive and self._relinking and incarnation == self._incarnation:
            self._link()

    def vanish(self) -> None:
        super().vanish()
        self.world.net.disconnect(self._peer)
        for client in self.clients:
            client.lost = not client.is_over

    # ---- clients

    def submit(self, request: SimRequest) -> None:
        """A client submits a request. A piece of a session waits until the session is idle."""
        client: SimClient | None = None
        if request.session:
            piece = self.sessions.begin(request)
            if piece is None:
                return
            request = self.world.requests[request.name] = piece
        if all(r.request.name != request.name or r.stream.over for r in self.clients):
            del self.submitted[request.name]
        parent = self._parent_of(request)
        known = [] if parent is None else self._forked_tokens(request, parent)
        if parent is not None:
            self._forks[request.name] = parent.stream, known

        def on_update() -> None:
            if client is not None:
                self._take(client)

        try:
            stream = self.session.add(self.world.message(request), on_update)
        except InvalidRequest as error:
            assert error.code == "duplicate_request_id", f"{request.name} was refused: {error}"
            assert any(stream.request_id == request.name for stream in self.session.table.streams)
            return
        except EngineError:
            assert self.world.fatal_error is not None, "refused as if the engine had failed"
            return
        client = SimClient(request, stream, [*known], last_token_at=self.world.events.now, num_forked=len(known))
        self.clients.append(client)
        self.world.num_requests += 1
        self._take(client)
        if request.then[0] == "leave_at":
            self.world.events.after(request.then[1] / 10, lambda: self._leave(client))

    def _parent_of(self, request: SimRequest) -> SimClient | None:
        """Return the client of the request from which another one is forked, unless it has ended."""
        streams = self.session.table.streams
        return next((c for c in self.clients if c.request.name == request.fork[0] and c.stream in streams), None)

    def _forked_tokens(self, request: SimRequest, parent: SimClient) -> list[int]:
        num_known = request.fork[1]
        if self.world.max_tokens is not None:
            num_known = min(num_known, most_output_tokens(request, self.world.max_tokens) - 1)
        return parent.tokens[:num_known]

    def _leave(self, client: SimClient) -> None:
        if self.alive and not client.is_over:
            client.left = True
            self.session.abort(client.stream)
            self._end_piece(client)

    def _end_piece(self, client: SimClient) -> None:
        """End a piece of a session, and submit the next one if one waits for that."""
        self.sessions.end(client)
        while (piece := self.sessions.next_piece(client.request.session)) is not None:
            self.submit(piece)

    def _take(self, client: SimClient) -> None:
        """Process an update of the stream, and the client's reaction to it."""
        if client.left:
            return
        assert not (client.ended or client.error), f"{client.request.name}: update after the request ended"
        try:
            update = client.stream.take()
        except QuireError as error:
            client.error = error
            self.world.check_ending(self, client)
            self._end_piece(client)
            return
        if update is None:
            return
        self.world.on_update(client, update)
        kind, after = client.request.then
        after += client.num_forked
        if client.ended is not None:
            self.world.check_ending(self, client)
            if client.request.tool and self.session.accepts:
                self._post(CallsTool(client.request.name, client.request.tool))
            self._end_piece(client)
        elif kind == "abort" and len(client.tokens) >= after:
            self._leave(client)
        elif kind == "stop" and len(client.tokens) > after:
            client.left, client.stopped_at = True, after
            self.session.stop_at(client.stream, after)
            self._end_piece(client)
        for child in self.world.due_children(client):
            self.submit(child)

    def drop_finished(self) -> None:
        """Drop clients of ended requests."""
        self.clients = [client for client in self.clients if not client.is_over]

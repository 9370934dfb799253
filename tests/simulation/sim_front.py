"""A front end process without a process: the real Session, and clients who check every token that they get."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sim_process import SimProcess
from sim_scenario import Ask
from sim_wire import WireChannel

from quire.launch.frontend.session import Session
from quire.launch.frontend.streams import Stream
from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.process.child import Command, Report
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, EndReason
from quire.protocol.wire.link_messages import Message

if TYPE_CHECKING:
    from sim_world import World

RELINK_S = 0.05
HEARTBEAT_S = 1.0


@dataclass(eq=False)
class Reader:
    """One request's client, and what it has seen.

    Attributes:
        left: it went, or stopped it; then nothing is to come any more.
        lost: its front end died.
        last_token_at: when it last got one, or came.
    """

    ask: Ask
    stream: Stream
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[int, float]] = field(default_factory=dict)
    ended: EndReason | None = None
    detail: str = ""
    num_counted: int = -1
    error: QuireError | None = None
    left: bool = False
    stopped_at: int | None = None
    lost: bool = False
    last_token_at: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.error is not None or self.left or self.lost


class SimFront(SimProcess):
    """One front end. Owns its link to the scheduler, and its clients.

    Attributes:
        scheduler_deaths: when it was given another scheduler.
    """

    role = "frontend"

    def __init__(self, world: "World", index: int) -> None:
        super().__init__(world)
        self.index = index
        self.session = Session(self._post, self.pid, index, world.events)
        self.readers: list[Reader] = []
        self.submitted: Counter[str] = Counter()
        self.scheduler_deaths: list[float] = []
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

    def hear(self, command: Command) -> None:
        match command.kind:
            case "scheduler":
                is_another = 0 < self._incarnation < command.incarnation
                self._incarnation = command.incarnation
                if is_another:
                    self.scheduler_deaths.append(self.world.events.now)
                self._link(after_death=is_another)
            case "engine_failed":
                self.session.fail("the engine is gone")

    # ---- the link

    def _link(self, *, after_death: bool = False) -> None:
        self._relinking = False
        if self._channel is not None:
            self._channel.close()
        self.world.net.hang_up(self._peer)
        self._peer, self._channel = self.world.net.front_end(self._incarnation, self._wake)
        self.session.begin_link(after_death=after_death)

    def _post(self, message: Message) -> None:
        if self._channel is None:
            return  # as without a link; what is to be said again, will be
        if isinstance(message, AddRequest):
            self.submitted[message.request_id] += 1
            self.world.num_submissions[message.request_id] += 1
        self._channel.send(message)

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
                going_on = self.session.take(received.message)
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
        self.world.net.hang_up(self._peer)
        for reader in self.readers:
            reader.lost = not reader.is_over

    # ---- clients

    def ask(self, ask: Ask) -> None:
        """A client comes."""
        reader: Reader | None = None
        if all(r.ask.name != ask.name or r.stream.over for r in self.readers):
            del self.submitted[ask.name]

        def news() -> None:
            if reader is not None:
                self._take(reader)

        try:
            stream = self.session.add(self.world.message(ask), news)
        except InvalidRequest as error:
            assert error.code == "duplicate_request_id", f"{ask.name} was refused: {error}"
            assert any(stream.request_id == ask.name for stream in self.session.table.streams)
            return
        except EngineError:
            assert self.world.fatal_error is not None, "refused as if the engine had failed"
            return
        reader = Reader(ask, stream, last_token_at=self.world.events.now)
        self.readers.append(reader)
        self.world.num_requests += 1
        self._take(reader)
        if ask.then[0] == "leave_at":
            self.world.events.after(ask.then[1] / 10, lambda: self._leave(reader))

    def _leave(self, reader: Reader) -> None:
        if self.alive and not reader.is_over:
            reader.left = True
            self.session.abort(reader.stream)

    def _take(self, reader: Reader) -> None:
        """What came of it, and what its client does then."""
        if reader.left:
            return
        assert not (reader.ended or reader.error), f"{reader.ask.name}: more after its end"
        try:
            update = reader.stream.take()
        except QuireError as error:
            reader.error = error
            self.world.judge(self, reader)
            return
        if update is None:
            return
        self.world.came(reader, update)
        kind, after = reader.ask.then
        if reader.ended is not None:
            self.world.judge(self, reader)
        elif kind == "abort" and len(reader.tokens) >= after:
            self._leave(reader)
        elif kind == "stop" and len(reader.tokens) > after:
            reader.left, reader.stopped_at = True, after
            self.session.stop_at(reader.stream, after)

    def let_go(self) -> None:
        """Forget clients that are done."""
        self.readers = [reader for reader in self.readers if not reader.is_over]

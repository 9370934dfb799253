"""One front end's side of its link to the scheduler, without any I/O: what to send, what came, what to send again.

The scheduler may die and be started again, and a message may be damaged on its way. Then the link begins anew, and
every answer in flight is submitted once more, with the tokens that its client has got already: the scheduler goes on
behind them. The client of a stream notices a pause, and nothing else.

A request may be what ends the scheduler. Only a front end knows what was in flight then, so it counts: a request that
was in flight at three deaths of the scheduler, and got no token in between, ends with an error.
"""

import time
from collections.abc import Callable

from quire.launch.frontend.streams import Stream, StreamTable
from quire.protocol.errors import EngineError
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    EngineState,
    Rejected,
    Statistics,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused, Welcome

MAX_SCHEDULER_DEATHS = 3
"""Deaths of the scheduler, with no token in between, after which a request in flight ends. The supervisor gives up
later, after five (``policy.MAX_DEATHS``), so that the engine survives such a request."""
ENGINE_FAULT = (
    f"engine_fault: the scheduler died {MAX_SCHEDULER_DEATHS} times with this request, which got no token in between"
)


class Session:
    """What one front end knows of the engine. Owns the table of streams.

    Attributes:
        state: loading, ready, recovering, draining or failed.
        since: when that state began, in seconds of ``clock``.
        progress_at: when a token, or an ending, came last, or the first of those in flight was added.
        detail: why, when it failed.
        life: which link this is; grows with each new one.
        was_ready: the engine has been ready before, on whichever link: what loads now, recovers.
    """

    def __init__(
        self, post: Callable[[Message], None], pid: int, index: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``post``: sends a message over the present link, in order, and does not wait."""
        self._post = post
        self._pid, self._index = pid, index
        self._clock = clock
        self.state, self.detail, self.since = "loading", "", clock()
        self.progress_at = self.since
        self.table = StreamTable()
        self.link_number = 0
        self.was_ready = False
        self._accepts = False

    # ---- the link

    def begin_link(self, *, after_death: bool = False) -> None:
        """There is a new link, on which nothing was said yet. ``after_death``: to another scheduler."""
        if after_death:
            self.count_scheduler_death()
        self.link_number += 1
        self._accepts = False
        self.table.forget_handles()
        for stream in self.table.streams:
            if stream.muted:  # the engine that should have ended it is gone
                self.table.drop(stream)
        if self.state == "ready":
            self.become("recovering")
        self._post(Hello(PROTOCOL_VERSION, "frontend", self._index, self._pid))

    def beat(self) -> None:
        """To be called every second or so, welcomed or not: the answer, or a cut link, shows what was lost."""
        if self.link_number:
            self._post(Heartbeat(self._clock()))

    def take(self, message: Message | ProtocolError) -> bool:
        """What came. False: the link is broken, or was cut; the caller makes a new one and calls ``begin``."""
        match message:
            case StepOutputs():
                return self._take_outputs(message)
            case Rejected():
                self.table.reject(message)
            case Welcome() | Statistics() | Heartbeat():
                pass  # the client that asked for it looks at it
            case EngineState(kind="failed", detail=detail):
                self.fail(detail)
            case EngineState():
                self._take_state(message.kind)
            case Refused(reason=reason, final=True):
                self.fail(reason)
            case _:
                return False
        return True

    def _take_outputs(self, message: StepOutputs) -> bool:
        try:
            self.table.apply(message)
        except (KeyError, ValueError):  # of a request or a handle that this side does not know
            return False
        self.progress_at = self._clock()
        return True

    def count_scheduler_death(self) -> None:
        """Each request that the dead scheduler had may be why it died, and would end the next one as well."""
        for stream in self.table.streams:
            if stream.link_number == self.link_number:
                stream.note_death()
                if stream.num_deaths == MAX_SCHEDULER_DEATHS:
                    self.table.end_failed(stream, ENGINE_FAULT)

    def _take_state(self, kind: str) -> None:
        if kind == "ready" and not self._accepts:
            self._accepts = True
            for stream in self.table.streams:
                if stream.link_number != self.link_number:
                    self._submit(stream)
        self.was_ready |= kind == "ready"
        if self.state not in ("draining", "failed"):
            self.become("recovering" if kind == "loading" and self.was_ready else kind)

    # ---- requests

    def add(self, request: AddRequest, on_update: Callable[[], None] | None = None) -> Stream:
        """Submit it now, or as soon as the engine takes requests.

        Raises:
            InvalidRequest: its id is in use.
            EngineError: the engine has failed.
        """
        self.require_alive()
        if not len(self.table):
            self.progress_at = self._clock()
        stream = self.table.add(request, on_update)
        if self._accepts:
            self._submit(stream)
        return stream

    def abort(self, stream: Stream) -> None:
        """The rest is not wanted."""
        self._end(stream, Abort([stream.request_id]))

    def stop_at(self, stream: Stream, num_output_tokens: int) -> None:
        """It ends with that many tokens."""
        self._end(stream, Stop(stream.request_id, num_output_tokens))

    def shut_down(self, detail: str) -> None:
        """End every answer in flight with an error."""
        sent = [stream.request_id for stream in self.table.streams if stream.link_number == self.link_number]
        if sent:
            self._post(Abort(sent))
        for stream in self.table.streams:
            self.table.end_failed(stream, detail)

    def _end(self, stream: Stream, message: Message) -> None:
        if not stream.over and not stream.muted:
            if stream.link_number == self.link_number:
                self._post(message)
            else:
                self.table.drop(stream)
        stream.muted = True

    def _submit(self, stream: Stream) -> None:
        request = stream.submission()
        stream.link_number = self.link_number
        self._post(request)

    # ---- states

    @property
    def seconds_without_progress(self) -> float:
        """How long nothing has come although something is in flight, or the engine recovers already."""
        now = self._clock()
        waiting = now - self.progress_at if len(self.table) else 0.0
        return max(waiting, now - self.since if self.state == "recovering" else 0.0)

    def become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, self._clock()

    def fail(self, reason: str) -> None:
        """The engine is gone for good: every stream ends with that."""
        self.become("failed")
        self.detail = reason
        self._accepts = False
        self.table.fail(reason)

    def require_alive(self) -> None:
        if self.state == "failed":
            raise EngineError(self.detail)

"""The front end's side of its link to the scheduler: submission, updates and resubmission. No I/O.

When the scheduler was restarted, or a message was damaged, a new link begins. Every answer in flight is resubmitted
with the tokens that it has received, and the scheduler continues after them. The client notices only a pause.

A request may crash the scheduler. Only the front ends know the requests that were in flight then, so they count: a
request that was in flight at three scheduler deaths, with no token in between, ends with an error.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count

from quire.frontend.engine.streams import Stream, StreamTable, call_now
from quire.protocol.errors import EngineError, InvalidRequest, printable
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import (
    MAX_TOOL_NAME,
    Abort,
    AddRequest,
    CallsTool,
    Control,
    EngineState,
    Rejected,
    Statistics,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.timeline import TimelineEvent

MAX_SCHEDULER_DEATHS = 3
"""Scheduler deaths, with no token in between, after which a request in flight ends with an error. The engine gives up
after more of them (``policy.MAX_DEATHS``), so that it survives such a request."""
ENGINE_FAULT = (
    f"engine_fault: the scheduler died {MAX_SCHEDULER_DEATHS} times while this request was in flight, with no token in "
    "between"
)

CONTROLS_OF_MODE = {"wait": ("pause_new",), "keep": ("pause",), "abort": ("pause_new", "abort_all")}
"""The messages to the scheduler for each mode of a pause."""


def controls_of_pause(mode: object) -> tuple[str, ...]:
    """Return the kinds of Control of a pause; raise InvalidRequest for an unknown mode."""
    if not isinstance(mode, str) or mode not in CONTROLS_OF_MODE:
        raise InvalidRequest(f"mode must be wait, keep or abort (got {printable(mode)})", "mode")
    return CONTROLS_OF_MODE[mode]


class Session:
    """The engine's state and the streams in flight of one front end.

    Attributes:
        state: loading, ready, recovering, draining or failed.
        since: when that state began, in seconds of ``clock``.
        progress_at: when the last token or end arrived, or the first stream was added to an empty table.
        detail: the reason, if the state is failed.
        pause: pause, pause_new or empty, as in Control.
        link_number: number of the current link; a new one has a larger number.
        accepts: the scheduler of this link has been ready: it takes requests, and answers while workers are replaced.
        was_ready: the engine has been ready on some link, so "loading" means "recovering".
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        pid: int,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[Callable[[], None]], None] = call_now,
        link_numbers: Iterator[int] | None = None,
    ) -> None:
        """
        Args:
            post: sends a message over the current link, in order and without blocking.
            notify: calls the ``on_update`` of a stream, now or later.
            link_numbers: numbers for links. Sessions that exchange streams share it, so that a number names one link.
        """
        self._post = post
        self._pid, self._index = pid, index
        self._clock = clock
        self.state, self.detail, self.pause, self.since = "loading", "", "", clock()
        self.progress_at = self.since
        self.table = StreamTable(notify)
        self._link_numbers = count(1) if link_numbers is None else link_numbers
        self.link_number = 0
        self.was_ready = False
        self.accepts = False

    # ---- the link

    def begin_link(self, *, after_death: bool = False) -> None:
        """Begin a new link with a Hello. ``after_death``: it is to a new scheduler, because the previous one died."""
        if after_death:
            self.count_scheduler_death()
        self.link_number = next(self._link_numbers)
        self.accepts = False
        self.table.forget_handles()
        for stream in self.table.streams:
            if stream.muted:  # its end would have been a message on the previous link
                self.table.drop(stream)
        if self.state == "ready":
            self.become("recovering")
        self._post(Hello(PROTOCOL_VERSION, "frontend", self._index, self._pid))

    def beat(self) -> None:
        """Send a heartbeat; call about once a second, even before Welcome. A lost message shows in the reply."""
        if self.link_number:
            self._post(Heartbeat(self._clock()))

    def take(self, message: Message | ProtocolError) -> bool:
        """Process a message. If False, the link is broken: the caller opens a new one and calls ``begin_link``."""
        match message:
            case StepOutputs():
                return self._take_outputs(message)
            case Rejected(code="parent_not_found"):  # it ended just before
                if (stream := self.table.get(message.request_id)) is not None:
                    if stream.muted:  # no end follows a rejection
                        self.table.drop(stream)
                    else:
                        self._post(stream.request)
            case Rejected():
                self.table.reject(message)
            case Welcome() | Statistics() | Heartbeat():
                pass  # the client handles these itself
            case EngineState(kind="failed", detail=detail):
                self.fail(detail)
            case EngineState():
                self._take_state(message.kind)
                self._take_pause(message.pause)
            case Refused(reason=reason, final=True):
                self.fail(reason)
            case _:
                return False
        return True

    def _take_outputs(self, message: StepOutputs) -> bool:
        try:
            self.table.apply(message)
        except (KeyError, ValueError):  # unknown request id or handle
            return False
        self.progress_at = self.progress_at if message.timeline else self._clock()
        return True

    def count_scheduler_death(self) -> None:
        """Count a scheduler death for each request that it had, which may be the cause; end those with too many."""
        for stream in self.table.streams:
            if stream.link_number == self.link_number:
                stream.note_death()
                if stream.num_deaths == MAX_SCHEDULER_DEATHS:
                    self.table.end_failed(stream, ENGINE_FAULT)

    def _take_state(self, kind: str) -> None:
        if kind == "ready" and not self.accepts:
            self.accepts = True
            for stream in self.table.streams:
                if stream.link_number != self.link_number:
                    self._submit(stream)
        self.was_ready |= kind == "ready"
        if self.state not in ("draining", "failed"):
            self.become("recovering" if kind == "loading" and self.was_ready else kind)

    def _take_pause(self, pause: str) -> None:
        if self.pause and not pause:
            self.progress_at = self._clock()  # no token was expected until now
        self.pause = pause

    # ---- requests

    def add(
        self, request: AddRequest, on_update: Callable[[], None] | None = None, parent: Stream | None = None
    ) -> Stream:
        """Submit a request now, or as soon as the engine accepts requests.

        ``parent``: a stream that begins with the same tokens, of which the request becomes a fork if that can be.

        Raises:
            InvalidRequest: the request id is in use.
            EngineError: the engine has failed.
        """
        self.require_alive()
        stream = Stream(request, on_update, parent, self)
        self.adopt(stream)
        return stream

    def adopt(self, stream: Stream) -> None:
        """Submit a stream, new or of another session, now or as soon as the engine accepts requests.

        Raises:
            InvalidRequest: the request id is in use.
        """
        if not len(self.table):
            self.progress_at = self._clock()
        self.table.add(stream)
        if self.accepts:
            self._submit(stream)

    def release(self, stream: Stream) -> None:
        """Give up a stream, which another session is to adopt.

        If the scheduler has its request, the request is aborted. Until its end arrives, a muted stream has its place.
        """
        if stream.link_number == self.link_number:
            self._post(Abort([stream.request_id]))
            self.table.replace(stream, Stream.muted_for(stream))
        else:
            self.table.remove(stream)

    def abort(self, stream: Stream) -> None:
        self._end(stream, Abort([stream.request_id]))

    def stop_at(self, stream: Stream, num_output_tokens: int) -> None:
        """End the stream with this many tokens."""
        self._end(stream, Stop(stream.request_id, num_output_tokens))

    def calls_tool(self, stream: Stream, tool: str) -> None:
        """Report which tool the stream's answer, which has ended, calls. A new scheduler does not know the request."""
        if stream.link_number == self.link_number:
            self._post(CallsTool(stream.request_id, tool[:MAX_TOOL_NAME]))

    def set_pause(self, kind: str) -> None:
        """Pause or resume the engine; ``kind``: pause, pause_new or resume, as in Control."""
        self._post(Control(kind))

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
        if stream.timeline is not None and stream.link_number:
            stream.timeline.append(TimelineEvent("resubmitted", self._clock()))
        request = stream.submission(self.link_number)
        stream.link_number = self.link_number
        self._post(request)

    # ---- states

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the last token while a stream is in flight and no pause is set, or since a recovery began."""
        now = self._clock()
        waiting = now - self.progress_at if len(self.table) and not self.pause else 0.0
        return max(waiting, now - self.since if self.state == "recovering" else 0.0)

    def become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, self._clock()

    def fail(self, reason: str) -> None:
        """End every stream with ``reason``: the engine has failed."""
        self.become("failed")
        self.detail = reason
        self.accepts = False
        self.table.fail(reason)

    def require_alive(self) -> None:
        if self.state == "failed":
            raise EngineError(self.detail)

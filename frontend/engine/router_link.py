"""The front end's side of its link to the router: questions, and reports of what happens to requests. No I/O."""

from collections.abc import Callable

from quire.frontend.engine.routed_stream import NOWHERE, RoutedStream
from quire.protocol.process.log import event_logger
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message
from quire.protocol.wire.router_messages import Progress, Routed

log = event_logger("frontend")

ROUTE_TIMEOUT_S = 1.0
"""Seconds after which the front end chooses an engine itself."""


class RouterLink:
    """Owns the questions that the router has not answered, and the reports that have not been sent.

    Attributes:
        is_open: the router of this link has sent its Welcome, and has not refused this front end.
        is_silent: it did not answer a question in time, and has sent nothing since.
    """

    def __init__(self, post: Callable[[Message], None], pid: int, index: int) -> None:
        """``post``: sends a message over the current link, in order and without blocking."""
        self._post = post
        self._pid, self._index = pid, index
        self.is_open = self.is_silent = self._has_link = False
        self._asked: dict[int, tuple[float, RoutedStream]] = {}
        """Time and stream of each question, by ticket, in the order of asking."""
        self._started: list[int] = []
        self._ended: list[int] = []

    @property
    def answers(self) -> bool:
        return self.is_open and not self.is_silent

    def begin(self) -> None:
        """Begin a new link with a Hello. The router does not know what earlier ones knew."""
        self.close()
        self._has_link = True
        self._post(Hello(PROTOCOL_VERSION, "frontend", self._index, self._pid))

    def close(self) -> None:
        """Forget all questions and reports: until a new link is open, engines are chosen without the router."""
        self.is_open = self.is_silent = self._has_link = False
        self._asked.clear()
        self._started.clear()
        self._ended.clear()

    def beat(self, now: float) -> None:
        if self._has_link:
            self._post(Heartbeat(now))

    # ---- questions

    def ask(self, routed: RoutedStream, excluded: list[int], now: float) -> None:
        """Ask for an engine, after all reports: the request may have left another engine."""
        self.flush()
        self._asked[routed.ticket] = (now, routed)
        self._post(routed.route(excluded))

    def is_asked(self, routed: RoutedStream) -> bool:
        return routed.ticket in self._asked

    def answered(self, choice: Routed) -> RoutedStream | None:
        """Return the stream of an answer; None if the question is not open any more."""
        _, routed = self._asked.pop(choice.ticket, (0.0, None))
        return routed

    def give_up_late(self, now: float) -> None:
        """Forget all questions if one has not been answered in time."""
        oldest, _ = next(iter(self._asked.values()), (now, None))
        if now - oldest >= ROUTE_TIMEOUT_S:
            log.warning("the router does not answer: engines are chosen without it", seconds=ROUTE_TIMEOUT_S)
            self.is_silent = True
            self._ended += self._asked  # a late answer has no effect
            self._asked.clear()

    # ---- reports

    def place(self, routed: RoutedStream) -> None:
        """Report a stream that is on an engine without the router's choice."""
        if self.is_open:
            self.flush()
            self._post(routed.placed())

    def started(self, routed: RoutedStream) -> None:
        if self.is_open:
            self._started.append(routed.ticket)

    def ended(self, routed: RoutedStream) -> None:
        self._asked.pop(routed.ticket, None)
        if self.is_open:
            self._ended.append(routed.ticket)

    def flush(self) -> None:
        """Send the reports that have been collected."""
        if self._started or self._ended:
            self._post(Progress(self._started, self._ended))
            self._started, self._ended = [], []

    def check(self) -> None:
        """Raise AssertionError unless all questions are about streams that wait."""
        for _, routed in self._asked.values():
            assert routed.engine == NOWHERE, f"{routed.stream.request_id} is on an engine and asked for"

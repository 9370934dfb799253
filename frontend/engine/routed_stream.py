"""One stream in flight of a server with several engines. No I/O."""

from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.wire.router_messages import Placed, Route

NOWHERE = -1
"""Engine of a stream that waits for one."""


class RoutedStream:
    """One stream in flight and where it is.

    Attributes:
        ticket: its number in messages to the router.
        keys: as of Route.
        engine: the engine that has it, or NOWHERE.
        session: that engine's session, or the one of waiting streams.
        has_started: it has got a result there.
        refused_by: engines whose queue was full.
        followers: waiting streams that begin with the same tokens, and go to the engine where this one goes, by ticket.
        num_tokens_at_loss: output tokens when an engine with it lost its workers last, or -1.
        stays: it stays on an engine without workers, which finds out whether it is the cause.
    """

    __slots__ = (
        "engine", "followers", "has_started", "keys", "num_tokens_at_loss", "refused_by", "session",
        "stays", "stream", "ticket",
    )  # fmt: skip

    def __init__(self, stream: Stream, ticket: int, keys: bytes, session: Session) -> None:
        self.stream = stream
        self.ticket = ticket
        self.keys = keys
        self.engine = NOWHERE
        self.session = session
        self.num_tokens_at_loss = -1
        self.has_started = self.stays = False
        self.followers: dict[int, RoutedStream] = {}
        self.refused_by: set[int] = set()

    def route(self, excluded: list[int]) -> Route:
        """Return the question for an engine."""
        return Route.of(self.ticket, self.stream.request, self._num_tokens, self.keys, excluded)

    def placed(self) -> Placed:
        """Return the report that it is on its engine."""
        return Placed.of(self.ticket, self.engine, self.stream.request, self._num_tokens, self.has_started)

    @property
    def _num_tokens(self) -> int:
        return len(self.stream.request.prompt_token_ids) + len(self.stream.tokens)

"""The open sessions of one front end, by id."""

import time
from collections import Counter
from collections.abc import Callable

from quire.frontend.ids import new_id
from quire.frontend.sessions.open_session import OpenSession
from quire.protocol.errors import InvalidRequest, printable

MAX_BYTES = 2**30
"""Bytes of tokens and images of all sessions, from which on no piece is accepted. Without it, 10,000 sessions of a
context of a million tokens would take 40 GB."""


class SessionStore:
    """Owns the sessions of one front end.

    One tenant may have all of them. When they are full, the tenant with the most loses its oldest idle ones to a tenant
    with fewer, so that no client can use up the sessions of all others.
    """

    def __init__(
        self,
        max_sessions: int = 10_000,
        timeout_s: float = 3600.0,
        index: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            max_sessions: most open sessions.
            timeout_s: seconds without a piece after which a session ends.
            index: number of this front end.
        """
        self.timeout_s = timeout_s
        self._max_sessions = max_sessions
        self._index = index
        self._now = now
        # In the order of their last use. A dictionary takes a third of the memory of an OrderedDict.
        self._sessions: dict[str, OpenSession] = {}
        self._counts: Counter[int] = Counter()
        """Sessions by tenant."""
        self._bytes: Counter[int] = Counter()
        """Bytes of tokens and images by tenant."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens and images of all sessions."""
        return self._bytes.total()

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    @property
    def num_idle(self) -> int:
        return sum(not session.is_busy for session in self._sessions.values())

    def open(self, tenant: int) -> str:
        """Open a session, and return its id.

        Raises:
            InvalidRequest: too_many_sessions.
        """
        self.expire()
        if len(self._sessions) >= self._max_sessions and not self._end_one_of_largest(self._counts, tenant, 1):
            text = f"{len(self._sessions)} sessions are open, and --max-sessions is {self._max_sessions}: end one, or "
            raise InvalidRequest(f"{text}retry later", "session", "too_many_sessions")
        session_id = new_id("sess_", self._index)
        self._sessions[session_id] = OpenSession(tenant, self._now())
        self._counts[tenant] += 1
        return session_id

    def get(self, tenant: int, session_id: str) -> OpenSession:
        """Return the session.

        Raises:
            InvalidRequest: session_not_found; also for a session of another tenant.
        """
        self.expire()
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise not_found(session_id)
        return session

    def use(self, tenant: int, session_id: str) -> OpenSession:
        """Return the session for a piece, as ``get``, and note the time."""
        session = self.get(tenant, session_id)
        self._touch(session_id)
        return session

    def require_room(self, tenant: int) -> None:
        """Raise InvalidRequest (too_many_sessions) if all sessions have MAX_BYTES."""
        while self.num_bytes >= MAX_BYTES:
            if not self._end_one_of_largest(self._bytes, tenant, 0):
                text = f"tokens and images of all open sessions have {self.num_bytes} bytes (limit {MAX_BYTES})"
                raise InvalidRequest(f"{text}: end one, or retry later", "session", "too_many_sessions")

    def _end_one_of_largest(self, held: Counter[int], tenant: int, wanted: int) -> bool:
        """End the session that has been idle for longest, of the tenant that holds the most.

        Return False if ``tenant`` would hold as much as that one with ``wanted`` more, or none of them is idle.
        """
        largest = max(held, key=held.__getitem__, default=tenant)
        if held[tenant] + wanted >= held[largest]:
            return False
        for session_id, session in self._sessions.items():
            counts = held is self._counts or session.num_bytes
            if session.tenant == largest and counts and not session.is_busy:
                self._drop(session_id)
                return True
        return False

    def piece_ended(self, session_id: str, num_bytes: int | None, *, close: bool) -> None:
        """Count a piece that is no longer in flight.

        Args:
            num_bytes: bytes that the session has grown by; None if it stayed as it was.
            close: end the session, unless it stayed as it was.
        """
        if session_id not in self._sessions:
            return
        self._bytes[self._sessions[session_id].tenant] += num_bytes or 0
        self._touch(session_id)
        if close and num_bytes is not None:
            self._drop(session_id)

    def close(self, tenant: int, session_id: str) -> OpenSession:
        """End a session, and return it. An answer in flight continues.

        Raises:
            InvalidRequest: session_not_found.
        """
        session = self.get(tenant, session_id)
        self._drop(session_id)
        return session

    def expire(self) -> None:
        """End the sessions that have been idle for too long."""
        oldest = self._now() - self.timeout_s
        expired: list[str] = []
        for session_id, session in self._sessions.items():
            if session.used_at > oldest:
                break
            if not session.is_busy:
                expired.append(session_id)
        for session_id in expired:
            self._drop(session_id)

    def _touch(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        session.used_at = self._now()
        self._sessions[session_id] = session

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._counts[session.tenant] -= 1
        self._bytes[session.tenant] -= session.num_bytes


def not_found(session_id: str) -> InvalidRequest:
    text = f"session {printable(session_id)} not found: it has ended, was idle for too long, or made room for another "
    text += "client's. Open another one, and send the whole input as its first piece"
    return InvalidRequest(text, "session", "session_not_found")

"""One open session: the tokens of a prompt that arrives in pieces, and of the answers in between.

A session is only tokens. Each piece is a request of its own, whose prompt is all tokens so far and those of the piece:
the scheduler and the workers know nothing of sessions, so an idle one costs no block, and the death of any of them is
the death that every request survives. The prefix cache finds the earlier part again.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.frontend.text.placed_items import PlacedItem
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.arrays import Int32

ANSWER = "answer"
TEXT = "text"
KEPT_REASONS = frozenset(("stop", "length", "repetition"))
"""Finish reasons of answers that become a part of the session, which others leave unchanged."""


class OpenSession(msgspec.Struct, gc=False):
    """The state of one session, small while it is idle.

    Attributes:
        tenant: number of the tenant that alone may continue it.
        used_at: when it was last used, in seconds of the store's clock.
        tokens: int32 tokens of all pieces and answers so far.
        num_pieces: pieces so far, and the number of the next one.
        end: what the tokens end with: ``TEXT``, the ``ANSWER`` of a chat, or the role of a chat's last message; ""
            for a session without tokens.
        is_busy: a piece is in flight.
        items: images in the tokens, whose files exist as long as the session.
    """

    tenant: int
    used_at: float
    tokens: bytes = b""
    num_pieces: int = 0
    end: str = ""
    is_busy: bool = False
    items: tuple[PlacedItem, ...] = ()

    @property
    def token_ids(self) -> Int32:
        return np.frombuffer(self.tokens, np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def num_bytes(self) -> int:
        """Bytes of its tokens and of the files of its images. One image in two sessions counts in both."""
        return len(self.tokens) + sum(item.content.num_bytes for item in self.items)


def _ignore_end(num_bytes: int | None) -> None:
    pass


class Piece:
    """The next piece of a session, as one request. A context manager while that is in flight, in which no other piece
    may be.

    The session changes as a whole or not at all: when the answer has ended by itself, the piece and the answer are
    added to its tokens.

    Attributes:
        name: id of the session, which is also its job; "" for tokens that are kept without one.
        token_ids, items: the request's prompt: all so far, and those of the piece.
    """

    def __init__(
        self,
        name: str,
        session: OpenSession,
        token_ids: Sequence[int],
        max_model_len: int,
        *,
        end: str = TEXT,
        items: Sequence[PlacedItem] = (),
        number: int | None = None,
        on_end: Callable[[int | None], None] = _ignore_end,
    ) -> None:
        """
        Args:
            name: see above; also for errors.
            token_ids: those of the piece alone.
            max_model_len: most tokens of prompt and answer together.
            end: what the session ends with if there is no answer; see ``OpenSession.end``.
            items: those of the piece alone.
            number: number that the client gave the piece, or None.
            on_end: called when the piece is no longer in flight, with the bytes that the session has grown by; None if
                it stayed as it was.

        Raises:
            InvalidRequest: another number is due, the session and the piece have no token, or too many.
        """
        check_number(name, session, number)
        total = session.num_tokens + len(token_ids)
        if not 1 <= total < max_model_len:
            text = f"session {name} has {session.num_tokens} tokens and the piece {len(token_ids)}: together they must "
            text += f"have from 1 to {max_model_len - 1} (got {total})"
            raise InvalidRequest(text, "session", "context_length_exceeded" if total else "invalid_value")
        self.token_ids = np.concatenate([session.token_ids, np.array(token_ids, np.int32)])
        self.items = (*session.items, *(item.moved(session.num_tokens) for item in items))
        self.name, self._session, self._number = name, session, session.num_pieces
        self._end, self._on_end = end, on_end
        self._answer: list[int] = []
        self._num_bytes: int | None = None

    def __enter__(self) -> "Piece":
        """Raise InvalidRequest (session_busy) if another piece is in flight, or was since this one was made."""
        session = self._session
        if session.is_busy or session.num_pieces != self._number:
            text = f"session {self.name} is busy with piece {session.num_pieces}: wait for the end of its answer"
            raise InvalidRequest(text, "session", "session_busy")
        session.is_busy = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.is_busy = False
        self._on_end(self._num_bytes)

    def add(self, token_ids: Sequence[int], finish_reason: str | None) -> None:
        """Add tokens of the answer; the session gets them, and the piece, with a finish reason of KEPT_REASONS."""
        self._answer += token_ids
        if finish_reason in KEPT_REASONS:
            session, num_before = self._session, self._session.num_bytes
            session.tokens = self.token_ids.tobytes() + np.array(self._answer, np.int32).tobytes()
            session.items = self.items
            self._num_bytes = session.num_bytes - num_before
            session.num_pieces += 1
            is_answered = bool(self._answer) and self._end != TEXT
            session.end = ANSWER if is_answered else self._end


def check_number(name: str, session: OpenSession, number: int | None) -> None:
    """Raise InvalidRequest (session_out_of_order) unless the next piece has this number, or none was given."""
    if number is not None and number != session.num_pieces:
        text = f"session.piece must be {session.num_pieces}, the number of the next piece of {name} (got {number})"
        raise InvalidRequest(text, "session.piece", "session_out_of_order")

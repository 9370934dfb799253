"""Messages that continue the chat of a session, as tokens."""

from dataclasses import replace

from quire.frontend.sessions.open_session import ANSWER, TEXT, OpenSession, Piece
from quire.frontend.text.chat_template import Message
from quire.frontend.text.continuation import encode_continuation
from quire.frontend.text.prompts import ModelLimits, Prompt, encode_messages, moved
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest


def check_kind(name: str, session: OpenSession, *, is_chat: bool) -> None:
    """Raise InvalidRequest if the session continues the other kind of input: text or a chat. ``name``: its id."""
    if session.end and is_chat == (session.end == TEXT):
        kind, other = ("text", "messages") if is_chat else ("a chat", "text")
        raise InvalidRequest(
            f"session {name} continues {kind}, and does not accept {other}", "session", "unsupported_value"
        )


def encode_chat_piece(
    session: OpenSession, messages: list[Message], options: ChatOptions, text_in: TextIn, limits: ModelLimits
) -> Prompt:
    """Return the tokens of messages, without those of the session, which they continue.

    Raises:
        InvalidRequest: as ``encode_messages`` and ``encode_continuation``.
    """
    if not session.tokens:
        return encode_messages(messages, options, text_in, limits)
    is_answered = session.end == ANSWER
    role, answered_with = ("assistant", int(session.token_ids[-1])) if is_answered else (session.end, None)
    return encode_continuation(messages, role, answered_with, options, text_in, limits)


def whole_prompt(piece: Piece, prompt: Prompt | None, *, is_chat: bool) -> Prompt:
    """Return the prompt of a piece's request: all tokens so far, and those of ``prompt``, which is the piece alone.

    Only what the template writes for this piece opens a thought.
    """
    if prompt is None:
        return Prompt(piece.token_ids, items=piece.items)
    num_before = len(piece.token_ids) - len(prompt.token_ids)
    plain = moved(prompt.plain_spans, num_before) if is_chat else ()
    return replace(prompt, token_ids=piece.token_ids, text=None, plain_spans=plain, items=piece.items)

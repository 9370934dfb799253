"""Messages that every link carries, and the base of all messages.

All messages are frozen structs of closed unions, one union per direction of a link (front_end_messages.py,
worker_messages.py). Fields grow at the tail, with defaults; a tag is never reused. Tags 14 to 18 and 43 are events of
the scheduler process' own (scheduler_proc/core/events.py); 19 was used up to version 1.
"""

import msgspec

PROTOCOL_VERSION = 2


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages: encoded as an array that starts with an integer tag."""


class Hello(Message, frozen=True, tag=1):
    """First message of a process that connects. ``role`` is frontend or worker; ``index`` its rank or number."""

    protocol_version: int
    role: str
    index: int
    pid: int


class Welcome(Message, frozen=True, tag=2):
    protocol_version: int
    config_digest: str
    max_model_len: int = 0


class Refused(Message, frozen=True, tag=3):
    """The connection, or the last message on it, is not accepted. ``final``: nor will another one be."""

    reason: str
    final: bool = False


class Heartbeat(Message, frozen=True, tag=4):
    """From a process that only waits, every second or so; the scheduler sends one back.

    A message that was lost, and behind which there is no other, shows as a gap before it, on either way.
    """

    now: float

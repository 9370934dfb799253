"""The base of all messages, and the messages that every link carries.

All messages are frozen structs of closed unions, one union per direction of a link (front_end_messages.py,
worker_messages.py). New fields go to the end, with defaults; a tag is never reused. Tags 14 to 18, 24, 43, 47 and 53
are events inside the scheduler process (scheduler_proc/requests/events.py); 19 was used until version 1.
"""

import msgspec

PROTOCOL_VERSION = 10


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages, encoded as an array that starts with an integer tag."""


class Hello(Message, frozen=True, tag=1):
    """First message of a connecting process.

    ``role`` is frontend, worker, or router (to a scheduler, which answers it as it answers front ends); ``index`` is
    the number or rank of the process.
    """

    protocol_version: int
    role: str
    index: int
    pid: int


class Welcome(Message, frozen=True, tag=2):
    protocol_version: int
    config_digest: str
    max_model_len: int = 0


class Refused(Message, frozen=True, tag=3):
    """The connection, or the last message on it, is rejected. ``final``: another connection would be rejected too."""

    reason: str
    final: bool = False


class Heartbeat(Message, frozen=True, tag=4):
    """Sent about once a second by a process that only waits; the scheduler answers with one.

    A lost message that no other message follows is detected as a gap before the heartbeat, in either direction.
    """

    now: float

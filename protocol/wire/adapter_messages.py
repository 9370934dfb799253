"""Messages about LoRA adapters, which are identified by the digest of their content and never by a name or a path."""

import msgspec

from quire.protocol.wire.link_messages import Message

DIGEST_BYTES = 32
"""Length of a digest: SHA-256 (``quire.protocol.model.adapter``)."""


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """The adapter of a request.

    Attributes:
        name: the name by which the client asked for it; several names may have one digest.
        digest: identity of its content, ``DIGEST_BYTES`` long.
        path: its folder. A worker that finds another content there refuses to load it.
    """

    name: str
    digest: bytes
    path: str


class UnloadAdapter(Message, frozen=True, tag=14):
    """Drop an adapter, under one of its names, from the workers. Answered by Statistics with the same ``query``.

    ``done`` of the answer is false while requests with this name exist; the front end then asks again.

    Attributes:
        force: abort these requests.
    """

    name: str
    digest: bytes
    force: bool = False
    query: int = 0


class LoadAdapter(Message, frozen=True, tag=37):
    """Load an adapter into a slot, beside the steps; every rank answers with AdapterLoaded.

    No step uses the adapter before every rank has answered, and no step that is not answered uses the slot's previous
    adapter or one that is dropped.

    Attributes:
        number: identifies the adapter in ``NewRequestData``; from 1, never reused for another content.
        slot: slot of the device that it fills, from 0.
        dropped: numbers of the adapters whose copies in host memory are freed first.
    """

    number: int
    digest: bytes
    path: str
    slot: int
    dropped: list[int] = []


class AdapterLoaded(Message, frozen=True, tag=49):
    """The end of a LoadAdapter on one rank.

    Attributes:
        problem: why it could not be loaded, in one line, or empty.
        num_bytes: bytes of its weights in this rank's host memory.
        seconds: duration, without the time in the worker's queue.
        was_cached: it was copied from host memory and not read from its folder.
    """

    number: int
    slot: int
    problem: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    was_cached: bool = False

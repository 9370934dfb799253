"""A response that clients may refer to: one that has ended, and one that has not."""

from typing import Any

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that has ended.

    Attributes:
        tenant: of the client that created it.
        body: the response as JSON.
        conversation: all items up to and with its output, as JSON. The responses of one chain share them.
        num_before: items of ``conversation`` that belong to ``previous_response_id``.
        num_input: items of the request's own input, which follow those; the rest is the output.
        only_for: the connection that alone may refer to the response, or None for all of the tenant.
        chain: id of the first response of its chain, or "" if it is the first.
        images: all stored images of ``conversation``, in order; empty in a file.
        events: those of a background response as they are sent, by number; None if they are not kept.
    """

    tenant: int
    body: bytes
    conversation: tuple[bytes, ...]
    num_before: int
    num_input: int
    only_for: Any = None
    chain: str = ""
    images: tuple[Any, ...] = ()
    events: tuple[bytes, ...] | None = None

    @property
    def input(self) -> tuple[bytes, ...]:
        return self.conversation[self.num_before : self.num_before + self.num_input]

    @property
    def output(self) -> tuple[bytes, ...]:
        return self.conversation[self.num_before + self.num_input :]

    @property
    def num_bytes(self) -> int:
        """The size, with shared items counted in full, so that the sum is an upper bound."""
        of_images: int = sum(image.num_bytes for image in self.images)
        parts = (*self.conversation, *(self.events or ()))
        return len(self.body) + sum(map(len, parts)) + 128 * len(parts) + of_images


class BegunResponse(msgspec.Struct, frozen=True):
    """What another front end needs to continue a background response.

    Attributes:
        tenant, client_id, headers: of the client that sent the request; without keys.
        request: the body of the request, as JSON.
        created: when it was sent, in seconds since 1970.
        body: the response as clients see it until it is continued, as JSON.
    """

    tenant: int
    client_id: str
    headers: list[tuple[bytes, bytes]]
    request: bytes
    created: int
    body: bytes = b""

"""A response that clients may refer to."""

from typing import Any

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that has ended.

    Attributes:
        body: the response as JSON.
        conversation: all items up to and with its output, as JSON. The responses of one chain share them.
        num_before: items of ``conversation`` that belong to ``previous_response_id``.
        num_input: items of the request's own input, which follow those.
        output_ids: ids of the items after those; empty if requests cannot refer to single items.
        only_for: the connection that alone may refer to the response, or None for all of the tenant.
        chain: id of the first response of its chain, or "" if it is the first.
        images: all StoredImages of ``conversation``, in order; empty in a copy for another front end.
        events: those of a background response as they are sent, by number; None if they are not kept.
    """

    body: bytes
    conversation: tuple[bytes, ...]
    num_before: int
    num_input: int
    output_ids: tuple[str, ...]
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

    def item(self, item_id: str) -> bytes:
        """Return the output item with this id, one of ``output_ids``, as JSON."""
        return self.output[self.output_ids.index(item_id)]

    @property
    def num_bytes(self) -> int:
        """The size, with shared items counted in full, so that the sum is an upper bound."""
        of_images: int = sum(image.num_bytes for image in self.images)
        parts = (*self.conversation, *(self.events or ()))
        return len(self.body) + sum(map(len, parts)) + 128 * len(parts) + of_images

"""Why one image cannot be used, before the field of the request is known."""

from quire.protocol.errors import InvalidRequest


class Refused(Exception):
    """An image or an embedding cannot be used.

    Attributes:
        text: the reason, which follows the field's name: "must be ...", "has ...". It has no path, address or text of
            another exception.
        is_busy: the server is the cause, so that a later try may succeed.
    """

    def __init__(self, text: str, *, is_busy: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_busy = is_busy

    def about(self, where: str) -> InvalidRequest:
        """Return the error for a client. ``where``: the field."""
        return InvalidRequest(f"{where} {self.text}", where, "queue_full" if self.is_busy else "invalid_value")

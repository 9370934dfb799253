"""Work beside the steps, as the loop sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.protocol.wire.link_messages import Message


class SideWork(Protocol):
    """Work whose messages may arrive between any two messages of steps, and which is done in threads of its own."""

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What the loop calls with a message of each type; it raises StepRefused for one that cannot be handled."""
        ...

    def take_answers(self) -> Sequence[Message]:
        """Return the answers that are ready since the last call."""
        ...

    def begin_worker_epoch(self) -> None:
        """Drop what the previous scheduler has sent."""
        ...

    def close(self) -> None: ...

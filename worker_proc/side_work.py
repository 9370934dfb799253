"""Work beside the steps, as the loop sees it."""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from quire.protocol.wire.link_messages import Message

Answer = TypeVar("Answer", bound=Message)


class Answers(Generic[Answer]):
    """Owns the answers of threads that the loop has not taken yet. ``wake``: called in a thread after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = Lock()
        self._held: list[Answer] = []

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._held.append(answer)
        self._wake()

    def take(self) -> list[Answer]:
        """Return the answers since the last call."""
        # Without the lock, because every turn of the loop asks. An answer that is missed here has a wake-up of its own.
        if not self._held:
            return []
        with self._lock:
            answers, self._held = self._held, []
        return answers

    def clear(self) -> None:
        self._held = []


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

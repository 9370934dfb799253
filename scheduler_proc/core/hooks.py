"""What a Scheduler says of what happens inside an event or a step, for those that record it."""

from typing import Protocol

from quire.protocol.wire.front_end_messages import Ended
from quire.scheduler_proc.requests.request import Request


class SchedulerHooks(Protocol):
    """Is called while the Scheduler changes, and so must not ask it for anything."""

    def block_filled(self, handle: int, name: bytes) -> None:
        """A block of the request became full after its arrival; ``name``: the hash of its content."""
        ...

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """It begins to run, first or again, with so many tokens from the prefix cache."""
        ...

    def ended(self, ended: Ended) -> None:
        """An accepted request has ended."""
        ...


class NoHooks:
    """Nothing is recorded."""

    def block_filled(self, handle: int, name: bytes) -> None:
        pass

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        pass


NO_HOOKS = NoHooks()

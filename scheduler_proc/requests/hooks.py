"""Scheduler hooks: callbacks for recorders, called during events and steps."""

from typing import Protocol

from quire.protocol.wire.front_end_messages import Ended
from quire.scheduler_proc.requests.request import Request


class SchedulerHooks(Protocol):
    """Callbacks of a Scheduler. They run while its state changes, so they must not read or call it."""

    def block_filled(self, handle: int, name: bytes) -> None:
        """A block of the request became full after the arrival. ``name``: its block hash."""
        ...

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """The request was admitted, for the first time or again, with ``num_hit_tokens`` from the prefix cache."""
        ...

    def beams_chosen(self, leader: int, parents: list[int]) -> None:
        """A beam search continues: its beam i continues beam ``parents[i]``. ``leader``: handle of its request."""
        ...

    def ended(self, ended: Ended) -> None:
        """An accepted request ended."""
        ...


class NoHooks:
    """Hooks that do nothing."""

    def block_filled(self, handle: int, name: bytes) -> None:
        pass

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        pass

    def beams_chosen(self, leader: int, parents: list[int]) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        pass


NO_HOOKS = NoHooks()

"""Scheduler hooks: callbacks for recorders, called during events and steps."""

from quire.protocol.wire.front_end_messages import Ended
from quire.scheduler_proc.requests.request import Request


class SchedulerHooks:
    """Callbacks of a Scheduler, which do nothing by default.

    They run while its state changes, so they must not read or call it.
    """

    def block_filled(self, handle: int, name: bytes) -> None:
        """A block of the request became full after the arrival. ``name``: its block hash."""

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """The request was admitted, for the first time or again, with ``num_hit_tokens`` from the prefix cache."""

    def continued(self, handle: int, parents: list[int]) -> None:
        """A request goes on with other parts: part i continues part ``parents[i]`` of those before."""

    def ended(self, ended: Ended) -> None:
        """An accepted request ended."""


NO_HOOKS = SchedulerHooks()

"""Fairness check: no request waits long while less urgent requests that arrived later run (I14)."""

from collections.abc import Collection

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.scheduler import Scheduler

MOST_OVERTAKEN = 100
"""Maximum number of steps that a request waits while requests of its tenant behind it in scheduling order run. Those
were admitted before it could be, and have at most 30 output tokens; a preempted request starts a new wait."""


class FairnessCheck:
    """Checks one scheduler incarnation. ``longest``: most steps that a request waited while one behind it ran."""

    def __init__(self) -> None:
        self.longest = 0
        self._overtaken: dict[int, int] = {}

    def decided(
        self,
        scheduler: Scheduler,
        step: SchedulerOutput,
        forked: Collection[Request] = (),
        running: Collection[int] = (),
    ) -> None:
        """Raise AssertionError if an admitted request was not first in order, or if a request has waited too long.

        Args:
            forked: children admitted in this step, before another tenant's request may have preempted an older one.
            running: handles of requests that were admitted before; a step computes them since it is their adapter's
                turn.
        """
        table = scheduler.table
        waiting, key = list(table.waiting), table.waiting.key
        if scheduler.suspects.alone is not None:
            self._overtaken.clear()  # a suspect runs alone, independently of the order
            return
        by_handle = {request.handle: request for request in table.running.values()}
        for new in step.new_requests:
            admitted = by_handle[new.handle]
            if new.handle in running or admitted.client < 0:  # beams continue in the place of their search
                continue
            before = step.removed if admitted in forked else ()
            behind = [other for other in waiting if other.account == admitted.account and other.handle not in before]
            assert all(key(admitted) < key(other) for other in behind), (
                f"{admitted!r} was admitted before a request ahead of it"
            )
        last: dict[int, tuple[float, ...]] = {}
        for request in table.running.values():
            last[request.account] = max(key(request), last.get(request.account, ()))
        behind_others = [request for request in waiting if key(request) < last.get(request.account, ())]
        waits = {request.handle: self._overtaken.get(request.handle, 0) + 1 for request in behind_others}
        self._overtaken = waits
        self.longest = max(self.longest, *waits.values(), 0)
        assert self.longest <= MOST_OVERTAKEN, "a request waits while requests behind it run"

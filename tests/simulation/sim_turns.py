"""Whose turn it is: nobody waits for long while those run who came later and are worth no more (I14)."""

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.scheduler import Scheduler

MOST_OVERTAKEN = 100
"""Steps in which somebody waits while others run that came behind it: those had begun before it could, and an answer
has 30 tokens at most; whoever is put out begins its wait anew."""


class Turns:
    """Of one scheduler's life. ``longest``: steps that anybody has waited while somebody ran who was behind it."""

    def __init__(self) -> None:
        self.longest = 0
        self._overtaken: dict[int, int] = {}

    def decided(self, scheduler: Scheduler, step: SchedulerOutput) -> None:
        """Raises AssertionError unless whoever begins now was first, or if somebody has waited for too long."""
        table = scheduler.table
        waiting, key = list(table.waiting), table.waiting.key
        if scheduler.suspects.alone is not None:
            self._overtaken.clear()  # one runs alone, whoever was first
            return
        by_handle = {request.handle: request for request in table.running.values()}
        for new in step.new_requests:
            admitted = by_handle[new.handle]
            behind = [other for other in waiting if other.tenant == admitted.tenant]
            assert all(key(admitted) < key(other) for other in behind), f"{admitted!r} has overtaken somebody"
        last = max((key(request) for request in table.running.values()), default=None)
        waits = {r.handle: self._overtaken.get(r.handle, 0) + 1 for r in waiting if last is not None and key(r) < last}
        self._overtaken = waits
        self.longest = max(self.longest, *waits.values(), 0)
        assert self.longest <= MOST_OVERTAKEN, "somebody waits while later ones run"

"""The copies of a simulated run: their ends and late loads as events of the Scheduler, and the hits they bring."""

from bisect import insort
from collections import Counter

import numpy as np

from quire.protocol.wire.transfer_messages import DiskContents, MoveBlocks
from quire.replay.costs.copies import CopyClock, Tiers
from quire.scheduler_proc.requests.events import LoadLate
from quire.scheduler_proc.scheduler import Scheduler

NEVER = float("inf")
_EMPTY = DiskContents(np.zeros(0, np.int32), np.zeros(0, np.int64), b"")
"""The contents of a new disk."""


class TierCopies:
    """Stands between the Scheduler and a CopyClock, as HostTransfers between the Scheduler and workers.

    Attributes:
        hit_tokens: by tier, the tokens of loads that were answered in time.
    """

    def __init__(self, scheduler: Scheduler, tiers: Tiers) -> None:
        self._scheduler = scheduler
        self._clock = CopyClock(tiers)
        self._num_host_pages = tiers.num_host_pages
        if tiers.num_disk_pages:
            scheduler.consume(_EMPTY)
        self._late: list[tuple[float, int]] = []
        """Deadline and number of each load that will not end in time, in order."""
        self._tokens: dict[int, dict[str, int]] = {}
        """Tokens by tier of each load in flight that is not late."""
        self.hit_tokens: Counter[str] = Counter()

    @property
    def next_time(self) -> float:
        """When the next transfer ends or is late; infinite if none is in flight."""
        return min(self._clock.next_end, self._late[0][0] if self._late else NEVER)

    def send_loads(self, now: float) -> None:
        """Send the Scheduler's loads."""
        for load in self._scheduler.transfers.take_loads():
            self._tokens[load.transfer] = self._tokens_of(load)
            deadline = now + self._scheduler.transfers.load_limit(load.transfer)
            # The end of a copy is known when it begins, so only loads that will be late are listed.
            if self._clock.send(load, now, now) > deadline:
                insort(self._late, (deadline, load.transfer))

    def send_stores(self, now: float, steps_end: float) -> None:
        """Send the Scheduler's stores. ``steps_end``: when all steps that were sent have run."""
        for store in self._scheduler.transfers.take_stores():
            self._clock.send(store, now, steps_end)

    def consume(self, now: float) -> None:
        """Report to the Scheduler what has ended or is late by ``now``."""
        while self.next_time <= now:
            answer = self._clock.take(self.next_time)
            if answer is not None:
                self.hit_tokens.update(self._tokens.pop(answer.transfer, {}))
                self._scheduler.consume(answer)
            else:
                late = self._late.pop(0)[1]
                del self._tokens[late]
                self._scheduler.consume(LoadLate(late))

    def _tokens_of(self, load: MoveBlocks) -> dict[str, int]:
        """Return the tokens of a load by tier. Groups with a window load fewer blocks: the longest part counts."""
        groups = self._scheduler.kv.layout.groups
        numbers = np.zeros(len(load.page_ids), np.int32) if load.groups is None else load.groups
        on_host = load.page_ids < self._num_host_pages
        tokens = {}
        for tier, chosen in (("host", numbers[on_host]), ("disk", numbers[~on_host])):
            # Without the parts of states, which are in groups behind these.
            counts: list[int] = np.bincount(chosen, minlength=len(groups))[: len(groups)].tolist()
            tokens[tier] = max(count * group.block_size for count, group in zip(counts, groups, strict=True))
        return tokens

"""What each tenant has of rows and blocks, and which request gives some up for another tenant's."""

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


class TenantShares:
    """Knows which tenants have too much; changes nothing. A tenant is *active* while requests of it run or wait.

    A fair share is an equal part of what there is for each active tenant. It is no limit: rows and blocks that
    are free go to the next request. But where none are left, a tenant with less than its share may claim them from one
    with more. After a claim neither side may claim them back, so requests do not preempt each other by turns.

    A tenant's earliest request is never given up for another tenant's: of each tenant, something gets on.
    """

    def __init__(self, table: RequestTable, kv: KVCacheManager) -> None:
        self._table = table
        self._kv = kv

    def blocks(self) -> Counter[int]:
        """Blocks that each tenant's running requests hold, those that several hold counted for each. O(requests)."""
        held: Counter[int] = Counter()
        for request in self._table.running.values():
            held[request.tenant] += self._kv.num_held_blocks(request)
        return held

    def has_its_share(self, request: Request, config: EngineConfig | None) -> bool:
        """Whether its tenant has a share of the rows that ``config`` allows; of blocks, where that is None."""
        if config is not None:
            return self._table.rows[request.tenant] >= self._share(config.max_num_seqs)
        return self.blocks()[request.tenant] > self._share(self._kv.pool.num_usable_blocks)

    def can_claim_row(self, request: Request, config: EngineConfig) -> Request | None:
        """The victim that ``request``, which finds no row, may preempt for one, or None."""
        rows, share = self._table.rows, self._share(config.max_num_seqs)
        if (len(rows) < 2 and request.tenant in rows) or rows[request.tenant] >= share:
            return None
        return self._youngest_of({t: n for t, n in rows.items() if n > share}, request)

    def can_claim_blocks(self, request: Request, num_blocks: int) -> Request | None:
        """The same for one that lacks blocks. ``num_blocks``: as many as it needs to begin."""
        rows = self._table.rows
        if len(rows) < 2 and request.tenant in rows:
            return None
        held, share = self.blocks(), self._share(self._kv.pool.num_usable_blocks)
        if held[request.tenant] + num_blocks > share:
            return None
        return self._youngest_of({t: n for t, n in held.items() if n > share and rows[t] > 1}, request)

    def heaviest(self, candidates: Iterable[Request]) -> Request | None:
        """Of several tenants, the last admitted of the one with the most blocks; None: each has one request only.

        ``candidates``: some that run, in order of admission.
        """
        rows = self._table.rows
        last = {request.tenant: request for request in candidates if rows[request.tenant] > 1}
        if not last:
            return None
        held = self.blocks()
        return last[max(last, key=lambda tenant: (held[tenant], last[tenant].order))]

    def _share(self, total: int) -> int:
        return max(total // max(self._table.num_tenants, 1), 1)

    def _youngest_of(self, over: dict[int, int], claimant: Request) -> Request | None:
        """The last admitted request of the tenant that is furthest ``over``, but none that is worth more."""
        if not over:
            return None
        tenant = max(over, key=lambda each: (over[each], each))
        running = [request for request in self._table.running.values() if request.tenant == tenant]
        return next((r for r in reversed(running[1:]) if self._may_give_way(r, claimant)), None)

    def _may_give_way(self, request: Request, claimant: Request) -> bool:
        return self._table.waiting.policy == "fcfs" or request.priority >= claimant.priority


def equal_parts(total: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """``total`` cut into equal parts, by tenant; what one does not want, the others get. At least 1 for each."""
    parts: dict[int, int] = {}
    left = total
    for count, (tenant, amount) in enumerate(sorted(wanted.items(), key=lambda item: (item[1], item[0]))):
        part = max(left // (len(wanted) - count), 1)
        parts[tenant] = min(amount, part)
        left = max(left - parts[tenant], 0)
    return parts

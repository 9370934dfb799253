"""Tenant shares: rows and blocks of each tenant, and the victims of claims between tenants."""

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


class TenantShares:
    """Finds tenants above their fair share, and the victims of claims; changes nothing.

    The fair share of a resource is an equal part for each tenant with running or waiting requests. It does not limit:
    free rows and blocks go to the next request. But if none are free, a tenant below its share may claim them from a
    tenant above it. After a claim neither side may claim them back, so requests do not preempt each other alternately.

    A tenant's earliest running request is never claimed, so each tenant makes progress.
    """

    def __init__(self, table: RequestTable, kv: KVCacheManager) -> None:
        self._table = table
        self._kv = kv

    def blocks(self) -> Counter[int]:
        """Return the blocks held by the running requests of each tenant; shared ones count per holder. O(requests)."""
        held: Counter[int] = Counter()
        for request in self._table.running.values():
            held[request.tenant] += self._kv.num_held_blocks(request)
        return held

    def has_its_share(self, request: Request, config: EngineConfig | None) -> bool:
        """Whether the request's tenant has its share of the rows of ``config``; of the blocks if ``config`` is None."""
        if config is not None:
            return self._table.rows[request.tenant] >= self._share(config.max_num_seqs)
        return self.blocks()[request.tenant] > self._share(self._kv.pool.num_usable_blocks)

    def can_claim_row(self, request: Request, config: EngineConfig) -> Request | None:
        """Return the victim that ``request`` may preempt for a batch slot, or None."""
        rows, share = self._table.rows, self._share(config.max_num_seqs)
        if (len(rows) < 2 and request.tenant in rows) or rows[request.tenant] >= share:
            return None
        return self._youngest_of({t: n for t, n in rows.items() if n > share}, request)

    def can_claim_blocks(self, request: Request, num_blocks: int) -> Request | None:
        """Return the victim that ``request`` may preempt for the ``num_blocks`` that it needs, or None."""
        rows = self._table.rows
        if len(rows) < 2 and request.tenant in rows:
            return None
        held, share = self.blocks(), self._share(self._kv.pool.num_usable_blocks)
        if held[request.tenant] + num_blocks > share:
            return None
        return self._youngest_of({t: n for t, n in held.items() if n > share and rows[t] > 1}, request)

    def heaviest(self, candidates: Iterable[Request]) -> Request | None:
        """Return the last admitted request of the tenant with the most blocks; None if no tenant has two requests.

        ``candidates``: running requests; of each tenant the last one is chosen.
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
        """Return the last admitted request of the tenant with the most in ``over`` that may be preempted, or None."""
        if not over:
            return None
        tenant = max(over, key=lambda each: (over[each], each))
        running = [request for request in self._table.running.values() if request.tenant == tenant]
        return next((r for r in reversed(running[1:]) if self._may_be_preempted(r, claimant)), None)

    def _may_be_preempted(self, request: Request, claimant: Request) -> bool:
        return self._table.waiting.policy == "fcfs" or request.priority >= claimant.priority


def equal_parts(total: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Divide ``total`` equally between tenants, at least 1 each; the unwanted rest of a part goes to the others."""
    parts: dict[int, int] = {}
    left = total
    for count, (tenant, amount) in enumerate(sorted(wanted.items(), key=lambda item: (item[1], item[0]))):
        part = max(left // (len(wanted) - count), 1)
        parts[tenant] = min(amount, part)
        left = max(left - parts[tenant], 0)
    return parts

"""Tenant shares: rows and blocks of each tenant, and the victims of claims between tenants."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import Statistics
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


class TenantShares:
    """Finds tenants above their fair share, and the victims of claims; changes nothing.

    The fair share of a resource is an equal part for each tenant with running or waiting requests. It does not limit:
    free rows and blocks go to the next request. But if none are free, a tenant below its share may claim them from a
    tenant above it. After a claim neither side may claim them back, so requests do not preempt each other alternately.

    A tenant's oldest running request is never claimed, so each tenant makes progress.
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

    def add_to(self, statistics: Statistics, config: EngineConfig) -> Statistics:
        """Return ``statistics`` with the service of each tenant, which other engines need if there are several."""
        if config.num_tenants < 2:
            return statistics
        return msgspec.structs.replace(statistics, tenant_service=sorted(self._table.waiting.service.items()))

    def has_its_share(self, request: Request, config: EngineConfig | None) -> bool:
        """Whether the request's tenant has its share of the rows of ``config``; of the blocks if ``config`` is None."""
        if config is not None:
            return self._table.rows[request.tenant] >= self._share(config.max_num_seqs)
        return self.blocks()[request.tenant] > self._share(self._kv.pool.num_usable_blocks)

    def can_claim_row(self, request: Request, config: EngineConfig) -> list[Request]:
        """Return the requests of which ``request`` may preempt one for a batch slot."""
        rows, share = self._table.rows, self._share(config.max_num_seqs)
        if (len(rows) < 2 and request.tenant in rows) or rows[request.tenant] >= share:
            return []
        return self._victims({t: n for t, n in rows.items() if n > share}, request)

    def can_claim_blocks(self, request: Request, num_blocks: int) -> list[Request]:
        """Return the requests of which ``request`` may preempt one for the ``num_blocks`` that it needs."""
        rows = self._table.rows
        if len(rows) < 2 and request.tenant in rows:
            return []
        held, share = self.blocks(), self._share(self._kv.pool.num_usable_blocks)
        if held[request.tenant] + num_blocks > share:
            return []
        return self._victims({t: n for t, n in held.items() if n > share and rows[t] > 1}, request)

    def heaviest(self, candidates: Iterable[Request]) -> list[Request]:
        """Return the ``candidates`` of the tenant with the most blocks, without its oldest request.

        Tenants without another candidate do not count. The list is empty if there are only those.
        """
        by_age = sorted(self._table.running.values(), key=self._table.waiting.key, reverse=True)
        oldest = {request.tenant: request for request in by_age}
        found: dict[int, list[Request]] = {}
        for request in candidates:
            if request is not oldest[request.tenant]:
                found.setdefault(request.tenant, []).append(request)
        if not found:
            return []
        held = self.blocks()
        return found[max(found, key=lambda tenant: (held[tenant], found[tenant][-1].order))]

    def _share(self, total: int) -> int:
        return max(total // max(self._table.num_tenants, 1), 1)

    def _victims(self, over: dict[int, int], claimant: Request) -> list[Request]:
        """Return the requests of the tenant with the most in ``over`` that may be preempted."""
        if not over:
            return []
        tenant = max(over, key=lambda each: (over[each], each))
        running = [request for request in self._table.running.values() if request.tenant == tenant]
        oldest = min(running, key=self._table.waiting.key)
        return [r for r in running if r is not oldest and self._may_be_preempted(r, claimant)]

    def _may_be_preempted(self, request: Request, claimant: Request) -> bool:
        return self._table.waiting.policy != "priority" or request.priority >= claimant.priority


def equal_parts(total: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Divide ``total`` equally between tenants, at least 1 each; the unwanted rest of a part goes to the others."""
    parts: dict[int, int] = {}
    left = total
    for count, (tenant, amount) in enumerate(sorted(wanted.items(), key=lambda item: (item[1], item[0]))):
        part = max(left // (len(wanted) - count), 1)
        parts[tenant] = min(amount, part)
        left = max(left - parts[tenant], 0)
    return parts

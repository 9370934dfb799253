"""Tenants: accounts for fair scheduling. Rows, blocks and prefills of each, and the victims of claims between them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from quire.protocol.block_hash import HashChain
from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import Statistics, TenantService, TenantState
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request


class Tenants(Feature):
    """Finds tenants above their fair share, and the victims of claims.

    The fair share of a resource is an equal part for each tenant with running or waiting requests. It does not limit:
    free rows and blocks go to the next request. But if none are free, a tenant below its share may claim them from a
    tenant above it. After a claim neither side may claim them back, so requests do not preempt each other alternately.

    A tenant's oldest running request is never claimed, so each tenant makes progress.

    Attributes:
        rows: number of running requests per tenant, without zeros.
    """

    name = "tenants"

    def __init__(self, core: Core) -> None:
        self._core, self._table, self._kv = core, core.table, core.kv
        self.rows: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """Number of tenants with running or waiting requests."""
        waiting = self._table.waiting.accounts
        return len(self.rows.keys() | waiting) if len(self.rows) + len(waiting) > 1 else len(self.rows) + len(waiting)

    def consumes(self) -> Mapping[type, Handler]:
        return {TenantService: self._served_elsewhere}

    def _served_elsewhere(self, event: TenantService, client: int) -> None:
        """Count what other engines have served, except to tenants that do not exist.

        Without requests it is not counted: they would begin with equal counts after this engine has been idle.
        """
        if not self._table.requests:
            return
        for tenant, num_tokens in event.served:
            if 0 <= tenant <= self._core.config.num_tenants:
                self._table.waiting.charge_elsewhere(tenant, num_tokens)

    # ---- requests

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        if not 0 <= event.tenant < 2**31:
            text = f"tenant must be from 0 to {2**31 - 1} (got {event.tenant})"
            raise Refusal("invalid_value", "tenant", text)

    def check_parent(self, event: Any, parent: Request) -> None:
        if event.tenant != parent.account and self._core.config.fair_admission:
            text = (
                f"a forked request must have the tenant of its parent, which is {parent.account} (got {event.tenant})"
            )
            raise Refusal("invalid_value", "tenant", text)

    def hashing(self, event: Any, chain: Callable[..., HashChain]) -> Callable[..., HashChain]:
        return partial(chain, tenant=event.tenant) if self._core.config.isolate_prefix_cache_by_key else chain

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        if event is None and parent is not None:
            request.account, request.turn = parent.account, parent.turn
        else:
            request.account = event.tenant if self._core.config.fair_admission else 0

    def started(self, request: Request) -> None:
        self.rows[request.account] += 1

    def stopped(self, request: Request) -> None:
        if self.rows[request.account] > 1:
            self.rows[request.account] -= 1
        else:
            del self.rows[request.account]

    def version(self, request: Request) -> object:
        return self.count

    # ---- shares

    def claims(self) -> bool:
        return self.count > 1

    def divide(self, plan: StepPlan, prefills: list[Request]) -> "PrefillParts | None":
        """Divide the prefill budget equally between the tenants that want it."""
        if self.count < 2:
            return None
        wanted = Counter({request.account: 0 for request in prefills})
        for request in prefills:
            wanted[request.account] += request.num_tokens_to_compute
        if self._table.waiting and prefills:  # the first waiting request may be admitted in this step
            first = self._table.waiting.peek_request()
            if first is not self._core.refused:
                wanted[first.account] += first.num_tokens
        return PrefillParts(equal_parts(plan.prefill_budget, wanted))

    def admit_before(self, plan: StepPlan, head: Request, reason: WaitReason) -> bool:
        """Admit a request of a tenant below its share ahead of ``head``, whose tenant has its share."""
        if self.count < 2:
            return False
        lacks_row = reason in (WaitReason.MAX_NUM_SEQS, WaitReason.RESULT_IN_FLIGHT)
        if not self._has_its_share(head, plan.config if lacks_row else None):
            return False
        for request in self._table.waiting.heads():
            if request is not head and not request.awaits_result:
                victims = self.victims(request, plan.config if lacks_row else None)
                if victims and self._core.admit(plan, request) is None:
                    return True
        return False

    def blocks(self) -> Counter[int]:
        """Return the blocks held by the running requests of each tenant; shared ones count per holder. O(requests)."""
        held: Counter[int] = Counter()
        for request in self._table.running.values():
            held[request.account] += self._kv.num_held_blocks(request)
        return held

    def _has_its_share(self, request: Request, config: EngineConfig | None) -> bool:
        """Whether the request's tenant has its share of the rows of ``config``; of the blocks if ``config`` is None."""
        if config is not None:
            return self.rows[request.account] >= self._share(config.max_num_seqs)
        return self.blocks()[request.account] > self._share(self._kv.pool.num_usable_blocks)

    def victims(self, request: Request, config: EngineConfig | None = None) -> list[Request]:
        rows, mine = self.rows, request.account
        if self.count < 2 or (len(rows) < 2 and mine in rows):
            return []
        if config is not None:
            share = self._share(config.max_num_seqs)
            over = {} if rows[mine] >= share else {t: n for t, n in rows.items() if n > share}
            return self._victims(over, request)
        held, share = self.blocks(), self._share(self._kv.pool.num_usable_blocks)
        if held[mine] + self._kv.num_blocks_for(request.num_tokens) > share:
            return []
        return self._victims({t: n for t, n in held.items() if n > share and rows[t] > 1}, request)

    def over_share(self, candidates: Iterable[Request]) -> list[Request]:
        """Return the ``candidates`` of the tenant with the most blocks, without its oldest request.

        Tenants without another candidate do not count. The list is empty if there are only those, or one tenant.
        """
        if len(self.rows) < 2:
            return []
        by_age = sorted(self._table.running.values(), key=self._table.waiting.key, reverse=True)
        oldest = {request.account: request for request in by_age}
        found: dict[int, list[Request]] = {}
        for request in candidates:
            if request is not oldest[request.account]:
                found.setdefault(request.account, []).append(request)
        if not found:
            return []
        held = self.blocks()
        return found[max(found, key=lambda tenant: (held[tenant], found[tenant][-1].order))]

    def _share(self, total: int) -> int:
        return max(total // max(self.count, 1), 1)

    def _victims(self, over: dict[int, int], claimant: Request) -> list[Request]:
        """Return the requests of the tenant with the most in ``over`` that may be preempted."""
        if not over:
            return []
        tenant = max(over, key=lambda each: (over[each], each))
        running = [request for request in self._table.running.values() if request.account == tenant]
        oldest = min(running, key=self._table.waiting.key)
        return [r for r in running if r is not oldest and self._may_be_preempted(r, claimant)]

    def _may_be_preempted(self, request: Request, claimant: Request) -> bool:
        return self._table.waiting.policy != "priority" or request.priority >= claimant.priority

    # ---- statistics and checks

    def describe(self, request: Request) -> dict[str, Any]:
        return {"tenant": request.account}

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        """Add the service of each tenant, which other engines need if there are several."""
        if self._core.config.num_tenants > 1:
            found = msgspec.structs.replace(found, tenant_service=sorted(self._table.waiting.service.items()))
        return msgspec.structs.replace(found, tenants=self._listing()) if is_listing else found

    def _listing(self) -> list[TenantState]:
        numbers = Counter(request.account for request in self._table.requests.values())
        running = self.rows + Counter(request.account for request in self._table.leaving.values())
        blocks = self.blocks()
        return [
            TenantState(tenant, running[tenant], number - running[tenant], blocks[tenant])
            for tenant, number in sorted(numbers.items())
        ]

    def check(self) -> None:
        assert Counter(r.account for r in self._table.running.values()) == self.rows, "wrong row counts of tenants"


class PrefillParts:
    """What each tenant may still have of the prefill budget of a step."""

    def __init__(self, parts: dict[int, int]) -> None:
        self._parts = parts

    def left(self, request: Request) -> int:
        return self._parts[request.account]

    def take(self, request: Request, num_tokens: int) -> None:
        self._parts[request.account] -= num_tokens


def equal_parts(total: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Divide ``total`` equally between tenants, at least 1 each; the unwanted rest of a part goes to the others."""
    parts: dict[int, int] = {}
    left = total
    for count, (tenant, amount) in enumerate(sorted(wanted.items(), key=lambda item: (item[1], item[0]))):
        part = max(left // (len(wanted) - count), 1)
        parts[tenant] = min(amount, part)
        left = max(left - parts[tenant], 0)
    return parts

"""Engines that learn what others have served: tenants are served over all of them as by one engine."""

import heapq
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from log_replay import replay
from scheduler_driver import Driver
from waiting_request import waiting_request

from quire.protocol.wire.front_end_messages import TenantService
from quire.scheduler_proc.requests.request_queue import OUTPUT_WEIGHT, RequestQueue

LARGEST = 100
"""Service of the largest request."""


class Engines:
    """Queues with rows that serve one token per second, which exchange what they have served every ``period``."""

    def __init__(self, *rows: int, period: int, seed: int) -> None:
        self.queues = [RequestQueue("fcfs") for _ in rows]
        self._rng = random.Random(seed)
        self._known: list[Counter[int]] = [Counter() for _ in rows]
        self._num_requests = 0
        self._period = period
        self._free = [(0.0, at) for at, count in enumerate(rows) for _ in range(count)]
        """(time, queue) at which each row is free."""

    def run(self, *tenants: list[int]) -> Counter[int]:
        """Serve for a while, with requests of these tenants waiting at each queue. Returns what each tenant got."""
        exchange_at = float(self._period)
        while (now := self._free[0][0]) < 100 * LARGEST:
            if self._period and now >= exchange_at:
                self._exchange()
                exchange_at += self._period
            _, at = heapq.heappop(self._free)
            queue = self.queues[at]
            for tenant in tenants[at]:
                if tenant not in queue.accounts:
                    self._num_requests += 1
                    queue.add_request(waiting_request(self._num_requests, tenant))
            request = queue.peek_request()
            queue.take_request(request)
            work = self._rng.randint(1, LARGEST)
            queue.charge(request.account, work)
            queue.check()
            heapq.heappush(self._free, (now + work, at))
        return sum((Counter(queue.service) for queue in self.queues), Counter())

    def _exchange(self) -> None:
        new = [Counter(queue.service) - known for queue, known in zip(self.queues, self._known, strict=True)]
        self._known = [Counter(queue.service) for queue in self.queues]
        for queue, own in zip(self.queues, new, strict=True):
            for tenant, served in (sum(new, Counter()) - own).items():
                queue.charge_elsewhere(tenant, served)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**32), st.integers(1, LARGEST))
def test_two_queues_serve_tenants_as_one_would(seed: int, period: int) -> None:
    """Tenant 1 has requests at both queues, tenant 2 only at the larger one."""
    one = Engines(3, period=0, seed=seed).run([1, 2])
    assert abs(one[1] - one[2]) <= 2 * LARGEST
    two = Engines(1, 2, period=period, seed=seed).run([1], [1, 2])
    assert abs(two[1] - two[2]) <= 2 * LARGEST + 3 * (period + LARGEST), "and what was served between two exchanges"
    apart = Engines(1, 2, period=0, seed=seed).run([1], [1, 2])
    assert apart[1] > 1.8 * apart[2]


def test_service_counts_while_requests_exist() -> None:
    driver = Driver(max_num_seqs=1, num_tenants=2)
    queue = driver.scheduler.table.waiting
    driver.consume(TenantService([(1, 10_000)]))
    driver.add("runs", [1], max_tokens=20, tenant=2)
    driver.add("a", [1] * 3, max_tokens=2, tenant=1)
    driver.add("b", [2] * 3, max_tokens=2, tenant=2)
    driver.step()
    assert queue.peek_request().request_id == "a", "an engine without requests counts nothing"
    driver.consume(TenantService([(1, 10_000), (77, 5), (-1, 5)]))
    assert queue.peek_request().request_id == "b"
    driver.consume(TenantService([(2, 20_000)]))
    assert queue.peek_request().request_id == "a"
    driver.finish()
    service = dict(driver.scheduler.statistics().tenant_service)
    assert service == {1: 3 + 2 * OUTPUT_WEIGHT, 2: 4 + 22 * OUTPUT_WEIGHT}, "without that of other engines"
    assert replay(driver.header, list(driver.log), check=True) is None
    assert driver.replay_lines() is None


def test_service_is_reported_with_several_tenants_only() -> None:
    for num_tenants in (0, 1):
        driver = Driver(num_tenants=num_tenants)
        driver.add("a", [1] * 3, max_tokens=2, tenant=num_tenants)
        driver.finish()
        assert driver.scheduler.statistics().tenant_service == []

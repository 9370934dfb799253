"""The waiting queue: requests that are accepted but not running, in scheduling order."""

import heapq
from collections.abc import Callable, Iterator, KeysView

from quire.scheduler_proc.requests.request import Request

POLICIES = ("fcfs", "priority")
"""Policies without a feature that ranks requests."""
OUTPUT_WEIGHT = 2
"""Service units of one output token. A prompt token counts 1; an output token occupies a row for a whole step."""

_Key = tuple[float, ...]


class RankedSet:
    """A set of small integers with ranks: the smallest rank is found in O(1), all other operations cost O(log n).

    Entries that were removed or replaced stay in the heap until they reach its top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int]] = []
        self._entries: dict[int, tuple[_Key, int]] = {}
        """The valid heap entry of each member."""

    def put(self, member: int, rank: _Key) -> None:
        """Add a member, or change its rank."""
        entry = (rank, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def discard(self, member: int) -> None:
        if self._entries.pop(member, None) is not None:
            self._tidy()

    def first(self) -> tuple[_Key, int]:
        """Return the smallest rank and its member. Raises IndexError if the set is empty."""
        heap = self._heap
        while self._entries.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def __len__(self) -> int:
        return len(self._entries)

    def members(self) -> KeysView[int]:
        return self._entries.keys()

    def rank(self, member: int) -> _Key:
        """Raises KeyError if ``member`` is not in the set."""
        return self._entries[member][0]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless every member has exactly one valid heap entry."""
        found = [entry for entry in self._heap if self._entries.get(entry[1]) is entry]
        assert len(found) == len(self._entries), "the queue and its heap disagree"


class _TenantQueue:
    """The waiting requests of one tenant, by handle, and their order."""

    __slots__ = ("order", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.order = RankedSet()

    @property
    def head(self) -> Request:
        return self.requests[self.order.first()[1]]


class RequestQueue:
    """Waiting requests. Tenants take turns; within one tenant the order is that of the policy.

    ``fcfs``: by arrival in this engine. ``priority``: lowest number first, then by ``arrival``, then as fcfs.
    Other policies: by ``rank``, which a feature sets, and which calls ``rerank`` when the rank of a request changes.

    Among the first requests of all tenants with equal priority (fcfs: all of them), the tenant that was served least is
    next. This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024): fair
    queueing that counts tokens. Computed prompt positions are charged at admission, output tokens OUTPUT_WEIGHT times
    at the end. Idle time gives no credit: a tenant that starts to wait counts as served at least as much as the least
    served tenant that waited at the last admission. A preempted request keeps the count of its admission, and so its
    place. What other engines of the server have served counts too, as soon as it is known (``charge_elsewhere``).

    Each operation costs O(log n). When no request exists, all counts are reset (``forget_service``).
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.rank: Callable[[Request], _Key] = lambda request: (request.number,)
        self._lines: dict[int, _TenantQueue] = {}
        self._num_waiting = 0
        self._turns = RankedSet()
        """Tenants with waiting requests, ranked by their first request; empty if there is only one tenant."""
        self._least = RankedSet()
        """The same tenants, ranked by their service count."""
        self._served: dict[int, int] = {}
        self._floor = 0
        self.service: dict[int, int] = {}
        """Service of each tenant by this engine since its start."""

    def key(self, request: Request) -> _Key:
        """Return the sort key within a tenant; the smallest key is first, and keys are unique."""
        if self.policy == "fcfs":
            return (request.number,)
        if self.policy == "priority":
            return (request.priority, request.arrival, request.number)
        return self.rank(request)

    def heads(self) -> list[Request]:
        """Return the first request of each tenant, in the order of their turns. O(tenants)."""
        return sorted((line.head for line in self._lines.values()), key=self._rank)

    @property
    def accounts(self) -> KeysView[int]:
        """Tenants with waiting requests."""
        return self._lines.keys()

    def add_request(self, request: Request) -> None:
        tenant = request.account
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _TenantQueue()
            self._served[tenant] = max(self._served.get(tenant, 0), self._floor)
        line.requests[request.handle] = request
        line.order.put(request.handle, self.key(request))
        self._num_waiting += 1
        if len(self._lines) > 1 and line.head is request:
            for each in (tenant,) if self._turns else tuple(self._lines):
                self._take_turn(each)

    def rerank(self, request: Request) -> None:
        """Move a waiting request to its place after its key has changed. Raises KeyError if it is not in the queue."""
        line = self._lines[request.account]
        line.order.put(request.handle, self.key(request))
        if self._turns:
            self._take_turn(request.account)

    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if none waits."""
        if len(self._lines) == 1:
            return next(iter(self._lines.values())).head
        return self._lines[self._turns.first()[1]].head

    def remove_request(self, request: Request) -> None:
        """Raises KeyError if the request is not in the queue."""
        if request not in self:
            raise KeyError(f"{request!r} is not in the waiting queue")
        tenant = request.account
        line = self._lines[tenant]
        was_first = line.head is request
        del line.requests[request.handle]
        line.order.discard(request.handle)
        self._num_waiting -= 1
        if not line.requests:
            del self._lines[tenant]
            for other in (tenant, *self._lines) if len(self._lines) == 1 else (tenant,):
                self._turns.discard(other)
                self._least.discard(other)
        elif was_first and self._turns:
            self._take_turn(tenant)

    def take_request(self, request: Request) -> None:
        """Remove an admitted request, and store its place in the queue for the case of a preemption."""
        least = int(self._least.first()[0][0]) if self._least else self._served[request.account]
        self._floor = max(self._floor, least)
        if request.turn < 0:
            request.turn = self._served[request.account]
        self.remove_request(request)

    def charge_for(self, request: Request, num_tokens: int) -> None:
        self.charge(request.account, num_tokens)

    def charge(self, tenant: int, num_tokens: int) -> None:
        """Add ``num_tokens`` to the service count of ``tenant``."""
        self.service[tenant] = self.service.get(tenant, 0) + num_tokens
        self.charge_elsewhere(tenant, num_tokens)

    def charge_elsewhere(self, tenant: int, num_tokens: int) -> None:
        """As ``charge``, for service by another engine. Call it only while a request exists."""
        self._served[tenant] = self._served.get(tenant, 0) + num_tokens
        if self._turns and tenant in self._lines:
            self._take_turn(tenant)

    def forget_service(self) -> None:
        """Reset the service counts. The queue must be empty, and no request may exist."""
        self._served.clear()
        self._floor = 0

    def _take_turn(self, tenant: int) -> None:
        """Update the place of one of several waiting tenants in the order of tenants."""
        self._least.put(tenant, (self._served[tenant],))
        self._turns.put(tenant, self._rank(self._lines[tenant].head))

    def _rank(self, head: Request) -> _Key:
        """Return the sort key of the tenant whose first request is ``head``; the lowest key is next."""
        turn = self._served[head.account] if head.turn < 0 else head.turn
        if self.policy == "fcfs":
            return (turn, head.number)
        if self.policy == "priority":
            return (head.priority, turn, head.arrival, head.number)
        return (turn, *self.key(head))

    def __contains__(self, request: Request) -> bool:
        line = self._lines.get(request.account)
        return line is not None and line.requests.get(request.handle) is request

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Iterate by tenant, in scheduling order within each tenant. O(n log n): for tests and reports."""
        for line in self._lines.values():
            yield from sorted(line.requests.values(), key=self.key)

    def check(self) -> None:
        """Raise AssertionError unless each request is queued once and the tenants are in the order of their turns."""
        assert sum(len(line.requests) for line in self._lines.values()) == self._num_waiting, (
            f"{self._num_waiting} waiting requests are counted, but the queues have another number"
        )
        self._turns.check()
        self._least.check()
        several = self._lines.keys() if len(self._lines) > 1 else set()
        assert self._turns.members() == several == self._least.members(), (
            f"the waiting tenants are {sorted(several)}, but the orders of turns and of service have others"
        )
        for tenant, line in self._lines.items():
            line.order.check()
            assert line.order.members() == line.requests.keys(), (
                f"tenant {tenant}: the queue and its heap have different requests"
            )
            assert all(request.account == tenant for request in line.requests.values()), (
                f"tenant {tenant}: a request in its queue belongs to another tenant"
            )
        for tenant in several:
            first = self._lines[tenant].head
            assert self._turns.rank(tenant) == self._rank(first), (
                f"tenant {tenant} is at a wrong place in the order of turns"
            )
            assert self._least.rank(tenant) == (self._served[tenant],), (
                f"tenant {tenant} is at a wrong place in the order of service"
            )

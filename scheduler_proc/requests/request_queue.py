"""The requests that wait, and the order in which they are taken."""

import heapq
from collections.abc import Iterator, KeysView

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.requests.request import Request

POLICIES = ("fcfs", "priority")
OUTPUT_WEIGHT = 2
"""What a token of an answer counts, where one of a prompt counts 1: it takes a row for a whole step."""

_Key = tuple[float, ...]


class RankedSet:
    """Small integers, each with a rank; the smallest rank is found in O(1), the rest costs O(log n).

    What was taken out, or ranked anew, stays in the heap until it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int]] = []
        self._entries: dict[int, tuple[_Key, int]] = {}
        """By member, the one entry of the heap that counts."""

    def put(self, member: int, rank: _Key) -> None:
        """Add a member, or rank it anew."""
        entry = (rank, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def discard(self, member: int) -> None:
        if self._entries.pop(member, None) is not None:
            self._tidy()

    def first(self) -> tuple[_Key, int]:
        """The smallest rank, and its member. Raises IndexError when there is none."""
        heap = self._heap
        while self._entries.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def __len__(self) -> int:
        return len(self._entries)

    def members(self) -> KeysView[int]:
        return self._entries.keys()

    def rank(self, member: int) -> _Key:
        """Raises KeyError for one that is not there."""
        return self._entries[member][0]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless every member can be found in the heap, once."""
        found = [entry for entry in self._heap if self._entries.get(entry[1]) is entry]
        assert len(found) == len(self._entries), "the queue and its heap disagree"


class _Line:
    """The waiting requests of one tenant, by handle, and their order."""

    __slots__ = ("order", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.order = RankedSet()

    @property
    def head(self) -> Request:
        return self.requests[self.order.first()[1]]


class RequestQueue:
    """Waiting requests: tenants take turns; within a tenant, and where there is one, the policy's order holds.

    ``fcfs``: by arrival in this engine. ``priority``: the lowest number first, then by ``arrival``, then as fcfs.

    Among first requests of equal priority (under fcfs: all) it is the turn of the tenant that has been served least:
    the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024), in which start-time
    fair queueing counts tokens. Positions of a prompt that are computed count when it is admitted, tokens of an answer
    OUTPUT_WEIGHT times when it ends. A tenant gets no credit for the time without requests: one that comes to wait
    counts as served as much as the least of those that waited when the last request was admitted. A request that was
    preempted keeps the count that it was admitted with, and so its place.

    Each operation costs O(log n). With no request alive, all counts are forgotten (``forget_service``).
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self._lines: dict[int, _Line] = {}
        self._num_waiting = 0
        self._turns = RankedSet()
        """Tenants that wait, by their first request's rank; empty where there is one, which needs none."""
        self._least = RankedSet()
        """The same, by what they were served."""
        self._served: dict[int, int] = {}
        self._floor = 0

    def key(self, request: Request) -> _Key:
        """Smaller goes first within a tenant; no two requests have the same."""
        if self.policy == "fcfs":
            return (request.number,)
        return (request.priority, request.arrival, request.number)

    def heads(self) -> list[Request]:
        """The first of each tenant, in the order of their turns. O(tenants)."""
        return sorted((line.head for line in self._lines.values()), key=self._rank)

    @property
    def tenants(self) -> KeysView[int]:
        """Those with requests here."""
        return self._lines.keys()

    def add_request(self, request: Request) -> None:
        tenant = request.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self._served[tenant] = max(self._served.get(tenant, 0), self._floor)
        line.requests[request.handle] = request
        line.order.put(request.handle, self.key(request))
        self._num_waiting += 1
        if len(self._lines) > 1 and line.head is request:
            for each in (tenant,) if self._turns else tuple(self._lines):
                self._take_turn(each)

    def peek_request(self) -> Request:
        """The next request. Raises IndexError when none waits."""
        if len(self._lines) == 1:
            return next(iter(self._lines.values())).head
        return self._lines[self._turns.first()[1]].head

    def remove_request(self, request: Request) -> None:
        """Raises KeyError when it does not wait."""
        if request not in self:
            raise KeyError(f"{request!r} does not wait here")
        tenant = request.tenant
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
        """It is admitted: ``remove_request``, and its place is kept for when it comes back."""
        least = int(self._least.first()[0][0]) if self._least else self._served[request.tenant]
        self._floor = max(self._floor, least)
        if request.turn < 0:
            request.turn = self._served[request.tenant]
        self.remove_request(request)

    def charge(self, tenant: int, num_tokens: int) -> None:
        """``tenant`` was given so much."""
        self._served[tenant] = self._served.get(tenant, 0) + num_tokens
        if self._turns and tenant in self._lines:
            self._take_turn(tenant)

    def forget_service(self) -> None:
        """For an empty queue, when no request lives: no tenant has been served anything."""
        self._served.clear()
        self._floor = 0

    def _take_turn(self, tenant: int) -> None:
        """One of several that wait: rank it anew."""
        self._least.put(tenant, (self._served[tenant],))
        self._turns.put(tenant, self._rank(self._lines[tenant].head))

    def _rank(self, head: Request) -> _Key:
        """Of its tenant, among tenants."""
        turn = self._served[head.tenant] if head.turn < 0 else head.turn
        if self.policy == "fcfs":
            return (turn, head.number)
        return (head.priority, turn, head.arrival, head.number)

    def __contains__(self, request: Request) -> bool:
        line = self._lines.get(request.tenant)
        return line is not None and line.requests.get(request.handle) is request

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Tenant by tenant, each in the order in which it would be taken: for tests and reports, O(n log n)."""
        for line in self._lines.values():
            yield from sorted(line.requests.values(), key=self.key)

    def check(self) -> None:
        """Raise AssertionError unless each request can be found, once, and each tenant has its right turn."""
        assert sum(len(line.requests) for line in self._lines.values()) == self._num_waiting, (
            "waiting requests are miscounted"
        )
        self._turns.check()
        self._least.check()
        several = self._lines.keys() if len(self._lines) > 1 else set()
        assert self._turns.members() == several == self._least.members(), "a tenant has no turn"
        for tenant, line in self._lines.items():
            line.order.check()
            assert line.order.members() == line.requests.keys(), "the queue and its heap disagree"
            assert all(request.tenant == tenant for request in line.requests.values()), "in another one's line"
        for tenant in several:
            first = self._lines[tenant].head
            assert self._turns.rank(tenant) == self._rank(first), f"tenant {tenant} has a wrong turn"
            assert self._least.rank(tenant) == (self._served[tenant],), f"tenant {tenant} is wrongly ranked"

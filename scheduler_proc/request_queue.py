"""Who waits, in which order they are taken."""

import heapq
from collections.abc import Iterator

from quire.protocol.errors import ConfigError
from quire.scheduler_proc.request import Request

POLICIES = ("fcfs", "priority")

_Key = tuple[float, ...]
_Entry = tuple[_Key, Request]


class RequestQueue:
    """Waiting requests by the order of the policy; a preempted one goes back to its old place.

    ``fcfs``: by arrival in this engine. ``priority``: the lowest number first, then by ``arrival``, then as fcfs.
    Adding and taking cost O(log n), removing from anywhere O(1): removed entries stay in the heap until they surface.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self._heap: list[_Entry] = []
        self._waiting: dict[int, _Entry] = {}
        """By handle, the one entry of the heap that counts."""

    def key(self, request: Request) -> _Key:
        """Smaller goes first; no two requests have the same."""
        if self.policy == "fcfs":
            return (request.number,)
        return (request.priority, request.arrival, request.number)

    def add_request(self, request: Request) -> None:
        entry = (self.key(request), request)
        self._waiting[request.handle] = entry
        heapq.heappush(self._heap, entry)

    def peek_request(self) -> Request:
        """Who is next. Raises IndexError when nobody waits."""
        while self._waiting.get(self._heap[0][1].handle) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove_request(self, request: Request) -> None:
        """Raises KeyError when it does not wait."""
        if request not in self:
            raise KeyError(f"{request!r} does not wait here")
        del self._waiting[request.handle]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = list(self._waiting.values())
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        entry = self._waiting.get(request.handle)
        return entry is not None and entry[1] is request

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be taken: for tests and reports, O(n log n)."""
        return (request for _, request in sorted(self._waiting.values()))

    def check(self) -> None:
        """Raise AssertionError unless everyone who waits can be found in the heap, once."""
        found = [entry for entry in self._heap if self._waiting.get(entry[1].handle) is entry]
        assert len(found) == len(self._waiting), "the queue and its heap disagree"

"""How many answers of each API key wait for their first token; and the bound on it, looked at before any is submitted.

A bound on waiting, not on running: what a key may take of the running batch is the scheduler's to share out, which
leaves no room empty while others ask for nothing.
"""

from collections import Counter

from quire.protocol.errors import InvalidRequest


class KeyQueues:
    """``most``: answers of one key that may wait; 0: any number. Requests without keys are one key's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_waiting: Counter[int] = Counter()

    def enter(self, tenant: int, num_answers: int) -> "Place":
        """A place for all answers of one request, or for none.

        Raises:
            InvalidRequest: they could never all wait, or (rate_limit_exceeded) the key has too many waiting already.
        """
        if self._most and num_answers > self._most:
            raise InvalidRequest(f"prompts times n must be at most {self._most} with this API key", "n")
        waiting = self._num_waiting[tenant]
        if self._most and waiting + num_answers > self._most:
            text = f"{waiting} answers wait already with this API key; at most {self._most} may"
            raise InvalidRequest(text, None, "rate_limit_exceeded")
        return Place(self._num_waiting, tenant, num_answers)

    def num_waiting(self, tenant: int) -> int:
        return self._num_waiting[tenant]


class Place:
    """The answers of one request that still wait. A context manager: afterwards none of them does."""

    def __init__(self, num_waiting: Counter[int], tenant: int, num_answers: int) -> None:
        self._num_waiting = num_waiting
        self._tenant = tenant
        self._waiting = set(range(num_answers))
        num_waiting[tenant] += num_answers

    def begun(self, index: int) -> None:
        """Something came for answer ``index``."""
        if index in self._waiting:
            self._waiting.discard(index)
            self._take_off(1)

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *exception: object) -> None:
        self._take_off(len(self._waiting))
        self._waiting.clear()

    def _take_off(self, count: int) -> None:
        self._num_waiting[self._tenant] -= count
        if not self._num_waiting[self._tenant]:
            del self._num_waiting[self._tenant]

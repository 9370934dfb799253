"""Limit on the sequences per tenant that wait for their first token.

There is no limit on running sequences: the scheduler shares the batch between tenants. A fixed share would leave rows
empty while other tenants have no requests.
"""

import sys
from collections import Counter

from quire.protocol.errors import InvalidRequest


class KeyQueues:
    """Waiting sequences of all tenants: API keys, or client addresses if the server has no keys.

    ``limit``: most waiting sequences per tenant, or 0 for no limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_waiting: Counter[int] = Counter()

    def enter(self, tenant: int, num_sequences: int, *, is_limited: bool = True) -> "WaitingSequences":
        """Add all sequences of one request, or none. ``is_limited``: no front end has admitted it before.

        Raises:
            InvalidRequest: the request alone exceeds the limit, or (rate_limit_exceeded) it does with those waiting.
        """
        limit = self.limit if is_limited and self.limit else sys.maxsize
        if num_sequences > limit:
            text = f"prompts times n must be at most {self.limit} per API key or address (got {num_sequences})"
            raise InvalidRequest(text, "n")
        waiting = self._num_waiting[tenant]
        if waiting + num_sequences > limit:
            text = f"{waiting} sequences of this API key or address are waiting (limit {self.limit}): retry later"
            raise InvalidRequest(text, None, "rate_limit_exceeded")
        return WaitingSequences(self._num_waiting, tenant, num_sequences)


class WaitingSequences:
    """The waiting sequences of one request. A context manager: its exit removes those that are left."""

    def __init__(self, num_waiting: Counter[int], tenant: int, num_sequences: int) -> None:
        self._num_waiting = num_waiting
        self._tenant = tenant
        self._waiting = set(range(num_sequences))
        num_waiting[tenant] += num_sequences

    def remove(self, index: int) -> None:
        """Remove sequence ``index`` when its first delta arrives; no-op for later ones."""
        if index in self._waiting:
            self._waiting.discard(index)
            self._subtract(1)

    def reduce_to(self, num_sequences: int) -> None:
        """Remove sequences until this many are left."""
        surplus = len(self._waiting) - num_sequences
        if surplus > 0:
            self._subtract(surplus)
            for _ in range(surplus):
                self._waiting.pop()

    def __enter__(self) -> "WaitingSequences":
        return self

    def __exit__(self, *exception: object) -> None:
        self._subtract(len(self._waiting))
        self._waiting.clear()

    def _subtract(self, count: int) -> None:
        self._num_waiting[self._tenant] -= count
        if not self._num_waiting[self._tenant]:
            del self._num_waiting[self._tenant]

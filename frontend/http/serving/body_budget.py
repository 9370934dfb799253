"""Limit on the memory of all request bodies without a response, shared between clients."""

from collections import Counter

from quire.frontend.http.schema.errors import ApiError

MOST_BYTES = 512 * 1024 * 1024
# The first bytes of each body do not count: uvicorn may buffer as many per connection, before anything reads them.
FREE_BYTES = 64 * 1024


class BodyBudget:
    """The bytes of large bodies, per client.

    A client may hold as many bytes as are left for all others. One client alone can therefore use half of the budget,
    and n clients get one part in n + 1 each: none of them can use up the budget. Bodies of at most ``free_bytes`` are
    never refused.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, free_bytes: int = FREE_BYTES) -> None:
        self._left = most_bytes
        self._free_bytes = free_bytes
        self._held: Counter[int | str] = Counter()

    def take(self, client: int | str, before: int, size: int) -> None:
        """Count ``size`` more bytes of a body that had ``before``.

        Raises:
            ApiError: 503, there is no room for them. They are not counted.
        """
        counted = self._counted(before + size) - self._counted(before)
        if not counted:
            return
        if self._held[client] + counted > self._left:
            raise ApiError(503, "too many large request bodies: retry later", None, "too_many_bodies")
        self._held[client] += counted
        self._left -= counted

    def release(self, client: int | str, size: int) -> None:
        """Subtract a body of which ``size`` bytes were counted."""
        counted = self._counted(size)
        self._left += counted
        self._held[client] -= counted
        if not self._held[client]:
            del self._held[client]

    def _counted(self, size: int) -> int:
        return max(size - self._free_bytes, 0)


class HeldBytes:
    """The bytes of one client's body in a ``BodyBudget``."""

    def __init__(self, budget: BodyBudget, client: int | str) -> None:
        self._budget = budget
        self._client = client
        self._size = 0

    def resize(self, size: int) -> None:
        """Count ``size`` bytes instead of those before.

        Raises:
            ApiError: 503, there is no room for them; the size is as before.
        """
        if size > self._size:
            self._budget.take(self._client, self._size, size - self._size)
        else:
            self._budget.release(self._client, self._size)
            self._budget.take(self._client, 0, size)
        self._size = size

    def grow(self, size: int) -> None:
        self.resize(self._size + size)

"""The search for the least number of engines."""


class Search:
    """Finds the least number in a span that is enough, if more are never worse. Each number is tried at most once.

    It doubles the number until it is enough, then bisects: runs with too few engines take longest.
    """

    def __init__(self, first: int, last: int) -> None:
        self._low, self._high = first, last
        """The answer, if there is one, is between these."""
        self._next: int | None = first
        self.answer: int | None = None
        """The least number that is known to be enough."""

    @property
    def next_number(self) -> int | None:
        """The number to try next; None: the search has ended, with or without an answer."""
        return self._next

    def tried(self, is_enough: bool) -> None:
        """Take the result of ``next_number``."""
        number = self._next
        assert number is not None, "the search has ended"
        if is_enough:
            self.answer, self._high = number, number - 1
        else:
            self._low = number + 1
        if self._low > self._high:
            self._next = None
        elif self.answer is None:
            self._next = min(2 * number, self._high)
        else:
            self._next = (self._low + self._high) // 2

"""The search for the least number of engines."""


class LeastSearch:
    """Finds the least number in a span that is enough, if more are never worse. Each number is tried at most once.

    It doubles the number until it is enough, then bisects: runs with too few engines take longest.
    """

    def __init__(self, first: int, last: int) -> None:
        self._low, self._high = first, last
        """The answer, if there is one, is between these."""
        self.next_number: int | None = first
        """The number to try next; None: the search has ended, with or without an answer."""
        self.answer: int | None = None
        """The least number that is known to be enough."""

    def tried(self, is_enough: bool) -> None:
        """Take the result of ``next_number``."""
        number = self.next_number
        assert number is not None, "the search has ended"
        if is_enough:
            self.answer, self._high = number, number - 1
        else:
            self._low = number + 1
        if self._low > self._high:
            self.next_number = None
        elif self.answer is None:
            self.next_number = min(2 * number, self._high)
        else:
            self.next_number = (self._low + self._high) // 2

"""Pauses of tools: how long the tool that an answer calls runs, until the next turn of its program arrives."""

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

DEFAULT_S = 2.0
"""Seconds for which blocks are kept while too little is known: about what a tool that reads a file takes."""
MIN_PAUSES = 8
"""Pauses from which a distribution is used."""
MAX_PAUSES = 512
"""Pauses that a distribution remembers: with more, all counts are halved."""
NUM_ENDLESS = 2
"""Pauses that never end, which every distribution has from the start: each program ends at some time."""
MAX_TOOLS = 64
"""Tools with a distribution of their own. Beyond, that of the tool which was not called for the longest time goes."""
# The quotients are written out, because pow() may differ between machines, and a replay must not.
EDGES = tuple(accumulate((1.189207115002721,) * 66, float.__mul__, initial=0.05))
"""Upper edges of the intervals in which pauses are counted, in seconds: four per doubling, from 0.05 s to 4600 s."""


class KeepChoice(NamedTuple):
    """How long the blocks of a program are kept.

    Attributes:
        seconds: from the end of the turn; 0: they are not kept.
        probability: that the next turn arrives by then.
        num_pauses: on which it is based; 0 while too little is known.
    """

    seconds: float
    probability: float = 0.0
    num_pauses: int = 0


class PauseCounts:
    """The distribution of pauses: how many ended in each interval, and how many last longer than expected."""

    __slots__ = ("_counts", "_num_open", "total")

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES) + 1)
        self._num_open = 0
        self.total = 0

    def add(self, seconds: float, *, was_late: bool) -> None:
        if was_late and self._num_open:
            self._num_open -= 1
            self.total -= 1
        self._counts[bisect_left(EDGES, seconds)] += 1
        self._added()

    def add_open(self) -> None:
        self._num_open += 1
        self._added()

    def _added(self) -> None:
        self.total += 1
        if self.total > MAX_PAUSES:
            self._counts = [count // 2 for count in self._counts]
            self._num_open //= 2
            self.total = sum(self._counts) + self._num_open

    def best(self, benefit: float, cost: float) -> KeepChoice:
        """See ``ToolPauses.choose``. There must be a pause."""
        best, choice = 0.0, KeepChoice(0.0, 0.0, self.total)
        counts, total = self._counts, self.total + NUM_ENDLESS
        num_ended, held, start = 0.0, 0.0, 0.0
        for at, edge in enumerate(EDGES):
            # Half of the pauses of each interval count for its neighbours, because few pauses leave gaps.
            count = (counts[max(at - 1, 0)] + 2 * counts[at] + counts[at + 1]) / 4.0
            left = total - num_ended
            if cost * held > benefit * total:
                break
            # Blocks are kept until the next turn arrives; those that arrive in this interval do so in its middle.
            held += (edge - start) * (left - count / 2)
            num_ended += count
            if count and (gain := benefit * num_ended - cost * held) > best:
                best, choice = gain, KeepChoice(edge, num_ended / total, self.total)
            start = edge
        return choice

    def quantile(self, share: float, default: float) -> float:
        """Return the seconds that this share of the pauses do not exceed; ``default`` below MIN_PAUSES pauses."""
        if self.total < MIN_PAUSES:
            return default
        counts = list(accumulate(self._counts))
        at = bisect_left(counts, share * counts[-1])
        return EDGES[at] if at < len(EDGES) else default


class ToolPauses:
    """Learns the pauses of each tool, and chooses for how long blocks are kept.

    While a tool has few pauses, those of all tools count.
    """

    def __init__(self) -> None:
        self._all = PauseCounts()
        self._tools: dict[str, PauseCounts] = {}

    def ended(self, tool: str, seconds: float, *, was_late: bool) -> None:
        """Learn a pause that has ended. ``was_late``: ``late`` was called for it."""
        for counts in (self._all, self._counts(tool)):
            counts.add(seconds, was_late=was_late)

    def late(self, tool: str) -> None:
        """Note that a pause lasts longer than the blocks were kept for it; it may never end."""
        for counts in (self._all, self._counts(tool)):
            counts.add_open()

    def choose(self, tool: str, benefit: float, cost: float) -> KeepChoice:
        """Return the time for which the expected benefit exceeds the expected cost by most.

        Args:
            benefit: seconds that a hit saves.
            cost: seconds that each second costs for which the blocks are kept.
        """
        own = self._tools.get(tool)
        counts = self._all if own is None or own.total < MIN_PAUSES else own
        if counts.total < MIN_PAUSES:
            return KeepChoice(DEFAULT_S if benefit > cost * DEFAULT_S else 0.0)
        return counts.best(benefit, cost)

    def _counts(self, tool: str) -> PauseCounts:
        """Return the distribution of this tool, which was called last."""
        counts = self._tools.pop(tool, None) or PauseCounts()
        self._tools[tool] = counts
        if len(self._tools) > MAX_TOOLS:
            del self._tools[next(iter(self._tools))]
        return counts

    def tools(self) -> list[str]:
        """Return the names of the tools with enough pauses, those called last at the end."""
        return [name for name, counts in self._tools.items() if counts.total >= MIN_PAUSES]

"""The requests of each engine, as the router knows them: how much is computed before another one begins."""

from collections import OrderedDict

from quire.protocol.routing import KEY_BYTES

Ticket = tuple[int, int]
"""(client, ticket of the client)."""


class Placement:
    """A request on an engine.

    Attributes:
        num_uncached: tokens that were not cached there when it was routed.
        first_key: key of the first block of them, or empty.
        has_started: whether its prompt is computed.
    """

    __slots__ = ("engine", "first_key", "has_started", "num_uncached")

    def __init__(self, engine: int, num_uncached: int, first_key: bytes = b"", *, has_started: bool = False) -> None:
        self.engine = engine
        self.num_uncached = num_uncached
        self.first_key = first_key
        self.has_started = has_started


class EngineLoad:
    """Totals of one engine's placements, and what else is remembered about it.

    Attributes:
        queue_tokens: uncached tokens of requests that have not started.
        num_waiting, num_running: requests that have not started, and those that have.
        measured: its pace as of EngineMeasured.
        pace: what a token takes, beside the fastest device.
        last_chosen: number of the last choice of this engine, from 1; 0 without one.
        keys_per_block: number of keys of a request per block of the counted group.
    """

    __slots__ = (
        "_adapters",
        "_expected",
        "keys_per_block",
        "last_chosen",
        "measured",
        "num_running",
        "num_waiting",
        "pace",
        "queue_tokens",
    )

    def __init__(self) -> None:
        self.queue_tokens = 0
        self.num_waiting = 0
        self.num_running = 0
        self.measured = self.pace = 1.0
        self.last_chosen = 0
        self.keys_per_block = 1
        self._expected: dict[bytes, tuple[Ticket, bytes]] = {}
        """Prompts that are being computed, by their first key that was not cached: the newest of equal ones."""
        self._adapters: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

    def add(self, ticket: Ticket, placement: Placement, keys: bytes) -> None:
        """Count a request. ``keys``: those of its blocks, which are cached soon."""
        if placement.has_started:
            self.num_running += 1
            return
        self.num_waiting += 1
        self.queue_tokens += placement.num_uncached
        if placement.first_key:
            # The newest of equal prompts is kept, because it will be waiting the longest.
            self._expected[placement.first_key] = ticket, keys

    def start(self, ticket: Ticket, placement: Placement) -> None:
        if not placement.has_started:
            self.remove(ticket, placement)
            placement.has_started = True
            self.num_running += 1

    def remove(self, ticket: Ticket, placement: Placement) -> None:
        if placement.has_started:
            self.num_running -= 1
            return
        self.num_waiting -= 1
        self.queue_tokens -= placement.num_uncached
        expected = self._expected.get(placement.first_key)
        # A newer request with the same prompt may have taken the entry over; it stays until that one has started.
        if expected is not None and expected[0] == ticket:
            del self._expected[placement.first_key]

    def num_expected(self, keys: bytes, num_cached: int) -> int:
        """Return how many blocks of a prompt will be cached soon, because requests that compute them are routed here.

        Args:
            keys: the prompt's block keys.
            num_cached: blocks of it that are cached.
        """
        at = num_cached * KEY_BYTES
        expected = self._expected.get(keys[at : at + KEY_BYTES])
        return num_cached if expected is None else num_common(keys, expected[1], num_cached + 1)

    def has_adapter(self, adapter: bytes) -> bool:
        return adapter in self._adapters

    def use_adapter(self, adapter: bytes, max_loras: int) -> None:
        """Note that a request with this adapter is routed here. The adapters used last are loaded."""
        self._adapters[adapter] = None
        self._adapters.move_to_end(adapter)
        # A guess at what the engine has loaded. It asks nothing of the engine, and a wrong guess costs a load.
        while len(self._adapters) > max_loras:
            self._adapters.popitem(last=False)

    def check(self) -> None:
        """Assert that as many prompts are remembered as wait, at most."""
        assert len(self._expected) <= self.num_waiting


def num_common(keys: bytes, others: bytes, least: int) -> int:
    """Return the number of first keys that two prompts share, of which ``least`` are known to be shared.

    A key covers its whole prefix: prompts that share one share all before it.
    """
    low, high = least, min(len(keys), len(others)) // KEY_BYTES
    while low < high:  # the first ``low`` are shared, and at most ``high``
        middle = (low + high) // 2
        at = middle * KEY_BYTES
        if keys[at : at + KEY_BYTES] == others[at : at + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low

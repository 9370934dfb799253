"""What threads of a simulated worker do beside the steps: loads of LoRA adapters, and encodings of items."""

from heapq import heappop, heappush

from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.item_messages import Encoded
from quire.protocol.wire.worker_messages import SideJob, SideJobDone

ADAPTER_LOAD_S = 0.05
"""Default duration of a load from a folder: 100 MB at 2 GB/s."""
COPY_SHARE = 0.1
"""Part of that duration for a load from host memory."""
ENCODE_ROW_S = 3e-5
"""Duration of an encoding per row: an image of 1,000 rows, which are 4,000 patches, takes 30 ms on a current GPU."""


class SideClock:
    """Knows when side work ends. Each kind has a thread, which does one after the other."""

    def __init__(self, load_seconds: float = ADAPTER_LOAD_S) -> None:
        """``load_seconds``: duration of a load from the adapter's folder."""
        self._load_seconds = load_seconds
        self._copies: set[int] = set()
        """Numbers of the adapters in host memory."""
        self._free_at: dict[type, float] = {}
        """By kind, when the newest one ends."""
        self._ends: list[tuple[float, int, SideJobDone]] = []
        """A heap: ends, an order of what ends together, and answers."""
        self._num_sent = 0

    @property
    def next_end(self) -> float:
        """When the next one ends; infinite if there is none."""
        return self._ends[0][0] if self._ends else float("inf")

    def send(self, work: SideJob, now: float) -> None:
        answer: SideJobDone
        if isinstance(work, LoadAdapter):
            was_cached = work.number in self._copies
            self._copies.difference_update(work.dropped)
            self._copies.add(work.number)
            seconds = self._load_seconds * (COPY_SHARE if was_cached else 1.0)
            answer = AdapterLoaded(work.number, work.slot, seconds=seconds, was_cached=was_cached)
        else:
            seconds = ENCODE_ROW_S * work.item.num_rows if work.item.kind == "image" else 0.0
            answer = Encoded(work.item.key, seconds=seconds)
        self._free_at[type(work)] = end = max(now, self._free_at.get(type(work), now)) + seconds
        self._num_sent += 1
        heappush(self._ends, (end, self._num_sent, answer))

    def take(self, now: float) -> SideJobDone | None:
        """Return the answer to the next one, if that has ended by ``now``."""
        return heappop(self._ends)[2] if self.next_end <= now else None

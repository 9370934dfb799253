"""The loads of LoRA adapters on a simulated worker."""

from collections import deque

from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter

ADAPTER_LOAD_S = 0.05
"""Default duration of a load from a folder: 100 MB at 2 GB/s."""
COPY_SHARE = 0.1
"""Part of that duration for a load from host memory."""


class AdapterClock:
    """Knows when loads end: one after the other, beside the steps, as those of a worker's loader thread."""

    def __init__(self, load_seconds: float = ADAPTER_LOAD_S) -> None:
        """``load_seconds``: duration of a load from the adapter's folder."""
        self._load_seconds = load_seconds
        self._copies: set[int] = set()
        """Numbers of the adapters in host memory."""
        self._loads: deque[tuple[float, AdapterLoaded]] = deque()
        """End and answer of the loads that have not ended."""
        self._free_at = 0.0

    @property
    def next_end(self) -> float:
        """When the next load ends; infinite if there is none."""
        return self._loads[0][0] if self._loads else float("inf")

    def send(self, load: LoadAdapter, now: float) -> None:
        was_cached = load.number in self._copies
        self._copies.difference_update(load.dropped)
        self._copies.add(load.number)
        seconds = self._load_seconds * (COPY_SHARE if was_cached else 1.0)
        self._free_at = max(now, self._free_at) + seconds
        answer = AdapterLoaded(load.number, load.slot, seconds=seconds, was_cached=was_cached)
        self._loads.append((self._free_at, answer))

    def take(self, now: float) -> AdapterLoaded | None:
        """Return the answer to the next load, if that has ended by ``now``."""
        return self._loads.popleft()[1] if self.next_end <= now else None
